//! Servers refuse each method that a documented path does not have, and each path that the
//! document does not have.

use serde_json::Value;
use tests::ApiDocument;

use super::session::{ApiReply, ExampleHost, ServedApi, waiting, with_id};

/// The methods of HTTP.
const METHODS: [&str; 9] =
    ["GET", "HEAD", "PUT", "POST", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"];
/// Paths that no process has.
const UNKNOWN_PATHS: [&str; 6] =
    ["/unknown", "/v1", "/v1/unknown", "/v1/info/more", "/v2/info", "/balloon/unknown"];
/// What refusals of an unknown method or path begin with.
const UNKNOWN: [&str; 4] = [
    "{\"fault_message\":\"there is no request ",
    "{\"fault_message\":\"Invalid request method and/or path: ",
    "{\"fault_message\":\"Unrecognized ",
    "{ \"error\": \"Invalid HTTP Method: ",
];

/// Sends a request, with a body if its method has one.
fn ask(server: &ServedApi, method: &str, path: &str) -> ApiReply {
    let has_body = ["PUT", "POST", "PATCH"].contains(&method);
    server.ask(method, &with_id(path, &Value::Null), if has_body { "{}" } else { "" })
}

fn is_refused(reply: &ApiReply) -> bool {
    reply.status == 400 && UNKNOWN.iter().any(|text| reply.body.starts_with(text))
}

/// Returns whether a reply to HEAD is that to GET without its body.
fn is_reply_to_get(server: &ServedApi, tags: &[&str], path: &str, reply: &ApiReply) -> bool {
    let has_get = ApiDocument::read().find(tags, "GET", path).is_some();
    let status = if has_get { ask(server, "GET", path).status } else { 400 };
    reply.body.is_empty() && reply.status == status
}

/// Returns whether the reply is that to a documented path of which `path` is a continuation.
fn is_reply_to_beginning(server: &ServedApi, method: &str, path: &str, reply: &ApiReply) -> bool {
    let beginnings = path.rmatch_indices('/').map(|(at, _)| &path[..at]);
    let mut known = beginnings
        .filter(|path| ApiDocument::read().find(&["firecracker"], method, path).is_some());
    known.next().is_some_and(|path| ask(server, method, path) == *reply)
}

#[test]
fn undocumented_requests_are_refused() {
    let host = ExampleHost::new("tap0");
    let own = waiting(&host, "own");
    let theirs = ServedApi::firecracker(&host.scratch, "theirs", &["serve"]);
    let document = ApiDocument::read();
    let documented = document.root()["paths"].as_object().expect("paths");
    let paths: Vec<_> = documented.keys().map(String::as_str).chain(UNKNOWN_PATHS).collect();
    let (mut wrong, mut continued) = (Vec::new(), Vec::new());
    for (server, tags) in [(&own, ["run", "driftline"]), (&theirs, ["firecracker", "driftline"])] {
        for path in &paths {
            for method in METHODS.into_iter().filter(|m| document.find(&tags, m, path).is_none()) {
                let reply = ask(server, method, path);
                let is_head = method == "HEAD" && is_reply_to_get(server, &tags, path, &reply);
                if is_refused(&reply) || is_head {
                    continue;
                }
                let is_firecracker = tags[0] == "firecracker";
                if is_firecracker && is_reply_to_beginning(server, method, path, &reply) {
                    continued.push(format!("{method} {path}"));
                    continue;
                }
                wrong.push(format!("{tags:?}: {method} {path}: {reply:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // The document's example of such paths.
    assert!(continued.contains(&"PUT /balloon/statistics".to_owned()), "{continued:?}");
}
