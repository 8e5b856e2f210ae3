//! A started process refuses what the document does not permit: absent and unknown fields, values
//! of other types, and values beyond their limits. It does not refuse the limits themselves.

use serde_json::{Map, Value};
use tests::ApiDocument;

use super::session::{ApiReply, ExampleHost, ServedApi, waiting, with_id};

/// Limits that are those of the type in Rust: a lower value may be the limit of the guest.
const TYPE_LIMITS: [u64; 3] = [u8::MAX as u64, u16::MAX as u64, u32::MAX as u64];

/// A changed body.
#[derive(Debug)]
struct ChangedBody {
    body: Value,
    is_permitted: bool,
}

/// Returns the changes of a body that is as `schema` describes.
fn changes(schema: &Value, body: &Value) -> Vec<ChangedBody> {
    let schema = plain(schema);
    let refused = |body| ChangedBody { body, is_permitted: false };
    let mut found = Vec::new();
    match body {
        Value::Object(fields) if schema["properties"].is_object() => {
            for name in schema["required"].as_array().into_iter().flatten() {
                let mut fields = fields.clone();
                fields.remove(name.as_str().expect("a name"));
                found.push(refused(fields.into()));
            }
            if schema["additionalProperties"] == false {
                found.push(refused(with(fields, "unknown_field", 0.into())));
            }
            for (name, schema) in schema["properties"].as_object().expect("fields") {
                let present = fields.get(name);
                let inner = changes_of_value(schema, present);
                found.extend(inner.into_iter().map(|change| ChangedBody {
                    body: with(fields, name, change.body),
                    is_permitted: change.is_permitted,
                }));
            }
        }
        Value::Array(values) => {
            let first = values.first().map(|value| changes(&schema["items"], value));
            found.extend(first.into_iter().flatten().map(|change| ChangedBody {
                body: Value::Array(vec![change.body]),
                is_permitted: change.is_permitted,
            }));
        }
        _ => {}
    }
    found
}

/// Returns other values of a field that has this value, or is absent.
fn changes_of_value(schema: &Value, present: Option<&Value>) -> Vec<ChangedBody> {
    let mut found = present.map(|value| changes(schema, value)).unwrap_or_default();
    let schema = plain(schema);
    let (refused, permitted) = (false, true);
    let mut add = |body: Value, is_permitted| found.push(ChangedBody { body, is_permitted });
    let is = |name: &str| {
        schema["type"] == name || schema["type"].as_array().is_some_and(|t| t[0] == name)
    };
    add(if is("integer") || is("boolean") { "x".into() } else { 7.into() }, refused);
    if is("string") && (schema["enum"].is_array() || schema["pattern"].is_string()) {
        add("?".into(), refused);
    }
    if let Some(least) = schema["minimum"].as_i64() {
        add((least - 1).into(), refused);
        add(least.into(), permitted);
    }
    if let Some(most) = schema["maximum"].as_u64() {
        add((most + 1).into(), refused);
        if !TYPE_LIMITS.contains(&most) {
            add(most.into(), permitted);
        }
    }
    found
}

fn with(fields: &Map<String, Value>, name: &str, value: Value) -> Value {
    let mut fields = fields.clone();
    fields.insert(name.to_owned(), value);
    fields.into()
}

/// Returns a schema without references and without null.
fn plain(schema: &Value) -> &Value {
    let schema = ApiDocument::read().resolved(schema);
    match schema["anyOf"].as_array() {
        Some(schemas) => plain(&schemas[0]),
        None => schema,
    }
}

/// Sends the examples of all operations with changes, each operation to a process of its own.
fn refuses_what_is_not_permitted(start: impl Fn(&ExampleHost, &str) -> ServedApi) {
    let host = ExampleHost::new("tap0");
    let document = ApiDocument::read();
    let (mut wrong, mut sent) = (Vec::new(), 0);
    let operations: Vec<_> = start(&host, "first").operations().collect();
    for (number, (operation, tag)) in operations.into_iter().enumerate() {
        let Some(schema) = operation.request_schema(tag) else { continue };
        let session = start(&host, &number.to_string());
        for example in operation.request_examples() {
            let example = host.example(example);
            let ask = |body: &Value| {
                let path = with_id(operation.path(), &example);
                session.checked(&operation.method(), &path, &body.to_string())
            };
            for change in changes(schema, &example) {
                let ChangedBody { body, is_permitted } = &change;
                let violation = document.violation(schema, body);
                assert_eq!(violation.is_none(), *is_permitted, "{body} {violation:?}");
            }
            let (permitted, refused): (Vec<_>, Vec<_>) =
                changes(schema, &example).into_iter().partition(|change| change.is_permitted);
            let refused: Vec<_> =
                refused.into_iter().map(|change| (ask(&change.body), change.body)).collect();
            // Only now: a snapshot that cannot be loaded ends its process, as in Firecracker.
            let unchanged = ask(&example);
            sent += refused.len() + permitted.len();
            let mut wrongly = |what, body: &Value, reply: &ApiReply| {
                let name = operation.name();
                wrong.push(format!("{name}: {what}: {body}: {reply:?}, {unchanged:?}"));
            };
            for (reply, body) in refused {
                if reply.status != 400 || reply == unchanged {
                    wrongly("not refused", &body, &reply);
                }
            }
            for ChangedBody { body, .. } in permitted {
                let reply = ask(&body);
                if reply != unchanged {
                    wrongly("refused", &body, &reply);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(sent > 50, "{sent} changes");
}

#[test]
fn firecrackers_bodies_are_refused_as_documented() {
    refuses_what_is_not_permitted(|host, name| {
        ServedApi::firecracker(&host.scratch, name, &["serve"])
    });
}

#[test]
fn own_bodies_are_refused_as_documented() {
    refuses_what_is_not_permitted(waiting);
}

#[test]
fn each_operation_can_be_refused() {
    let host = ExampleHost::new("tap0");
    let own = waiting(&host, "own");
    let theirs = ServedApi::firecracker(&host.scratch, "theirs", &["serve"]);
    for (session, query) in [(&own, "?unknown=1"), (&theirs, "")] {
        for (operation, tag) in session.operations() {
            let query = if tag == "driftline" { "?unknown=1" } else { query };
            let path = with_id(operation.path(), &Value::Null);
            let reply = session.checked(&operation.method(), &format!("{path}{query}"), "x");
            assert_eq!(reply.status, 400, "{}: {reply:?}", operation.name());
            let is_unknown = ["there is no request", "Invalid request method and/or path"];
            assert!(!is_unknown.iter().any(|text| reply.body.contains(text)), "{reply:?}");
        }
    }
}
