//! The document is valid: its references, schemas, names and examples.

use std::collections::BTreeSet;

use serde_json::Value;
use tests::{ApiDocument, DocumentedOperation, examples};

/// Calls `visit` with each object of a document.
fn each_object<'d>(value: &'d Value, visit: &mut impl FnMut(&'d Value)) {
    match value {
        Value::Object(fields) => {
            visit(value);
            fields.values().for_each(|value| each_object(value, visit));
        }
        Value::Array(values) => values.iter().for_each(|value| each_object(value, visit)),
        _ => {}
    }
}

#[test]
fn references_name_what_exists() {
    let document = ApiDocument::read();
    let mut named = BTreeSet::new();
    each_object(document.root(), &mut |object| {
        if let Some(reference) = object["$ref"].as_str() {
            document.resolved(object);
            named.insert(reference.to_owned());
        }
    });
    for kind in ["parameters", "responses", "schemas"] {
        let components = document.root()["components"][kind].as_object().expect("components");
        for name in components.keys() {
            assert!(named.contains(&format!("#/components/{kind}/{name}")), "{name} is not used");
        }
    }
}

#[test]
fn schemas_are_json_schemas() {
    let document = ApiDocument::read();
    assert_eq!(document.root()["openapi"], "3.1.0");
    for (name, schema) in document.schemas() {
        assert!(jsonschema::meta::is_valid(schema), "{name}");
        assert!(schema["description"].is_string(), "{name} has no description");
        for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
            let is_described = schema["description"].is_string() || schema["$ref"].is_string();
            assert!(is_described, "{name}.{field} has no description");
        }
    }
}

#[test]
fn operations_are_whole() {
    let document = ApiDocument::read();
    let tags = document.root()["tags"].as_array().expect("tags");
    let tags: BTreeSet<_> = tags.iter().filter_map(|tag| tag["name"].as_str()).collect();
    let mut ids = BTreeSet::new();
    for operation in document.operations() {
        let (name, value) = (operation.name(), operation.value());
        assert!(ids.insert(value["operationId"].as_str().expect("an id")), "{name}: id");
        assert!(value["summary"].as_str().is_some_and(|text| text.ends_with('.')), "{name}");
        assert!(operation.tags().iter().all(|tag| tags.contains(tag)), "{name}: tags");
        assert!(!operation.tags().is_empty(), "{name}: no tag");
        let in_path = operation.parameters("path").len();
        assert_eq!(in_path, operation.path().matches('{').count(), "{name}: parameters");
        assert!(operation.statuses().contains(&400), "{name}: no refusal");
        assert!(value["responses"].get("default").is_some(), "{name}: no default");
    }
}

/// Returns whether one of the operation's schemas describes an example.
fn is_described(operation: &DocumentedOperation<'_>, schema: &Value, example: &Value) -> bool {
    let schemas = operation.tags().into_iter().map(|tag| operation.of_tag(schema, tag));
    schemas.into_iter().any(|schema| ApiDocument::read().violation(schema, example).is_none())
}

#[test]
fn examples_are_what_schemas_describe() {
    let mut wrong = Vec::new();
    let mut check = |operation: &DocumentedOperation<'_>, what: &str, content: &Value| {
        let examples = examples(content);
        if examples.is_empty() {
            wrong.push(format!("{}: no example of {what}", operation.name()));
        }
        for example in examples {
            if !is_described(operation, &content["schema"], example) {
                wrong.push(format!("{}: {what}: {example}", operation.name()));
            }
        }
    };
    for operation in ApiDocument::read().operations() {
        if let Some(body) = operation.value().get("requestBody") {
            check(&operation, "the body", &body["content"]["application/json"]);
        }
        for status in operation.statuses() {
            let contents = operation.response(status)["content"].as_object().into_iter().flatten();
            contents.for_each(|(_, content)| check(&operation, &status.to_string(), content));
        }
        for parameter in [operation.parameters("path"), operation.parameters("query")].concat() {
            let violation =
                ApiDocument::read().violation(&parameter["schema"], &parameter["example"]);
            assert_eq!(violation, None, "{}", operation.name());
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
