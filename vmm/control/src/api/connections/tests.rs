//! Tests of the bounds on connections and requests.

use std::future::poll_fn;

use tokio::net::{TcpListener, UnixListener};

use super::*;
use crate::api::relay::Relay;

/// Returns the API's socket, and a function that connects to it.
fn listen() -> (BoundedListener, impl Fn() -> std::os::unix::net::UnixStream) {
    listen_with(&Relay::default())
}

/// Does the same for a process that answers requests, or holds them, as `relay` says.
fn listen_with(
    relay: &Relay,
) -> (BoundedListener, impl Fn() -> std::os::unix::net::UnixStream + use<>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let listener = ServerSocket::Unix(UnixListener::bind(&path).unwrap());
    (BoundedListener::new(listener, None, relay.gate()), move || {
        let _dir = &dir;
        std::os::unix::net::UnixStream::connect(&path).unwrap()
    })
}

#[tokio::test]
async fn displaced_connection_ends_while_it_writes() {
    let (listener, connect) = listen();
    let _never_reads = connect();
    let (mut stream, _) = listener.accept().await;
    let piece = [0; 1 << 16];
    poll_fn(|context| {
        while Pin::new(&mut stream).poll_write(context, &piece).is_ready() {}
        Poll::Ready(())
    })
    .await;
    let writing = tokio::spawn(async move {
        let wrote = poll_fn(|context| Pin::new(&mut stream).poll_write(context, &piece)).await;
        let flushed = poll_fn(|context| Pin::new(&mut stream).poll_flush(context)).await;
        (wrote.map_err(|e| e.kind()), flushed.map_err(|e| e.kind()))
    });
    // The task runs until it waits.
    tokio::task::yield_now().await;
    let mut others = Vec::new();
    for _ in 0..MAX_IDLE {
        let client = connect();
        others.push((client, listener.accept().await));
    }
    let ended = tokio::time::timeout(Duration::from_secs(60), writing).await;
    let broken = io::ErrorKind::BrokenPipe;
    assert_eq!(ended.expect("it still writes").unwrap(), (Err(broken), Err(broken)));
}

#[tokio::test]
async fn displaced_caller_begins_nothing() {
    let (listener, connect) = listen();
    let _first = connect();
    let (_stream, connection) = listener.accept().await;
    let mut others = Vec::new();
    for _ in 0..MAX_IDLE {
        let client = connect();
        others.push((client, listener.accept().await));
    }
    assert_eq!(connection.begin(RequestClass::Other).unwrap_err(), Refusal::Displaced);
}

#[tokio::test]
async fn released_requests_displace_no_connection() {
    let relay = Relay::default();
    let (listener, connect) = listen_with(&relay);
    let _first = connect();
    let (_stream, connection) = listener.accept().await;
    relay.hold();
    relay.release();
    let mut others = Vec::new();
    for _ in 0..MAX_IDLE {
        let client = connect();
        others.push((client, listener.accept().await));
    }
    assert!(connection.begin(RequestClass::Other).is_ok());
}

#[tokio::test]
async fn requests_count_by_class_until_they_end() {
    let (listener, connect) = listen();
    let classes = [
        RequestClass::Other,
        RequestClass::Wait,
        RequestClass::EndJob,
        RequestClass::Stop,
        RequestClass::Status,
    ];
    let mut begun = Vec::new();
    // A full class does not reduce the limit of the others.
    for class in classes {
        for _ in 0..class.limit() {
            let client = connect();
            let (stream, connection) = listener.accept().await;
            begun.push(connection.begin(class).unwrap());
            // The client disconnects; its request continues.
            drop((client, stream));
        }
        let _client = connect();
        let (_stream, connection) = listener.accept().await;
        assert_eq!(connection.begin(class).unwrap_err(), Refusal::Full, "{class:?}");
        drop(begun.pop());
        begun.push(connection.begin(class).unwrap());
    }
}

#[tokio::test]
async fn silent_connection_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limit = Duration::from_millis(200);
    let gate = Relay::default().gate();
    let listener = BoundedListener::new(ServerSocket::Tcp(listener), Some(limit), gate);
    let client = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut last_read = Instant::now();
    let (mut stream, _) = listener.accept().await;
    let mut sent = 0;
    loop {
        // Each of these bytes postpones the end.
        if sent < 4 {
            tokio::time::sleep(limit / 3).await;
            client.try_write(b"x").unwrap();
            sent += 1;
        }
        let begun = Instant::now();
        let mut bytes = [0; 16];
        let mut buf = ReadBuf::new(&mut bytes);
        let read = poll_fn(|context| Pin::new(&mut stream).poll_read(context, &mut buf));
        let read = tokio::time::timeout(Duration::from_secs(60), read).await;
        read.expect("it still reads").unwrap();
        if buf.filled().is_empty() {
            break;
        }
        last_read = begun;
    }
    // A busy host may delay a byte beyond the limit. The connection ends earlier then, but not
    // before the limit.
    assert!(last_read.elapsed() >= limit, "{:?}", last_read.elapsed());
}

#[tokio::test]
async fn silent_connection_ends_while_it_writes() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let gate = Relay::default().gate();
    let listener =
        BoundedListener::new(ServerSocket::Tcp(listener), Some(Duration::from_millis(100)), gate);
    let _never_reads = tokio::net::TcpStream::connect(address).await.unwrap();
    let (mut stream, _) = listener.accept().await;
    let piece = [0; 1 << 16];
    let writing = async {
        loop {
            if let Err(e) =
                poll_fn(|context| Pin::new(&mut stream).poll_write(context, &piece)).await
            {
                return e.kind();
            }
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(60), writing).await;
    assert_eq!(ended.expect("it still writes"), io::ErrorKind::BrokenPipe);
}
