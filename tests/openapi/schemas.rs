//! The schemas of the document equal those of the product's types.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use tests::ApiDocument;

use super::model::{ApiModel, BodyKind};

/// What must be equal in a schema of the document and in that of the type. The rest is in the
/// document only: descriptions, defaults, patterns.
const EQUAL: [&str; 4] = ["type", "const", "$ref", "maxItems"];

/// Returns the schemas that `value` names, and those that they name, into `found`.
fn collect<'d>(document: &'d ApiDocument, value: &'d Value, found: &mut BTreeSet<&'d str>) {
    match value {
        Value::Object(fields) => {
            let reference = fields.get("$ref").and_then(Value::as_str);
            let name = reference.and_then(|text| text.strip_prefix("#/components/schemas/"));
            if let Some(name) = name
                && found.insert(name)
            {
                collect(document, &document.root()["components"]["schemas"][name], found);
            }
            fields.values().for_each(|value| collect(document, value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| collect(document, value, found)),
        _ => {}
    }
}

/// Returns each schema that the operations use, and whether requests do.
fn used(document: &ApiDocument) -> BTreeMap<&str, BodyKind> {
    let (mut requests, mut all) = (BTreeSet::new(), BTreeSet::new());
    for operation in document.operations() {
        collect(document, &operation.value()["requestBody"], &mut requests);
        collect(document, operation.value(), &mut all);
    }
    // Each operation refers to answers that it shares with others.
    collect(document, &document.root()["components"]["responses"], &mut all);
    let kind = |name| if requests.contains(name) { BodyKind::Request } else { BodyKind::Answer };
    all.into_iter().map(|name| (name, kind(name))).collect()
}

/// Adds the differences of a documented schema from that of the type.
fn compare(documented: &Value, derived: &Value, at: &str, found: &mut Vec<String>) {
    for key in EQUAL {
        if documented.get(key) != derived.get(key) {
            let (theirs, ours) = (documented.get(key), derived.get(key));
            found.push(format!("{at}: {key} is {theirs:?} in the document and {ours:?} in Rust"));
        }
    }
    // Texts that a type parses itself may have their values in the document.
    if derived.get("enum").is_some() && documented.get("enum") != derived.get("enum") {
        let (theirs, ours) = (&documented["enum"], &derived["enum"]);
        found.push(format!("{at}: {theirs} in the document, {ours} in Rust"));
    }
    let names = |schema: &Value| -> BTreeSet<String> {
        let names = schema["required"].as_array().into_iter().flatten();
        names.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    if names(documented) != names(derived) {
        let (theirs, ours) = (names(documented), names(derived));
        found.push(format!("{at}: {theirs:?} are required in the document, {ours:?} in Rust"));
    }
    compare_limits(documented, derived, at, found);
    for key in ["items", "additionalProperties"] {
        compare_inner(documented.get(key), derived.get(key), &format!("{at}/{key}"), found);
    }
    for key in ["properties", "anyOf", "oneOf"] {
        let (theirs, ours) = (parts(&documented[key]), parts(&derived[key]));
        if key == "oneOf" && ours.is_empty() && theirs.values().all(|part| is_only_required(part)) {
            continue;
        }
        let all: BTreeSet<_> = theirs.keys().chain(ours.keys()).collect();
        for part in all {
            let at = format!("{at}/{part}");
            compare_inner(theirs.get(part).copied(), ours.get(part).copied(), &at, found);
        }
    }
}

/// Returns whether a schema only requires fields. No type in Rust says which fields exclude each
/// other.
fn is_only_required(schema: &Value) -> bool {
    schema.as_object().is_some_and(|keys| keys.keys().all(|key| key == "required"))
}

fn compare_inner(
    documented: Option<&Value>,
    derived: Option<&Value>,
    at: &str,
    found: &mut Vec<String>,
) {
    match (documented, derived) {
        (Some(documented), Some(derived)) if documented.is_object() && derived.is_object() => {
            compare(documented, derived, at, found);
        }
        (documented, derived) if documented == derived => {}
        (Some(_), None) => found.push(format!("{at} is not in Rust")),
        (None, _) => found.push(format!("{at} is not in the document")),
        (Some(documented), Some(derived)) => {
            found.push(format!("{at} is {documented} in the document and {derived} in Rust"));
        }
    }
}

/// Limits of the document may be narrower than those of the type, and not wider.
fn compare_limits(documented: &Value, derived: &Value, at: &str, found: &mut Vec<String>) {
    let limit = |schema: &Value, key: &str| schema.get(key).and_then(Value::as_u64);
    let least = limit(derived, "minimum");
    if least.is_some_and(|least| limit(documented, "minimum").is_none_or(|own| own < least)) {
        found.push(format!("{at}: at least {least:?} in Rust"));
    }
    let most = limit(derived, "maximum");
    if most.is_some_and(|most| limit(documented, "maximum").is_none_or(|own| own > most)) {
        found.push(format!("{at}: at most {most:?} in Rust"));
    }
}

/// Returns the elements of an object or array by name or number.
fn parts(value: &Value) -> BTreeMap<String, &Value> {
    match value {
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), value)).collect(),
        Value::Array(values) => {
            values.iter().enumerate().map(|(at, value)| (at.to_string(), value)).collect()
        }
        _ => BTreeMap::new(),
    }
}

#[test]
fn schemas_equal_the_types() {
    let (document, model) = (ApiDocument::read(), ApiModel::read());
    let used = used(document);
    let mut wrong = Vec::new();
    for (name, schema) in document.schemas() {
        match used.get(name) {
            None => wrong.push(format!("{name}: no operation uses it")),
            Some(_) if !model.has(name) => wrong.push(format!("{name}: not a type")),
            Some(kind) => compare(schema, &model.schema(name, *kind), name, &mut wrong),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn differences_of_schemas_are_found() {
    let model = ApiModel::read();
    let derived = |name| model.schema(name, BodyKind::Request);
    let differences = |name, change: &dyn Fn(&mut Value)| {
        let mut documented = derived(name);
        change(&mut documented);
        let mut found = Vec::new();
        compare(&documented, &derived(name), name, &mut found);
        found.len()
    };
    assert_eq!(differences("DriveSettings", &|_| {}), 0);
    let fields = |schema: &mut Value| schema["properties"].as_object_mut().map(std::mem::take);
    assert!(differences("DriveSettings", &|schema| _ = fields(schema)) > 3);
    for change in [
        |schema: &mut Value| _ = schema["properties"].as_object_mut().map(|p| p.remove("store")),
        |schema: &mut Value| schema["properties"]["more"] = true.into(),
        |schema: &mut Value| schema["properties"]["count"]["type"] = "string".into(),
        |schema: &mut Value| schema["properties"]["every_ms"]["minimum"] = 0.into(),
        |schema: &mut Value| schema["required"] = Value::Array(Vec::new()),
        |schema: &mut Value| schema["additionalProperties"] = true.into(),
        |schema: &mut Value| _ = schema["properties"]["disks"].as_object_mut().map(|d| d.clear()),
    ] {
        assert!(differences("CheckpointRequest", &change) > 0);
    }
    for change in [
        |schema: &mut Value| schema["enum"][0] = "other".into(),
        |schema: &mut Value| _ = schema["enum"].as_array_mut().map(Vec::pop),
    ] {
        assert_eq!(differences("Compression", &change), 1);
    }
}
