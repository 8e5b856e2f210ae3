//! The requests of a guest for its metadata, and their answers, which are Firecracker's.

use std::time::Duration;

use httparse::{EMPTY_HEADER, Header, Request, Status};
use serde_json::Value;

use crate::config::{MetadataVersion, NetMetadata};
use crate::metadata::{MetadataStore, TokenError, count};

/// Most headers of a request.
const MAX_HEADERS: usize = 64;
/// Path of the request that begins a session.
const TOKEN_PATH: &str = "/latest/api/token";
const TOKEN_HEADERS: [&str; 2] = ["x-metadata-token", "x-aws-ec2-metadata-token"];
const LIFETIME_HEADERS: [&str; 2] =
    ["x-metadata-token-ttl-seconds", "x-aws-ec2-metadata-token-ttl-seconds"];

const PLAIN: &str = "text/plain";
const JSON: &str = "application/json";

/// What the bytes of a connection begin with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ReadRequest {
    /// An incomplete request.
    Partial,
    /// A request of this many bytes, and its answer.
    Whole(usize, Reply),
    /// No request. The connection ends after this answer.
    Malformed(Reply),
}

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Reply {
    pub(super) bytes: Vec<u8>,
    /// Whether the connection ends after it.
    pub(super) closes: bool,
}

/// Why a request does not get a value.
#[derive(Debug, thiserror::Error)]
enum ServiceFault {
    #[error("Invalid request.")]
    Malformed,
    #[error("Invalid URI.")]
    Uri,
    #[error("Not allowed HTTP method.")]
    Method,
    #[error("Resource not found: {path}.")]
    NotFound { path: String },
    #[error("Cannot retrieve value. The value has an unsupported type.")]
    Type,
    #[error(
        "No MMDS token provided. Use `X-metadata-token` or `X-aws-ec2-metadata-token` header to \
         specify the session token."
    )]
    NoToken,
    #[error("MMDS token not valid.")]
    InvalidToken,
    #[error(
        "Token time to live value not found. Use `X-metadata-token-ttl-seconds` or \
         `X-aws-ec2-metadata-token-ttl-seconds` header to specify the token's lifetime."
    )]
    NoLifetime,
    #[error("Invalid header. Reason: Invalid value. Key:{name}; Value:{value}")]
    Lifetime { name: String, value: String },
    #[error("Invalid header. Reason: Unsupported header name. Key: {name}")]
    Forwarded { name: String },
    #[error(transparent)]
    Session(#[from] TokenError),
}

impl ServiceFault {
    fn status(&self) -> u16 {
        match self {
            Self::NoToken | Self::InvalidToken => 401,
            Self::NotFound { .. } => 404,
            Self::Method => 405,
            Self::Type => 501,
            _ => 400,
        }
    }
}

/// A value, its media type, and a header that belongs to it.
struct Served {
    body: String,
    media: &'static str,
    header: Option<(String, u32)>,
}

impl Served {
    fn plain(body: String) -> Self {
        Self { body, media: PLAIN, header: None }
    }
}

/// Reads the request that `bytes` begin with, and answers it at the time `now`.
pub(super) fn read_request(
    bytes: &[u8],
    config: &NetMetadata,
    store: &MetadataStore,
    now: Duration,
) -> ReadRequest {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut request = Request::new(&mut headers);
    let malformed = || ReadRequest::Malformed(reply(1, Err(ServiceFault::Malformed), true));
    let head = match request.parse(bytes) {
        Ok(Status::Partial) => return ReadRequest::Partial,
        Ok(Status::Complete(len)) => len,
        Err(_) => return malformed(),
    };
    let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version)
    else {
        return malformed();
    };
    let headers = &*request.headers;
    let Some(body) = body_bytes(headers) else { return malformed() };
    let Some(len) = head.checked_add(body) else { return malformed() };
    if len > bytes.len() {
        return ReadRequest::Partial;
    }
    let answer = serve(method, target, headers, config, store, now);
    ReadRequest::Whole(len, reply(minor, answer, closes(minor, headers)))
}

/// Returns the length of the body, which is ignored. `None` if the request does not say it.
fn body_bytes(headers: &[Header<'_>]) -> Option<usize> {
    if find(headers, &["transfer-encoding"]).is_some() {
        return None;
    }
    find(headers, &["content-length"]).map_or(Some(0), |(_, length)| length.parse().ok())
}

/// Returns whether the client does not use the connection for another request.
fn closes(minor: u8, headers: &[Header<'_>]) -> bool {
    let says = |word| {
        let wanted = find(headers, &["connection"]).map_or("", |(_, value)| value);
        wanted.split(',').any(|part| part.trim().eq_ignore_ascii_case(word))
    };
    says("close") || minor == 0 && !says("keep-alive")
}

/// Returns the first header of one of these names, and its value. A value that is not UTF-8 is
/// empty.
fn find<'h>(headers: &[Header<'h>], names: &[&str]) -> Option<(&'h str, &'h str)> {
    let is_named = |header: &&Header<'_>| names.iter().any(|n| header.name.eq_ignore_ascii_case(n));
    let header = headers.iter().find(is_named)?;
    Some((header.name, str::from_utf8(header.value).unwrap_or_default().trim()))
}

fn serve(
    method: &str,
    target: &str,
    headers: &[Header<'_>],
    config: &NetMetadata,
    store: &MetadataStore,
    now: Duration,
) -> Result<Served, ServiceFault> {
    let path = path_of(target).ok_or(ServiceFault::Uri)?;
    match method {
        "GET" => {
            check_token(headers, config.version, store, now)?;
            let accept = find(headers, &["accept"]).map_or(PLAIN, |(_, media)| media);
            let as_json = accept.eq_ignore_ascii_case(JSON) && !config.imds_compat;
            value_at(path, as_json, store)
        }
        "PUT" => begin_session(path, headers, store, now),
        _ => Err(ServiceFault::Method),
    }
}

/// Returns the path of a request's target, which begins with `/`.
fn path_of(target: &str) -> Option<&str> {
    if target.starts_with('/') {
        return Some(target);
    }
    let rest = target.strip_prefix("http://")?;
    rest.find('/').map(|at| &rest[at..])
}

/// Returns `path` as a JSON pointer.
fn pointer(path: &str) -> String {
    let mut pointer = String::with_capacity(path.len());
    for c in path.chars() {
        if c != '/' || !pointer.ends_with('/') {
            pointer.push(c);
        }
    }
    pointer
}

/// Checks the token of a request. Requests of version 1 need none, but are counted.
fn check_token(
    headers: &[Header<'_>],
    version: MetadataVersion,
    store: &MetadataStore,
    now: Duration,
) -> Result<(), ServiceFault> {
    let counters = store.counters();
    let fault = match find(headers, &TOKEN_HEADERS) {
        Some((_, token)) if store.is_valid(token, now) => return Ok(()),
        Some(_) => {
            count(&counters.invalid_tokens, 1);
            ServiceFault::InvalidToken
        }
        None => {
            count(&counters.without_token, 1);
            ServiceFault::NoToken
        }
    };
    match version {
        MetadataVersion::V1 => Ok(()),
        MetadataVersion::V2 => Err(fault),
    }
}

fn value_at(path: &str, as_json: bool, store: &MetadataStore) -> Result<Served, ServiceFault> {
    let pointer = pointer(path);
    let at = pointer.strip_suffix('/').unwrap_or(&pointer);
    let read = |value: &Value| match as_json {
        true => Ok(Served { media: JSON, ..Served::plain(value.to_string()) }),
        false => imds(value).map(Served::plain).ok_or(ServiceFault::Type),
    };
    store.at(at, read).ok_or_else(|| ServiceFault::NotFound { path: path.to_owned() })?
}

/// Returns a value as EC2's service writes it: an object as its keys, with `/` after those of
/// objects, and a string as it is.
fn imds(value: &Value) -> Option<String> {
    let Value::Object(fields) = value else { return value.as_str().map(str::to_owned) };
    let line = |(key, value): (&String, &Value)| match value {
        Value::Object(_) => format!("{key}/"),
        _ => key.clone(),
    };
    Some(fields.iter().map(line).collect::<Vec<_>>().join("\n"))
}

fn begin_session(
    path: &str,
    headers: &[Header<'_>],
    store: &MetadataStore,
    now: Duration,
) -> Result<Served, ServiceFault> {
    // Requests through a proxy do not come from the guest itself.
    if let Some((name, _)) = find(headers, &["x-forwarded-for"]) {
        return Err(ServiceFault::Forwarded { name: name.to_owned() });
    }
    if pointer(path) != TOKEN_PATH {
        return Err(ServiceFault::NotFound { path: path.to_owned() });
    }
    let (name, value) = find(headers, &LIFETIME_HEADERS).ok_or(ServiceFault::NoLifetime)?;
    let invalid = || ServiceFault::Lifetime { name: name.to_owned(), value: value.to_owned() };
    let lifetime_s = value.parse().map_err(|_| invalid())?;
    let token = store.begin_session(lifetime_s, now)?;
    Ok(Served { header: Some((name.to_owned(), lifetime_s)), ..Served::plain(token) })
}

/// Writes an answer to a request of HTTP/1.`minor`.
fn reply(minor: u8, answer: Result<Served, ServiceFault>, closes: bool) -> Reply {
    let (status, Served { body, media, header }) = match answer {
        Ok(served) => (200, served),
        Err(fault) => (fault.status(), Served::plain(fault.to_string())),
    };
    let connection = if closes { "close" } else { "keep-alive" };
    let mut head = format!(
        "HTTP/1.{minor} {status} \r\nServer: Firecracker API\r\nConnection: {connection}\r\n"
    );
    if status == 405 {
        head.push_str("Allow: GET, PUT\r\n");
    }
    if let Some((name, value)) = header {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("Content-Type: {media}\r\nContent-Length: {}\r\n\r\n", body.len()));
    Reply { bytes: [head.into_bytes(), body.into_bytes()].concat(), closes }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const V1: NetMetadata = NetMetadata {
        address: std::net::Ipv4Addr::new(169, 254, 169, 254),
        version: MetadataVersion::V1,
        imds_compat: false,
    };
    const V2: NetMetadata = NetMetadata { version: MetadataVersion::V2, ..V1 };

    fn store() -> MetadataStore {
        let store = MetadataStore::new(1000);
        let hosts = json!({ "a": { "b": "text", "c": { "d": 1 } }, "e/f": [1, 2], "n": 5 });
        store.put(hosts).unwrap();
        store
    }

    /// Returns the head and the body of the answer to a request.
    fn ask(store: &MetadataStore, config: &NetMetadata, request: &str) -> (String, String) {
        ask_at(store, config, request, Duration::ZERO)
    }

    fn ask_at(
        store: &MetadataStore,
        config: &NetMetadata,
        request: &str,
        now: Duration,
    ) -> (String, String) {
        let request = request.replace('\n', "\r\n");
        match read_request(request.as_bytes(), config, store, now) {
            ReadRequest::Whole(len, reply) => {
                assert_eq!(len, request.len());
                let text = String::from_utf8(reply.bytes).unwrap();
                let (head, body) = text.split_once("\r\n\r\n").unwrap();
                (head.to_owned(), body.to_owned())
            }
            other => panic!("{request}: {other:?}"),
        }
    }

    fn status(head: &str) -> &str {
        head.split(' ').nth(1).unwrap()
    }

    #[test]
    fn values_have_the_form_that_is_accepted() {
        let store = store();
        let json = "\nAccept: application/json\n\n";
        for (path, as_json, as_text) in [
            ("/", r#"{"a":{"b":"text","c":{"d":1}},"e/f":[1,2],"n":5}"#, "a/\ne/f\nn"),
            ("/a", r#"{"b":"text","c":{"d":1}}"#, "b\nc/"),
            ("//a//c/", r#"{"d":1}"#, "d"),
            ("http://169.254.169.254/a/b", r#""text""#, "text"),
        ] {
            let (head, body) = ask(&store, &V1, &format!("GET {path} HTTP/1.1{json}"));
            assert_eq!((status(&head), &*body), ("200", as_json));
            assert!(head.contains("Content-Type: application/json"), "{head}");
            let (head, body) = ask(&store, &V1, &format!("GET {path} HTTP/1.1\n\n"));
            assert_eq!((status(&head), &*body), ("200", as_text));
            assert!(head.contains("Content-Type: text/plain"), "{head}");
            let imds = NetMetadata { imds_compat: true, ..V1 };
            assert_eq!(ask(&store, &imds, &format!("GET {path} HTTP/1.1{json}")).1, as_text);
        }
        let (_, body) = ask(&store, &V1, &format!("GET /e~1f/1 HTTP/1.1{json}"));
        assert_eq!(body, "2");
    }

    #[test]
    fn missing_and_unwritable_values_are_refused() {
        let store = store();
        let (head, body) = ask(&store, &V1, "GET //x HTTP/1.1\n\n");
        assert_eq!((status(&head), &*body), ("404", "Resource not found: //x."));
        let (head, body) = ask(&store, &V1, "GET /n HTTP/1.1\n\n");
        let unsupported = "Cannot retrieve value. The value has an unsupported type.";
        assert_eq!((status(&head), &*body), ("501", unsupported));
        let (head, _) = ask(&MetadataStore::new(9), &V1, "GET / HTTP/1.1\n\n");
        assert_eq!(status(&head), "501", "no metadata yet");
        let (head, body) = ask(&store, &V1, "GET x HTTP/1.1\n\n");
        assert_eq!((status(&head), &*body), ("400", "Invalid URI."));
        let (head, body) = ask(&store, &V1, "DELETE /a HTTP/1.1\n\n");
        assert_eq!((status(&head), &*body), ("405", "Not allowed HTTP method."));
        assert!(head.contains("Allow: GET, PUT"), "{head}");
    }

    #[test]
    fn version_2_needs_a_valid_token() {
        let store = store();
        for (name, of) in ["X-metadata-token", "x-aws-ec2-metadata-token"].iter().zip(1..) {
            let begin = format!("PUT /latest//api/token HTTP/1.1\n{name}-TTL-seconds: 60\n\n");
            let (head, token) = ask(&store, &V2, &begin);
            assert_eq!(status(&head), "200");
            assert!(head.contains(&format!("{name}-TTL-seconds: 60\r\n")), "{head}");
            let get = format!("GET /a/b HTTP/1.1\n{name}: {token}\n\n");
            assert_eq!(ask(&store, &V2, &get).1, "text");
            let (head, body) = ask_at(&store, &V2, &get, Duration::from_secs(60));
            assert_eq!((status(&head), &*body), ("401", "MMDS token not valid."));
            let (head, body) = ask(&store, &V2, "GET /a/b HTTP/1.1\n\n");
            assert_eq!(status(&head), "401");
            assert!(body.starts_with("No MMDS token provided. Use `X-metadata-token` or "));
            let counts = store.counts();
            assert_eq!((counts.invalid_tokens, counts.without_token), (of, of));
        }
        assert_eq!(ask(&store, &V1, "GET /a/b HTTP/1.1\nX-metadata-token: x\n\n").1, "text");
        assert_eq!(store.counts().invalid_tokens, 3);
    }

    #[test]
    fn session_needs_its_path_and_lifetime() {
        let store = store();
        let refused = |path: &str, headers: &str| {
            let (head, body) = ask(&store, &V2, &format!("PUT {path} HTTP/1.1\n{headers}\n"));
            format!("{} {body}", status(&head))
        };
        let header = "X-metadata-token-ttl-seconds";
        assert_eq!(refused("/x", ""), "404 Resource not found: /x.");
        assert!(refused(TOKEN_PATH, "").starts_with("400 Token time to live value not found."));
        let invalid = |value: &str| refused(TOKEN_PATH, &format!("{header}: {value}\n"));
        for value in ["0", "21601"] {
            let text = format!(
                "400 Invalid time to live value provided for token: {value}. Please provide a \
                 value between 1 and 21600."
            );
            assert_eq!(invalid(value), text);
        }
        let text = format!("400 Invalid header. Reason: Invalid value. Key:{header}; Value:a");
        assert_eq!(invalid("a"), text);
        let forwarded = refused(TOKEN_PATH, &format!("{header}: 1\nX-Forwarded-For: b\n"));
        assert!(forwarded.ends_with("Unsupported header name. Key: X-Forwarded-For"));
    }

    #[test]
    fn connection_ends_when_the_client_says_so() {
        let store = store();
        for (request, closes) in [
            ("GET / HTTP/1.1\r\n\r\n", false),
            ("GET / HTTP/1.1\r\nConnection: Close\r\n\r\n", true),
            ("GET / HTTP/1.0\r\n\r\n", true),
            ("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", false),
        ] {
            let read = read_request(request.as_bytes(), &V1, &store, Duration::ZERO);
            let ReadRequest::Whole(_, reply) = read else { panic!("{request}: {read:?}") };
            assert_eq!(reply.closes, closes, "{request}");
        }
    }

    #[test]
    fn one_request_at_a_time_is_read() {
        let store = store();
        let read = |text: &str| read_request(text.as_bytes(), &V1, &store, Duration::ZERO);
        let two = "PUT /x HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\n\r\n";
        let first = two.find("GET").unwrap();
        assert!(matches!(read(two), ReadRequest::Whole(len, _) if len == first));
        for cut in 0..first {
            assert_eq!(read(&two[..cut]), ReadRequest::Partial, "{cut}");
        }
        for bad in [
            "\0 / HTTP/1.1\r\n\r\n",
            "GET / HTTP/3.1\r\n\r\n",
            "PUT / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
            "PUT / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n",
            "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
            &format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_HEADERS + 1)),
        ] {
            let ReadRequest::Malformed(reply) = read(bad) else { panic!("{bad}") };
            assert!(reply.closes && reply.bytes.ends_with(b"\r\n\r\nInvalid request."));
        }
    }
}
