//! `docs/openapi.yaml`: what it says about requests and replies.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use jsonschema::Validator;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// The methods that an operation of the document can have.
const METHODS: [&str; 5] = ["get", "put", "post", "patch", "delete"];

/// The description of the API.
#[derive(Debug)]
pub struct ApiDocument {
    root: Value,
    /// By schema. To make one takes 10 ms, because it gets all components.
    validators: Mutex<BTreeMap<String, Arc<Validator>>>,
}

/// An operation of the document.
#[derive(Clone, Copy, Debug)]
pub struct DocumentedOperation<'d> {
    document: &'d ApiDocument,
    /// The method, in lower case.
    method: &'static str,
    /// The path, with `{id}`.
    path: &'d str,
    value: &'d Value,
}

impl ApiDocument {
    /// Reads the document.
    pub fn read() -> &'static Self {
        static DOCUMENT: OnceLock<ApiDocument> = OnceLock::new();
        DOCUMENT.get_or_init(|| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.yaml");
            let text = std::fs::read_to_string(&path).expect("docs/openapi.yaml");
            let root = serde_saphyr::from_str(&text).expect("YAML");
            Self { root, validators: Mutex::default() }
        })
    }

    /// Returns the whole document.
    pub fn root(&self) -> &Value {
        &self.root
    }

    /// Returns the schemas of the components, with their names.
    pub fn schemas(&self) -> impl Iterator<Item = (&str, &Value)> {
        let schemas = self.root["components"]["schemas"].as_object().expect("schemas");
        schemas.iter().map(|(name, schema)| (name.as_str(), schema))
    }

    /// Returns all operations.
    pub fn operations(&self) -> impl Iterator<Item = DocumentedOperation<'_>> {
        let paths = self.root["paths"].as_object().expect("paths");
        paths.iter().flat_map(move |(path, item)| {
            METHODS.iter().filter_map(move |method| {
                let value = item.get(method)?;
                Some(DocumentedOperation { document: self, method, path, value })
            })
        })
    }

    /// Returns the operation that a process of `tags` does on `method` and `path`.
    pub fn find(&self, tags: &[&str], method: &str, path: &str) -> Option<DocumentedOperation<'_>> {
        let path = path.split('?').next().unwrap_or_default();
        self.operations().find(|operation| {
            let parts = operation.path.split('/');
            let is_path = parts.clone().count() == path.split('/').count()
                && parts.zip(path.split('/')).all(|(part, given)| part == "{id}" || part == given);
            is_path
                && operation.method.eq_ignore_ascii_case(method)
                && tags.iter().any(|tag| operation.has_tag(tag))
        })
    }

    /// Follows a reference.
    pub fn resolved<'d>(&'d self, value: &'d Value) -> &'d Value {
        match value.get("$ref").and_then(Value::as_str) {
            None => value,
            Some(reference) => {
                let found = reference.strip_prefix('#').and_then(|at| self.root.pointer(at));
                self.resolved(found.unwrap_or_else(|| panic!("{reference} is nothing")))
            }
        }
    }

    /// Returns why `instance` is not what a schema describes; `None` if it is.
    pub fn violation(&self, schema: &Value, instance: &Value) -> Option<String> {
        let validator = self.validator(schema);
        let error = validator.iter_errors(instance).next()?;
        Some(format!("{} at {:?}", error, error.instance_path().to_string()))
    }

    fn validator(&self, schema: &Value) -> Arc<Validator> {
        let mut validators = self.validators.lock();
        let make = || {
            let components = &self.root["components"];
            let whole = json!({ "allOf": [schema], "components": components });
            let validator = jsonschema::draft202012::new(&whole);
            Arc::new(validator.unwrap_or_else(|e| panic!("{schema}: {e}")))
        };
        validators.entry(schema.to_string()).or_insert_with(make).clone()
    }
}

impl<'d> DocumentedOperation<'d> {
    /// Returns method and path.
    pub fn name(&self) -> String {
        format!("{} {}", self.method(), self.path)
    }

    /// Returns the method in upper case.
    pub fn method(&self) -> String {
        self.method.to_ascii_uppercase()
    }

    /// Returns the path, with `{id}`.
    pub fn path(&self) -> &'d str {
        self.path
    }

    /// Returns what the document says.
    pub fn value(&self) -> &'d Value {
        self.value
    }

    /// Returns the tags.
    pub fn tags(&self) -> Vec<&'d str> {
        let tags = self.value["tags"].as_array().expect("tags");
        tags.iter().filter_map(Value::as_str).collect()
    }

    /// Returns whether the operation has a tag.
    pub fn has_tag(&self, tag: &str) -> bool {
        self.tags().contains(&tag)
    }

    /// Returns the parameters of a place, `path` or `query`. One of the operation replaces one of
    /// its path that has the same name.
    pub fn parameters(&self, place: &str) -> Vec<&'d Value> {
        let of_path = &self.document.root["paths"][self.path]["parameters"];
        let listed = [&self.value["parameters"], of_path].into_iter().filter_map(Value::as_array);
        let mut parameters: Vec<&Value> = Vec::new();
        for parameter in listed.flatten().map(|parameter| self.document.resolved(parameter)) {
            let is_replaced = parameters.iter().any(|other| other["name"] == parameter["name"]);
            if parameter["in"] == place && !is_replaced {
                parameters.push(parameter);
            }
        }
        parameters
    }

    /// Returns the body's schema for a tag; `None` if there is no body.
    pub fn request_schema(&self, tag: &str) -> Option<&'d Value> {
        let content = self.value.get("requestBody")?.pointer("/content/application~1json");
        Some(self.of_tag(&content.expect("JSON")["schema"], tag))
    }

    /// Returns the examples of the body.
    pub fn request_examples(&self) -> Vec<&'d Value> {
        examples(&self.value["requestBody"]["content"]["application/json"])
    }

    /// Returns the statuses, without the default.
    pub fn statuses(&self) -> Vec<u16> {
        let responses = self.value["responses"].as_object().expect("responses");
        responses.keys().filter_map(|status| status.parse().ok()).collect()
    }

    /// Returns the answer of a status, or the default.
    pub fn response(&self, status: u16) -> &'d Value {
        let responses = &self.value["responses"];
        let response = responses.get(status.to_string()).or_else(|| responses.get("default"));
        self.document.resolved(response.expect("a response"))
    }

    /// Returns why a reply to a process of `tag` is not documented; `None` if it is.
    pub fn violation(&self, tag: &str, status: u16, body: Option<&str>) -> Option<String> {
        let Some(content) = self.response(status).get("content") else {
            let body = body.filter(|body| !body.is_empty());
            return body.map(|body| format!("{}: a body is not documented: {body}", self.name()));
        };
        let body = body.unwrap_or_default();
        let wrong = match content.get("application/json") {
            Some(json) => match serde_json::from_str(body) {
                Ok(page) => self.document.violation(self.of_tag(&json["schema"], tag), &page),
                Err(e) => Some(e.to_string()),
            },
            None => body.is_empty().then(|| "no text".to_owned()),
        };
        wrong.map(|wrong| format!("{}, {status}: {wrong}: {body}", self.name()))
    }

    /// Returns the schema of a tag: of two, the first is that of the first tag.
    pub fn of_tag(&self, schema: &'d Value, tag: &str) -> &'d Value {
        let tags = self.tags();
        match schema.get("anyOf").and_then(Value::as_array) {
            Some(schemas) if schemas.len() == tags.len() => {
                let at = tags.iter().position(|own| *own == tag);
                &schemas[at.unwrap_or_else(|| panic!("{} has no {tag}", self.name()))]
            }
            _ => schema,
        }
    }
}

/// Returns the examples of a content.
pub fn examples(content: &Value) -> Vec<&Value> {
    let examples = content.get("examples").and_then(Value::as_object);
    examples.into_iter().flat_map(|examples| examples.values()).map(|e| &e["value"]).collect()
}
