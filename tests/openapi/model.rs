//! The JSON of the product's types, derived from their Rust source and serde's attributes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use syn::visit::{self, Visit};
use syn::{Attribute, Field, Fields, GenericArgument, ItemEnum, ItemStruct, PathArguments, Type};

/// The folders of crates whose types are in requests and answers.
const FOLDERS: [&str; 7] = [
    "checkpoint/src",
    "checkpoint/guest/src",
    "checkpoint/store/src",
    "dirty-tracker/src",
    "migrate/src",
    "vmm/control/src",
    "vmm/machine/src",
];

/// Whether a type is part of a request's body. What is part of both is described as in requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BodyKind {
    Request,
    Answer,
}

/// A struct or enum of the product.
enum ModelItem {
    Struct(ItemStruct),
    Enum(ItemEnum),
}

/// All structs and enums of the product, by name.
#[derive(Default)]
pub struct ApiModel(BTreeMap<String, ModelItem>);

impl<'ast> Visit<'ast> for ApiModel {
    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        self.0.insert(item.ident.to_string(), ModelItem::Struct(item.clone()));
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        self.0.insert(item.ident.to_string(), ModelItem::Enum(item.clone()));
        visit::visit_item_enum(self, item);
    }
}

impl ApiModel {
    pub fn read() -> Self {
        let mut model = Self::default();
        for folder in FOLDERS {
            for path in rust_files(&root().join(folder)) {
                model.visit_file(&parse(&path));
            }
        }
        model
    }

    /// Returns whether serde derives the JSON of a type.
    pub fn has(&self, name: &str) -> bool {
        match self.0.get(name) {
            Some(ModelItem::Struct(item)) => {
                is_derived(&item.attrs) && matches!(item.fields, Fields::Named(_))
            }
            Some(ModelItem::Enum(item)) => is_derived(&item.attrs),
            None => false,
        }
    }

    /// Returns the schema, without descriptions, of a type that the model [has](Self::has).
    pub fn schema(&self, name: &str, kind: BodyKind) -> Value {
        match &self.0[name] {
            ModelItem::Struct(item) => {
                let serde = SerdeAttributes::of(&item.attrs);
                let mut object = ObjectSchema::new(&serde, kind);
                object.add(self, &item.fields.iter().collect::<Vec<_>>(), &serde, kind);
                object.into()
            }
            ModelItem::Enum(item) => self.enum_schema(item, kind),
        }
    }

    fn enum_schema(&self, item: &ItemEnum, kind: BodyKind) -> Value {
        let serde = SerdeAttributes::of(&item.attrs);
        let mut names = Vec::new();
        let mut others = Vec::new();
        for variant in &item.variants {
            let own = SerdeAttributes::of(&variant.attrs);
            let name = own.rename.unwrap_or_else(|| serde.cased(&variant.ident.to_string()));
            let fields: Vec<_> = variant.fields.iter().collect();
            if serde.is_untagged {
                others.push(self.type_schema(&fields[0].ty));
            } else if let Some(tag) = &serde.tag {
                let mut object = ObjectSchema::new(&serde, kind);
                object.insert(tag, json!({ "const": name }), true);
                object.add(self, &fields, &SerdeAttributes::default(), kind);
                others.push(object.into());
            } else if fields.is_empty() {
                names.push(name);
            } else {
                let mut object = ObjectSchema::new(&serde, BodyKind::Answer);
                object.insert(&name, self.type_schema(&fields[0].ty), true);
                others.push(object.into());
            }
        }
        if others.is_empty() {
            return json!({ "type": "string", "enum": names });
        }
        if !names.is_empty() {
            others.insert(0, json!({ "type": "string", "enum": names }));
        }
        json!({ "oneOf": others })
    }

    /// Returns the schema of a field's type.
    fn type_schema(&self, ty: &Type) -> Value {
        let path = match ty {
            Type::Path(path) => path,
            Type::Reference(reference) => return self.type_schema(&reference.elem),
            Type::Tuple(tuple) if tuple.elems.is_empty() => return json!({ "type": "null" }),
            Type::Array(array) => {
                // Only arrays that are always empty.
                assert!(matches!(*array.elem, Type::Tuple(_)), "an array in a body");
                return json!({ "type": "array", "maxItems": 0 });
            }
            _ => panic!("a type that no body has"),
        };
        let segment = path.path.segments.last().expect("a name");
        let inner: Vec<&Type> = match &segment.arguments {
            PathArguments::AngleBracketed(arguments) => arguments
                .args
                .iter()
                .filter_map(|a| if let GenericArgument::Type(t) = a { Some(t) } else { None })
                .collect(),
            _ => Vec::new(),
        };
        let at_most = |most: u64| json!({ "type": "integer", "minimum": 0, "maximum": most });
        match segment.ident.to_string().as_str() {
            "bool" => json!({ "type": "boolean" }),
            "u8" => at_most(u8::MAX.into()),
            "u16" => at_most(u16::MAX.into()),
            "u32" => at_most(u32::MAX.into()),
            "u64" | "usize" => json!({ "type": "integer", "minimum": 0 }),
            "NonZeroU64" => json!({ "type": "integer", "minimum": 1 }),
            "f64" => json!({ "type": "number" }),
            "Option" => nullable(self.type_schema(inner[0])),
            "Box" => self.type_schema(inner[0]),
            "Vec" => json!({ "type": "array", "items": self.type_schema(inner[0]) }),
            "BTreeMap" => {
                let values = self.type_schema(inner[1]);
                json!({ "type": "object", "additionalProperties": values })
            }
            "Value" => json!({}),
            name if self.has(name) => json!({ "$ref": format!("#/components/schemas/{name}") }),
            // Paths, addresses, and types with a text form of their own.
            _ => json!({ "type": "string" }),
        }
    }
}

/// Returns a schema that also accepts null.
fn nullable(mut schema: Value) -> Value {
    if schema["type"] == "null" {
        return schema;
    }
    match schema.get_mut("type") {
        Some(one) => {
            *one = json!([one.clone(), "null"]);
            schema
        }
        None => json!({ "anyOf": [schema, { "type": "null" }] }),
    }
}

/// The schema of an object under construction.
struct ObjectSchema {
    required: Vec<String>,
    properties: Map<String, Value>,
    others: Value,
}

impl ObjectSchema {
    fn new(serde: &SerdeAttributes, kind: BodyKind) -> Self {
        let ignores_others = kind == BodyKind::Request && !serde.denies_unknown;
        Self { required: Vec::new(), properties: Map::new(), others: ignores_others.into() }
    }

    fn insert(&mut self, name: &str, schema: Value, is_required: bool) {
        if is_required {
            self.required.push(name.to_owned());
        }
        self.properties.insert(name.to_owned(), schema);
    }

    fn add(
        &mut self,
        model: &ApiModel,
        fields: &[&Field],
        container: &SerdeAttributes,
        kind: BodyKind,
    ) {
        for field in fields {
            let serde = SerdeAttributes::of(&field.attrs);
            let ident = field.ident.as_ref().expect("a named field").to_string();
            let name = serde.rename.clone().unwrap_or_else(|| container.cased(&ident));
            let mut schema = model.type_schema(&field.ty);
            if serde.is_flattened {
                self.flatten(model, schema, kind);
                continue;
            }
            if kind == BodyKind::Answer && serde.is_not_shown {
                continue;
            }
            let is_option = schema.get("anyOf").is_some() || schema["type"].is_array();
            if serde.has_text_form {
                let text = json!({ "type": "string" });
                schema = if is_option { nullable(text) } else { text };
            }
            let may_be_absent = match kind {
                BodyKind::Request => is_option || serde.has_default || container.has_default,
                BodyKind::Answer => serde.is_skipped_if,
            };
            if kind == BodyKind::Answer && serde.is_skipped_if && is_option {
                // Absent rather than null.
                schema = match schema.get("anyOf") {
                    Some(schemas) => schemas[0].clone(),
                    None => {
                        schema["type"] = schema["type"][0].clone();
                        schema
                    }
                };
            }
            self.insert(&name, schema, !may_be_absent);
        }
    }

    fn flatten(&mut self, model: &ApiModel, schema: Value, kind: BodyKind) {
        let Some(name) = schema["$ref"].as_str().and_then(|r| r.rsplit('/').next()) else {
            // A map: its keys are beside the fields.
            self.others = schema["additionalProperties"].clone();
            return;
        };
        let inner = model.schema(name, kind);
        let required = inner["required"].as_array().into_iter().flatten();
        self.required.extend(required.filter_map(Value::as_str).map(str::to_owned));
        self.properties.extend(inner["properties"].as_object().cloned().unwrap_or_default());
    }
}

impl From<ObjectSchema> for Value {
    fn from(mut object: ObjectSchema) -> Self {
        object.required.sort();
        let mut schema = json!({
            "type": "object",
            "properties": object.properties,
            "additionalProperties": object.others,
        });
        if !object.required.is_empty() {
            schema["required"] = object.required.into();
        }
        schema
    }
}

/// What serde's attributes of an item, a variant or a field say.
#[derive(Default)]
struct SerdeAttributes {
    rename: Option<String>,
    rename_all: Option<String>,
    tag: Option<String>,
    is_untagged: bool,
    denies_unknown: bool,
    has_default: bool,
    is_flattened: bool,
    is_not_shown: bool,
    is_skipped_if: bool,
    has_text_form: bool,
}

impl SerdeAttributes {
    fn of(attributes: &[Attribute]) -> Self {
        let mut serde = Self::default();
        for attribute in attributes.iter().filter(|a| a.path().is_ident("serde")) {
            let read = attribute.parse_nested_meta(|meta| {
                let name = meta.path.get_ident().map(ToString::to_string).unwrap_or_default();
                let value = match meta.value() {
                    Ok(value) => Some(value.parse::<syn::LitStr>()?.value()),
                    Err(_) => None,
                };
                match name.as_str() {
                    "rename" => serde.rename = value,
                    "rename_all" => serde.rename_all = value,
                    "tag" => serde.tag = value,
                    "untagged" => serde.is_untagged = true,
                    "deny_unknown_fields" => serde.denies_unknown = true,
                    "default" => serde.has_default = true,
                    "flatten" => serde.is_flattened = true,
                    "skip_serializing" => serde.is_not_shown = true,
                    "skip_serializing_if" => serde.is_skipped_if = true,
                    // It reads the type's own JSON more strictly.
                    "deserialize_with" if value.as_deref() == Some("checked") => {}
                    "with" | "deserialize_with" => serde.has_text_form = true,
                    "expecting" => {}
                    other => panic!("serde's {other} is not known here"),
                }
                Ok(())
            });
            read.expect("attributes of serde");
        }
        serde
    }

    /// Returns the name of a field or variant under `rename_all`.
    fn cased(&self, name: &str) -> String {
        match self.rename_all.as_deref() {
            None => name.to_owned(),
            Some("kebab-case") => {
                let mut cased = String::new();
                for (at, c) in name.chars().enumerate() {
                    if c.is_ascii_uppercase() && at > 0 {
                        cased.push('-');
                    }
                    cased.push(if c == '_' { '-' } else { c.to_ascii_lowercase() });
                }
                cased
            }
            Some(other) => panic!("names in {other} are not known here"),
        }
    }
}

/// Returns whether serde derives the JSON of an item.
fn is_derived(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let is_derive = list.path.is_ident("derive") || list.path.is_ident("cfg_attr");
        is_derive && list.tokens.to_string().contains("erialize")
    })
}

/// Returns the repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Parses a source file.
pub fn parse(path: &Path) -> syn::File {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the Rust files of a folder and of those in it.
pub fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}
