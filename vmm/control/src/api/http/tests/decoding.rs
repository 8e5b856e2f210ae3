//! Tests of turning bytes into requests.

use std::iter;

use axum::http::{Method, StatusCode};
use proptest::collection;
use proptest::prelude::*;

use super::super::decode::{HttpDecoder, HttpEvent, HttpPhase, HttpRequest, Persistence};
use super::super::dialect::{HttpDialect, HttpFault};
use super::{FIRECRACKER, events};

/// Returns the requests of `bytes`. Each of them must be whole.
fn requests(dialect: HttpDialect, bytes: &[u8]) -> Vec<HttpRequest> {
    let request = |event| match event {
        HttpEvent::Request(request) => *request,
        other => panic!("{other:?}"),
    };
    events(dialect, [bytes]).into_iter().map(request).collect()
}

fn request(dialect: HttpDialect, bytes: &str) -> HttpRequest {
    let mut requests = requests(dialect, bytes.as_bytes());
    assert_eq!(requests.len(), 1, "{bytes:?}");
    requests.remove(0)
}

/// Returns the fault of bytes that are not a request.
fn fault(dialect: HttpDialect, bytes: &[u8]) -> HttpFault {
    match events(dialect, [bytes]).pop() {
        Some(HttpEvent::Fault(fault)) => fault,
        other => panic!("{:?}: {other:?}", String::from_utf8_lossy(bytes)),
    }
}

#[test]
fn faults_have_firecrackers_texts() {
    let long = "x".repeat(1024);
    let header = |line: &str| format!("GET / HTTP/1.1\r\n{line}\r\n\r\n");
    for (bytes, text) in [
        ("POST / HTTP/1.1\r\n", "Invalid HTTP Method: Unsupported HTTP method."),
        ("HEAD / HTTP/1.1\r\n", "Invalid HTTP Method: Unsupported HTTP method."),
        ("OPTIONS * HTTP/1.1\r\n", "Invalid HTTP Method: Unsupported HTTP method."),
        ("get / HTTP/1.1\r\n", "Invalid HTTP Method: Unsupported HTTP method."),
        ("GET / HTTP/2.0\r\n", "Invalid HTTP Version: Unsupported HTTP version."),
        ("GET / http/1.1\r\n", "Invalid HTTP Version: Unsupported HTTP version."),
        ("GET / HTTP/1.1\nHost: x\r\n", "Invalid HTTP Version: Unsupported HTTP version."),
        ("GET  HTTP/1.1\r\n", "Invalid URI: Empty URI not allowed."),
        ("GET /\r\n", "Invalid request."),
        ("GET\r\n", "Invalid request."),
        ("\r\n", "Invalid request."),
        (long.as_str(), "Invalid request."),
        (
            header("Host").as_str(),
            "Invalid header. Reason: Header is incorrectly formatted. Key: Host",
        ),
        (
            header("Content-Length: abc").as_str(),
            "Invalid header. Reason: Invalid value. Key:Content-Length; Value: abc",
        ),
        (
            header("content-length: 4294967296").as_str(),
            "Invalid header. Reason: Invalid value. Key:content-length; Value: 4294967296",
        ),
        (
            header("Accept-Encoding: gzip, identity;q=0").as_str(),
            "Invalid header. Reason: Invalid value. Key:Accept-Encoding; Value: identity;q=0",
        ),
        (
            header("Accept-Encoding: *;q=0").as_str(),
            "Invalid header. Reason: Invalid value. Key:Accept-Encoding; Value:*;q=0",
        ),
        (header("Accept-Encoding:").as_str(), "Invalid request."),
        (
            header(&long).as_str(),
            format!("Invalid header. Reason: Invalid content length. Header: {long}").as_str(),
        ),
        (
            header("Content-Length: 51201").as_str(),
            "Request payload with size 51201 is larger than the limit of 51200 allowed by server.",
        ),
    ] {
        assert_eq!(fault(FIRECRACKER, bytes.as_bytes()).to_string(), text, "{bytes:?}");
    }
    let fault_of = |bytes| fault(FIRECRACKER, bytes).to_string();
    assert_eq!(fault_of(b"GET /\xff HTTP/1.1\r\n"), "Invalid URI: Cannot parse URI as UTF-8.");
    let text = fault_of(b"GET / HTTP/1.1\r\nA: \xff\r\n");
    assert!(text.starts_with("Invalid header. Reason: Header contains invalid characters. Key: "));
}

#[test]
fn firecracker_ignores_what_it_does_not_know() {
    for head in [
        "GET / HTTP/1.0\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "GET / HTTP/1.1\r\nContent-Type: text/csv\r\nExpect: 103-checkpoint\r\n\r\n",
        "GET / HTTP/1.1\r\nNo token here: x\r\n Accept : x\r\n\r\n",
        "GET / HTTP/1.1\r\nAccept-Encoding: gzip, *;q=0, identity\r\n\r\n",
        "GET / HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    ] {
        let request = request(FIRECRACKER, head);
        assert_eq!((request.method, &*request.target), (Method::GET, "/"), "{head:?}");
        assert_eq!(request.persistence, Persistence::Open, "{head:?}");
        assert!(request.is_firecracker, "{head:?}");
        assert!(request.body.is_empty());
    }
    for (target, path) in [("http://host", ""), ("x", ""), ("http://h/a/b?c", "/a/b?c")] {
        let request = request(FIRECRACKER, &format!("GET {target} HTTP/1.1\r\n\r\n"));
        assert_eq!(request.target, path);
    }
}

#[test]
fn own_requests_are_told_from_firecrackers() {
    for own in [
        "POST /v1/stop",
        "HEAD /v1/info",
        "POST /v1/checkpoint",
        "GET /metrics",
        "HEAD /metrics",
        "GET http://localhost/v1/checkpoint?since=1",
    ] {
        assert!(!request(FIRECRACKER, &format!("{own} HTTP/1.1\r\n\r\n")).is_firecracker, "{own}");
    }
    for theirs in ["PUT /metrics", "GET /", "PATCH /vm", "GET /info", "GET /v11/info", "DELETE /x"]
    {
        let request = request(FIRECRACKER, &format!("{theirs} HTTP/1.1\r\n\r\n"));
        assert!(request.is_firecracker, "{theirs}");
    }
    assert_eq!(fault(FIRECRACKER, b"POST /metrics HTTP/1.1\r\n"), HttpFault::Method);
}

#[test]
fn body_has_the_announced_length() {
    let bytes = "PUT /a HTTP/1.1\r\ncontent-LENGTH:5\r\n\r\nhelloGET /b HTTP/1.0\r\n\r\n";
    for dialect in [FIRECRACKER, HttpDialect::Driftline] {
        let requests = requests(dialect, bytes.as_bytes());
        let all: Vec<_> = requests.iter().map(|r| (&*r.target, &r.body[..])).collect();
        assert_eq!(all, [("/a", &b"hello"[..]), ("/b", b"")]);
    }
    let full = format!("PUT /a HTTP/1.1\r\nContent-Length: 51200\r\n\r\n{}", "x".repeat(51200));
    assert_eq!(request(FIRECRACKER, &full).body.len(), 51200);
    let two = b"PUT /a HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n";
    let same = "PUT /a HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx";
    let chunked = b"PUT /a HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n";
    for dialect in [FIRECRACKER, HttpDialect::Driftline] {
        assert_eq!(fault(dialect, two), HttpFault::TwoLengths);
        assert!(matches!(fault(dialect, chunked), HttpFault::TransferCoding { .. }));
        assert_eq!(request(dialect, same).body, "x");
    }
}

#[test]
fn line_of_1024_bytes_is_accepted() {
    let line = |bytes: usize| format!("A: {}\r\n", "x".repeat(bytes - 5));
    request(FIRECRACKER, &format!("GET / HTTP/1.1\r\n{}\r\n", line(1024)));
    fault(FIRECRACKER, format!("GET / HTTP/1.1\r\n{}\r\n", line(1025)).as_bytes());
    let first = |bytes: usize| format!("GET /{} HTTP/1.1\r\n", "x".repeat(bytes - 16));
    request(FIRECRACKER, &format!("{}\r\n", first(1024)));
    fault(FIRECRACKER, format!("{}\r\n", first(1025)).as_bytes());
}

#[test]
fn heads_are_bounded() {
    let many = format!("GET / HTTP/1.1\r\n{}", "A: b\r\n".repeat(129));
    let long = format!("GET / HTTP/1.1\r\n{}", format!("A: {}\r\n", "x".repeat(1000)).repeat(17));
    for dialect in [FIRECRACKER, HttpDialect::Driftline] {
        assert_eq!(fault(dialect, many.as_bytes()), HttpFault::HeadTooLarge);
        assert_eq!(fault(dialect, long.as_bytes()), HttpFault::HeadTooLarge);
    }
    // Firecracker's own tests send this many.
    request(FIRECRACKER, &format!("GET / HTTP/1.1\r\n{}\r\n", "Custom: 1\r\n".repeat(90)));
}

#[test]
fn connection_persists_as_the_rfc_says() {
    for (version, header, persistence) in [
        ("1.1", "", Persistence::Open),
        ("1.1", "Connection: keep-alive\r\n", Persistence::Open),
        ("1.1", "Connection: x, Close\r\n", Persistence::Close),
        ("1.0", "", Persistence::Close),
        ("1.0", "Connection: Keep-Alive\r\n", Persistence::OpenOnRequest),
        ("1.0", "Connection: keep-alive\r\nConnection: close\r\n", Persistence::Close),
    ] {
        let bytes = format!("GET / HTTP/{version}\r\n{header}\r\n");
        assert_eq!(request(HttpDialect::Driftline, &bytes).persistence, persistence, "{bytes:?}");
    }
}

#[test]
fn general_dialect_refuses_by_status() {
    let fault = |bytes: &str| fault(HttpDialect::Driftline, bytes.as_bytes()).status();
    assert_eq!(fault("nonsense\r\n"), StatusCode::BAD_REQUEST);
    assert_eq!(fault("GET / HTTP/1.1\r\nA b: c\r\n"), StatusCode::BAD_REQUEST);
    assert_eq!(fault("GET / HTTP/1.1\r\n folded: c\r\n"), StatusCode::BAD_REQUEST);
    let large = "PUT / HTTP/1.1\r\nContent-Length: 51201\r\n\r\n";
    assert_eq!(fault(large), StatusCode::PAYLOAD_TOO_LARGE);
    let chunked = "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(fault(chunked), StatusCode::LENGTH_REQUIRED);
    let long = format!("GET / HTTP/1.1\r\nA: {}", "x".repeat(8 << 10));
    assert_eq!(fault(&long), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    // Lines may end without CR, and empty lines may precede a request.
    let lenient = request(HttpDialect::Driftline, "\r\n\nGET /v1/info HTTP/1.1\nHost: x\n\n");
    assert_eq!(lenient.target, "/v1/info");
}

#[test]
fn client_may_wait_before_its_body() {
    let head = b"PUT /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
    for dialect in [FIRECRACKER, HttpDialect::Driftline] {
        let events = events(dialect, [&head[..], b"hi"]);
        assert!(matches!(&events[..], [HttpEvent::Continue, HttpEvent::Request(_)]), "{events:?}");
    }
    let nothing = b"PUT /a HTTP/1.1\r\nExpect: 100-continue\r\n\r\n";
    assert!(matches!(&events(FIRECRACKER, [&nothing[..]])[..], [HttpEvent::Request(_)]));
}

#[test]
fn next_request_is_read_after_a_fault() {
    let next = b"GET /next HTTP/1.1\r\n\r\n";
    for bytes in ["POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "GET / HTTP/1.1\r\nA\r\n\r\n"]
    {
        let mut decoder = HttpDecoder::new(FIRECRACKER);
        decoder.push(bytes.as_bytes());
        assert!(matches!(decoder.next(), HttpEvent::Fault(_)));
        assert_eq!((decoder.next(), decoder.phase()), (HttpEvent::Incomplete, HttpPhase::Idle));
        decoder.push(next);
        assert!(matches!(decoder.next(), HttpEvent::Request(r) if r.target == "/next"));
    }
}

#[test]
fn refused_body_is_skipped_without_memory() {
    let mut decoder = HttpDecoder::new(FIRECRACKER);
    decoder.push(b"PUT /a HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n");
    assert!(matches!(decoder.next(), HttpEvent::Fault(HttpFault::PayloadTooLarge { .. })));
    for _ in 0..1000 {
        assert_eq!((decoder.next(), decoder.phase()), (HttpEvent::Incomplete, HttpPhase::Body));
        decoder.push(&[b'x'; 1000]);
    }
    assert_eq!((decoder.next(), decoder.phase()), (HttpEvent::Incomplete, HttpPhase::Idle));
    assert!(decoder.allocated() < 4096, "{}", decoder.allocated());
    // A client that waits for permission may send no body after a refusal.
    decoder.push(b"PUT /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1000000\r\n\r\n");
    let may_be_withheld = true;
    let (size, limit) = (1_000_000, 51_200);
    let fault = HttpFault::PayloadTooLarge { size, limit, may_be_withheld };
    assert_eq!(decoder.next(), HttpEvent::Fault(fault));
    assert_eq!(decoder.phase(), HttpPhase::Idle);
}

#[test]
fn large_body_is_allocated_as_it_arrives() {
    let mut decoder = HttpDecoder::new(HttpDialect::Firecracker { payload_limit: usize::MAX });
    decoder.push(b"PUT /a HTTP/1.1\r\nContent-Length: 4294967295\r\n\r\n");
    assert_eq!((decoder.next(), decoder.phase()), (HttpEvent::Incomplete, HttpPhase::Body));
    assert!(decoder.allocated() < 100_000, "{}", decoder.allocated());
}

/// Parts of which streams of requests consist, right and wrong.
fn part() -> impl Strategy<Value = Vec<u8>> {
    let known = vec![
        "GET / HTTP/1.1\r\n",
        "PUT /a HTTP/1.0\r\n",
        "PUT /a HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        "GET /b HTTP/1.1\r\nAccept: x\r\n\r\n",
        "POST /v1/stop HTTP/1.1\r\n\r\n",
        "Content-Length: 5\r\n",
        "Content-Length: 60000\r\n",
        "Expect: 100-continue\r\n",
        "Host: x\r\n",
        "\r\n",
        "\n",
        "\r",
        ":",
        " ",
        "hello",
    ];
    prop_oneof![
        8 => proptest::sample::select(known).prop_map(|part| part.as_bytes().to_vec()),
        1 => collection::vec(any::<u8>(), 0..40),
        1 => (1usize..3000).prop_map(|bytes| vec![b'x'; bytes]),
    ]
}

fn dialect() -> impl Strategy<Value = HttpDialect> {
    prop_oneof![Just(FIRECRACKER), Just(HttpDialect::Driftline)]
}

/// Splits `bytes` into pieces of the given sizes, which repeat.
fn split<'a>(mut bytes: &'a [u8], sizes: &[usize]) -> Vec<&'a [u8]> {
    let mut pieces = Vec::new();
    for size in sizes.iter().cycle() {
        let (piece, rest) = bytes.split_at((*size).min(bytes.len()));
        pieces.push(piece);
        bytes = rest;
        if bytes.is_empty() {
            break;
        }
    }
    pieces
}

proptest! {
    #[test]
    fn any_split_gives_the_same_requests(
        dialect in dialect(),
        parts in collection::vec(part(), 0..12),
        sizes in collection::vec(1usize..200, 1..8),
    ) {
        let bytes = parts.concat();
        let whole = events(dialect, [&bytes[..]]);
        prop_assert_eq!(&events(dialect, split(&bytes, &sizes)), &whole);
        prop_assert_eq!(&events(dialect, split(&bytes, &[1])), &whole);
    }

    #[test]
    fn another_decoder_continues_at_any_byte(
        dialect in dialect(),
        parts in collection::vec(part(), 0..12),
        cut in any::<proptest::sample::Index>(),
    ) {
        let bytes = parts.concat();
        let (before, after) = bytes.split_at(cut.index(bytes.len() + 1));
        let mut first = HttpDecoder::new(dialect);
        let mut found = Vec::new();
        for piece in before.chunks(2048) {
            first.push(piece);
            let next = || Some(first.next()).filter(|event| *event != HttpEvent::Incomplete);
            found.extend(iter::from_fn(next));
        }
        let is_fault = |event: &HttpEvent| matches!(event, HttpEvent::Fault(_));
        prop_assume!(!found.iter().any(is_fault));
        let unanswered = first.unanswered();
        prop_assert!(unanswered.len() <= dialect.unanswered_limit());
        found.extend(events(dialect, [&unanswered[..], after]));
        let mut whole = events(dialect, [&bytes[..]]);
        // The second decoder does not know that the body was asked for.
        for event in found.iter_mut().chain(&mut whole) {
            if let HttpEvent::Request(request) = event {
                request.headers.remove("expect");
            }
        }
        prop_assert_eq!(found, whole);
    }

    #[test]
    fn memory_is_bounded_for_any_bytes(
        dialect in dialect(),
        parts in collection::vec(part(), 0..60),
        size in 1usize..2049,
    ) {
        let bytes = parts.concat();
        let mut decoder = HttpDecoder::new(dialect);
        // Growth of a vector at most doubles it.
        let limit = dialect.line_limit() + 2048;
        let begun = 2 * (dialect.unanswered_limit() - dialect.payload_limit());
        let bound = 2 * limit + begun + dialect.payload_limit();
        for piece in bytes.chunks(size) {
            decoder.push(piece);
            while decoder.next() != HttpEvent::Incomplete {}
            prop_assert!(decoder.allocated() <= bound, "{} bytes", decoder.allocated());
        }
    }
}
