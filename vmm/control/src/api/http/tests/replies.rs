//! Tests of turning replies into bytes.

use axum::body::Bytes;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};

use super::super::decode::Persistence;
use super::super::dialect::{HttpDialect, HttpFault};
use super::super::reply::{HttpReply, permission};
use super::FIRECRACKER;

fn encoded(reply: &HttpReply, dialect: HttpDialect, persistence: Persistence) -> String {
    String::from_utf8(reply.encode(dialect, persistence)).unwrap()
}

#[test]
fn firecrackers_replies_are_exact() {
    let head = "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n";
    let done = |deprecated| {
        let reply = HttpReply::json(StatusCode::NO_CONTENT, Bytes::new(), deprecated);
        encoded(&reply, FIRECRACKER, Persistence::Open)
    };
    assert_eq!(done(false), format!("{head}\r\n"));
    assert_eq!(done(false).len(), 66);
    assert_eq!(done(true), format!("{head}Deprecation: true\r\n\r\n"));
    let reply = HttpReply::json(StatusCode::OK, "{}", false);
    assert_eq!(
        encoded(&reply, FIRECRACKER, Persistence::Open),
        "HTTP/1.1 200 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\
         Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    );
    let refusal = HttpReply::refusal(FIRECRACKER, &HttpFault::Request);
    assert_eq!(
        encoded(&refusal, FIRECRACKER, Persistence::Open),
        "HTTP/1.1 400 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\
         Content-Type: application/json\r\nContent-Length: 81\r\n\r\n\
         { \"error\": \"Invalid request.\nAll previous unanswered requests will be dropped.\" }"
    );
    assert_eq!(
        String::from_utf8(permission(FIRECRACKER)).unwrap(),
        "HTTP/1.1 100 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"
    );
}

#[test]
fn replies_are_no_multiple_of_a_read() {
    let mut padded = 0;
    for length in 0..256 {
        let body = "x".repeat(length);
        let reply = HttpReply::json(StatusCode::OK, body.clone(), false);
        let bytes = encoded(&reply, FIRECRACKER, Persistence::Open);
        assert_ne!(bytes.len() % 64, 0, "{bytes}");
        assert!(bytes.ends_with(&format!("\r\nContent-Length: {length}\r\n\r\n{body}")));
        padded += usize::from(bytes.contains("application/json \r\n"));
    }
    assert_eq!(padded, 4);
}

#[test]
fn general_replies_say_when_a_connection_ends() {
    let reply = HttpReply::fault(StatusCode::BAD_REQUEST, "no \"x\"".to_owned());
    let body = r#"{"fault_message":"no \"x\""}"#;
    for (persistence, header) in [
        (Persistence::Open, ""),
        (Persistence::OpenOnRequest, "connection: keep-alive\r\n"),
        (Persistence::Close, "connection: close\r\n"),
    ] {
        assert_eq!(
            encoded(&reply, HttpDialect::Driftline, persistence),
            format!(
                "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n{header}\r\n{body}",
                body.len()
            )
        );
    }
}

#[test]
fn reply_to_head_announces_the_length() {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_LENGTH, HeaderValue::from_static("1234"));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    let reply = HttpReply::routed(StatusCode::OK, headers, Bytes::new());
    let bytes = encoded(&reply, HttpDialect::Driftline, Persistence::Open);
    assert_eq!(
        bytes,
        "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 1234\r\n\r\n"
    );
}
