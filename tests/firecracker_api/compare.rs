//! Compares replies with recorded answers. The headers' values are not in the record: Firecracker's
//! server sends the same ones with all answers.

use serde_json::{Map, Value};
use tests::RawReply;

use super::record::{DetailedAnswer, RecordedAnswer};

/// Returns why a reply is not the answer; `None` if it is.
pub fn mismatch(reply: &RawReply, answer: &RecordedAnswer) -> Option<String> {
    let answer = detailed(answer);
    let status = answer.status.unwrap_or(if answer.keys.is_some() { 200 } else { 400 });
    let body = reply.body.as_deref().map(String::from_utf8_lossy);
    let shown = || format!("{} {}", reply.status, body.as_deref().unwrap_or("without a body"));
    if reply.status != status {
        return Some(format!("expected status {status}, got {}", shown()));
    }
    let names: Vec<_> = reply.headers.iter().map(|(name, _)| name.as_str()).collect();
    let expected = header_names(status, answer.deprecated);
    if names != expected {
        return Some(format!("expected the headers {expected:?}, got {names:?}"));
    }
    let other = reply.headers.iter().find(|(name, value)| !is_header(status, name, value));
    if let Some((name, value)) = other {
        return Some(format!("unexpected value of {name}: {value:?} of {}", shown()));
    }
    let wrong = |what: &str| Some(format!("expected {what}, got {}", shown()));
    let body = match (body.as_deref(), matches!(status, 100 | 204)) {
        (Some(body), false) => body,
        (None, true) => return None,
        (None, false) => return wrong("a body"),
        (Some(_), true) => return wrong("no body"),
    };
    if let Some(other) = &answer.other {
        return if body == other { None } else { wrong(other) };
    }
    if let Some(text) = &answer.error {
        // Firecracker's text has a raw line feed: it is not JSON.
        let end = "\nAll previous unanswered requests will be dropped.\" }";
        let found = body.strip_prefix("{ \"error\": \"").and_then(|rest| rest.strip_suffix(end));
        return match found.is_some_and(|found| is_text(found, text)) {
            true => None,
            false => wrong(text),
        };
    }
    let Ok(page) = serde_json::from_str::<Value>(body) else { return wrong("JSON") };
    let fault = Value::Object(Map::from_iter([("fault_message".to_owned(), "string".into())]));
    let keys = answer.keys.as_ref().unwrap_or(&fault);
    if shape(&page) != *keys {
        return wrong(&format!("the fields {keys}"));
    }
    if let Some(text) = &answer.fault
        && !is_text(page["fault_message"].as_str().unwrap_or_default(), text)
    {
        return wrong(text);
    }
    let other = answer.values.iter().find(|(at, value)| page.pointer(at) != Some(value));
    other.and_then(|(at, value)| wrong(&format!("{value} at {at}")))
}

/// Returns the names of an answer's headers, in order.
fn header_names(status: u16, deprecated: bool) -> Vec<&'static str> {
    let deprecation = deprecated.then_some("Deprecation");
    let of_body: &[_] = match status {
        100 | 204 => &[],
        // Of a connection that is refused.
        503 => &["Content-Length"],
        _ => &["Content-Type", "Content-Length"],
    };
    ["Server", "Connection"].into_iter().chain(deprecation).chain(of_body.iter().copied()).collect()
}

/// Returns whether a header has Firecracker's value. `Content-Length` is not compared: the reply's
/// body was read by it.
fn is_header(status: u16, name: &str, value: &str) -> bool {
    match name {
        "Server" => value == "Firecracker API",
        "Connection" => match status {
            503 => value == "close",
            // Driftline says so if the connection ends: after a request that it cannot parse, and
            // when the process ends. Firecracker does not.
            400 => matches!(value, "keep-alive" | "close"),
            _ => value == "keep-alive",
        },
        "Deprecation" => value == "true",
        // Driftline pads it with a space in rare cases.
        "Content-Type" => value.trim_end() == "application/json",
        _ => true,
    }
}

/// Returns whether a text is `expected`, or begins as it does before its `...`.
fn is_text(text: &str, expected: &str) -> bool {
    match expected.strip_suffix("...") {
        Some(begin) => text.starts_with(begin),
        None => text == expected,
    }
}

/// Returns an answer with all of its details.
fn detailed(answer: &RecordedAnswer) -> DetailedAnswer {
    match answer {
        RecordedAnswer::Status(status) => {
            DetailedAnswer { status: Some(*status), ..DetailedAnswer::default() }
        }
        RecordedAnswer::Fault(text) => {
            DetailedAnswer { fault: Some(text.clone()), ..DetailedAnswer::default() }
        }
        RecordedAnswer::Detailed(answer) => answer.clone(),
    }
}

/// Returns the fields of a page with their types.
fn shape(page: &Value) -> Value {
    match page {
        Value::Null => "null".into(),
        Value::Bool(_) => "boolean".into(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "string".into(),
        Value::Array(elements) => {
            let mut shapes: Vec<Value> = elements.iter().map(shape).collect();
            shapes.dedup();
            shapes.into()
        }
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| (name.clone(), shape(value))).collect()
        }
    }
}

#[cfg(test)]
mod laws {
    use serde_json::json;

    use super::*;

    fn reply(status: u16, body: Option<&str>) -> RawReply {
        let value = |name| match name {
            "Server" => "Firecracker API",
            "Connection" => "keep-alive",
            "Content-Type" => "application/json",
            _ => "x",
        };
        let headers = header_names(status, false).into_iter();
        RawReply {
            status,
            headers: headers.map(|name| (name.to_owned(), value(name).to_owned())).collect(),
            body: body.map(|body| body.as_bytes().to_vec()),
        }
    }

    fn is_answer(reply: &RawReply, answer: serde_json::Value) -> bool {
        mismatch(reply, &serde_json::from_value(answer).expect("an answer")).is_none()
    }

    #[test]
    fn fields_and_types_of_a_page_are_compared() {
        let page = reply(200, Some(r#"{"a": 1, "b": [{"c": "d"}]}"#));
        assert!(is_answer(&page, json!({ "keys": { "b": [{ "c": "string" }], "a": "number" } })));
        let all =
            json!({ "keys": { "b": [{ "c": "string" }], "a": "number" }, "values": { "/a": 1 } });
        assert!(is_answer(&page, all));
        for other in [
            json!({ "keys": { "a": "number" } }),
            json!({ "keys": { "b": [], "a": "number" } }),
            json!({ "keys": { "b": [{ "c": "string" }], "a": "string" } }),
            json!({ "keys": { "b": [{ "c": "string" }], "a": "number" }, "values": { "/a": 2 } }),
            json!({ "keys": { "b": [{ "c": "string" }], "a": "number" }, "deprecated": true }),
            json!({ "keys": { "b": [{ "c": "string" }], "a": "number" }, "status": 201 }),
            json!(200),
            json!(204),
            json!("a"),
        ] {
            assert!(!is_answer(&page, other.clone()), "{other}");
        }
    }

    #[test]
    fn values_of_headers_are_compared() {
        let reply = |status, name: &str, value: &str| {
            let mut reply = reply(status, Some(r#"{"fault_message": "a"}"#));
            let header = reply.headers.iter_mut().find(|(found, _)| found == name);
            value.clone_into(&mut header.expect("the header").1);
            reply
        };
        assert!(is_answer(&reply(413, "Content-Type", "application/json "), json!(413)));
        assert!(is_answer(&reply(400, "Connection", "close"), json!(400)));
        for (name, value) in
            [("Server", "other"), ("Connection", "close"), ("Content-Type", "text/plain")]
        {
            assert!(!is_answer(&reply(413, name, value), json!(413)), "{name}");
        }
    }

    #[test]
    fn texts_of_faults_are_compared() {
        let fault = reply(400, Some(r#"{"fault_message": "No device: a"}"#));
        for answer in [json!(400), json!("No device: a"), json!("No device: ...")] {
            assert!(is_answer(&fault, answer.clone()), "{answer}");
        }
        for other in [json!(413), json!(204), json!("No device"), json!({ "error": "..." })] {
            assert!(!is_answer(&fault, other.clone()), "{other}");
        }
        assert!(is_answer(&reply(204, None), json!(204)));
        assert!(!is_answer(&reply(204, Some("")), json!(204)));
        assert!(!is_answer(&reply(400, Some(r#"{"fault_message": "a", "b": 1}"#)), json!(400)));
        let refusal = "{ \"error\": \"a\nAll previous unanswered requests will be dropped.\" }";
        assert!(is_answer(&reply(400, Some(refusal)), json!({ "error": "a" })));
        assert!(!is_answer(&reply(400, Some(refusal)), json!({ "error": "b" })));
    }
}
