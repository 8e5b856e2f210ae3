//! The operations of the document are those that the server has: the routes of Driftline's own
//! API, with what their handlers take and answer, and the operations of Firecracker's.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use syn::visit::{self, Visit};
use syn::{Expr, ExprMethodCall, GenericArgument, ImplItemFn, ItemFn, Lit, PathArguments, Type};
use tests::{ApiDocument, DocumentedOperation};

use super::model::{ApiModel, BodyKind, parse, root, rust_files};

/// The sources of the API's routes and handlers.
const API: &str = "vmm/control/src/api";
/// The function with the routes of processes that are not configured over the API.
const SHARED: &str = "shared";
/// The source of Firecracker's operations.
const OPERATIONS: &str = "vmm/control/src/firecracker/operation.rs";
/// Other ways to add routes, which this test would not see.
const UNSEEN: [&str; 5] = ["nest", "nest_service", "route_service", "fallback_service", "on"];

/// A handler: the stem of its file, and its name.
type HandlerPlace = (String, String);

/// A route of Driftline's API.
struct ApiRoute {
    tag: &'static str,
    handler: HandlerPlace,
}

/// The types of a handler's request and answer.
#[derive(Default)]
struct HandlerTypes {
    body: Option<String>,
    query: Option<String>,
    /// The type of a JSON answer.
    page: Option<String>,
    /// Whether the answer is a status alone.
    is_status: bool,
}

/// Reads routes and handlers from sources.
#[derive(Default)]
struct RouteReader {
    file: String,
    function: String,
    /// By method and path.
    routes: BTreeMap<String, ApiRoute>,
    handlers: BTreeMap<HandlerPlace, HandlerTypes>,
}

impl RouteReader {
    fn read() -> Self {
        let mut reader = Self::default();
        let files = rust_files(&root().join(API));
        for path in
            files.iter().filter(|path| !path.parent().is_some_and(|dir| dir.ends_with("tests")))
        {
            // A module's name is that of its file or, for `mod.rs`, of its directory.
            let module =
                if path.ends_with("mod.rs") { path.parent() } else { Some(path.as_path()) };
            let name = module.and_then(|of| of.file_stem()?.to_str());
            reader.file = name.expect("a name").to_owned();
            reader.visit_file(&parse(path));
        }
        reader
    }

    /// Adds the routes of `path`, whose methods and handlers are a chain such as
    /// `get(a).post(b)`.
    fn add(&mut self, path: &str, chain: &Expr) {
        let (method, arguments) = match chain {
            Expr::Call(call) => {
                let Expr::Path(function) = &*call.func else { panic!("{path}: not a function") };
                let name = &function.path.segments.last().expect("a name").ident;
                (name.to_string(), &call.args)
            }
            Expr::MethodCall(call) => {
                self.add(path, &call.receiver);
                (call.method.to_string(), &call.args)
            }
            _ => panic!("{path}: neither a method nor a chain of methods"),
        };
        let known = ["get", "put", "post", "patch", "delete"];
        assert!(known.contains(&method.as_str()), "{path}: {method} is not a method");
        let Some(Expr::Path(handler)) = arguments.first() else { panic!("{path}: no handler") };
        let mut names: Vec<_> =
            handler.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let name = names.pop().expect("a name");
        let file = names.pop().unwrap_or_else(|| self.file.clone());
        let tag = if self.function == SHARED { "run" } else { "driftline" };
        let route = ApiRoute { tag, handler: (file, name) };
        let twice = self.routes.insert(format!("{} {path}", method.to_ascii_uppercase()), route);
        assert!(twice.is_none(), "{method} {path} has two routes");
    }
}

impl<'ast> Visit<'ast> for RouteReader {
    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.function = item.sig.ident.to_string();
        let mut types = TypeReader::default();
        item.sig.inputs.iter().for_each(|input| types.visit_fn_arg(input));
        let (body, query) = (types.inner("JsonBody"), types.inner("Query"));
        let mut types = TypeReader::default();
        types.visit_return_type(&item.sig.output);
        let page = types.inner("JsonAnswer").or_else(|| types.inner("Json"));
        let is_status = types.names.contains("StatusCode");
        let place = (self.file.clone(), self.function.clone());
        self.handlers.insert(place, HandlerTypes { body, query, page, is_status });
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.function = item.sig.ident.to_string();
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        let name = call.method.to_string();
        let first = match call.args.first() {
            Some(Expr::Lit(lit)) => Some(&lit.lit),
            _ => None,
        };
        if let ("route", Some(Lit::Str(path))) = (name.as_str(), first) {
            self.add(&path.value(), &call.args[1]);
        }
        let is_path = matches!(first, Some(Lit::Str(path)) if path.value().starts_with('/'));
        assert!(!is_path || !UNSEEN.contains(&name.as_str()), "{}.rs: {name}", self.file);
        visit::visit_expr_method_call(self, call);
    }
}

/// Collects the names in a type, and the argument of each.
#[derive(Default)]
struct TypeReader {
    names: BTreeSet<String>,
    inner: BTreeMap<String, String>,
}

impl TypeReader {
    /// Returns the name of the argument of the type `name`.
    fn inner(&self, name: &str) -> Option<String> {
        self.inner.get(name).cloned()
    }
}

impl<'ast> Visit<'ast> for TypeReader {
    fn visit_path_segment(&mut self, segment: &'ast syn::PathSegment) {
        let name = segment.ident.to_string();
        if let PathArguments::AngleBracketed(arguments) = &segment.arguments
            && let Some(GenericArgument::Type(Type::Path(inner))) = arguments.args.first()
        {
            let inner = &inner.path.segments.last().expect("a name").ident;
            self.inner.insert(name.clone(), inner.to_string());
        }
        self.names.insert(name);
        visit::visit_path_segment(self, segment);
    }
}

/// Returns the name of the type that a schema refers to.
fn type_of(schema: Option<&Value>) -> Option<&str> {
    schema?["$ref"].as_str()?.rsplit('/').next()
}

fn names<'d>(operations: impl Iterator<Item = DocumentedOperation<'d>>) -> BTreeSet<String> {
    operations.map(|operation| operation.name()).collect()
}

#[test]
fn own_operations_equal_the_routes() {
    let (document, reader) = (ApiDocument::read(), RouteReader::read());
    for tag in ["driftline", "run"] {
        let tagged = document.operations().filter(|operation| operation.has_tag(tag));
        let routes = reader.routes.iter().filter(|(_, route)| route.tag == tag);
        assert_eq!(names(tagged), routes.map(|(name, _)| name.clone()).collect(), "{tag}");
    }
}

#[test]
fn own_bodies_equal_those_of_handlers() {
    let (document, reader, model) = (ApiDocument::read(), RouteReader::read(), ApiModel::read());
    for (name, route) in &reader.routes {
        let operation = document.operations().find(|operation| operation.name() == *name);
        let operation = operation.unwrap_or_else(|| panic!("{name} is not in the document"));
        let types = &reader.handlers[&route.handler];
        let body = type_of(operation.request_schema(route.tag));
        let has_body = operation.value().get("requestBody").is_some();
        assert_eq!((body, has_body), (types.body.as_deref(), types.body.is_some()), "{name}");
        let answers = operation.statuses();
        assert_eq!(answers.contains(&200), !types.is_status, "{name}: status 200");
        if types.is_status && !operation.has_tag("firecracker") {
            assert!(answers.contains(&204), "{name}: status 204");
        }
        if let Some(page) = types.page.as_deref().filter(|page| model.has(page)) {
            let content = &operation.response(200)["content"]["application/json"];
            let schema = operation.of_tag(&content["schema"], route.tag);
            assert_eq!(type_of(Some(schema)), Some(page), "{name}");
        }
        let documented: BTreeMap<_, _> = operation
            .parameters("query")
            .into_iter()
            .map(|p| (p["name"].as_str().expect("a name").to_owned(), p["required"] == true))
            .collect();
        assert_eq!(documented, query_fields(&model, types.query.as_deref()), "{name}");
    }
}

/// Returns the parameters that a type of queries has, and whether they are required.
fn query_fields(model: &ApiModel, name: Option<&str>) -> BTreeMap<String, bool> {
    let Some(name) = name else { return BTreeMap::new() };
    let schema = model.schema(name, BodyKind::Request);
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let fields = schema["properties"].as_object().expect("fields").keys();
    fields.map(|name| (name.clone(), required.contains(&name.as_str().into()))).collect()
}

/// Returns Firecracker's operations, and the type of the body where a variant has one.
fn firecracker_operations() -> BTreeMap<String, Option<String>> {
    let file = parse(&root().join(OPERATIONS));
    let enums = file.items.iter().filter_map(|item| match item {
        syn::Item::Enum(item) if item.ident == "Operation" => Some(item),
        _ => None,
    });
    let mut found = BTreeMap::new();
    for variant in enums.flat_map(|item| &item.variants) {
        let docs = variant.attrs.iter().filter_map(|attribute| match &attribute.meta {
            syn::Meta::NameValue(meta) if meta.path.is_ident("doc") => match &meta.value {
                Expr::Lit(lit) => match &lit.lit {
                    Lit::Str(text) => Some(text.value()),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        });
        let text: String = docs.collect();
        let names = text.split('`').skip(1).step_by(2).filter(|name| name.contains(" /"));
        let names: Vec<_> = names.map(str::to_owned).collect();
        assert!(!names.is_empty(), "the comment of {} names no operation", variant.ident);
        let mut types = TypeReader::default();
        variant.fields.iter().for_each(|field| types.visit_field(field));
        // A variant of two operations has the type of one.
        let body = types.names.into_iter().next().filter(|_| names.len() == 1);
        found.extend(names.into_iter().map(|name| (name, body.clone())));
    }
    found
}

#[test]
fn firecrackers_operations_equal_those_parsed() {
    let (document, model) = (ApiDocument::read(), ApiModel::read());
    let parsed = firecracker_operations();
    let tagged = document.operations().filter(|operation| operation.has_tag("firecracker"));
    assert_eq!(names(tagged), parsed.keys().cloned().collect());
    for operation in document.operations() {
        let body = parsed.get(&operation.name()).cloned().flatten();
        if let Some(body) = body.filter(|body| model.has(body)) {
            let documented = type_of(operation.request_schema("firecracker"));
            assert_eq!(documented, Some(body.as_str()), "{}", operation.name());
        }
    }
}
