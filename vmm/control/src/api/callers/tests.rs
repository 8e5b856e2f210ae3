//! Tests of the bounds on connections and requests.

use std::future::poll_fn;

use tokio::net::{TcpListener, UnixListener};

use super::*;

/// Returns the API's socket, and a function that connects to it.
fn listen() -> (Callers, impl Fn() -> std::os::unix::net::UnixStream) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let listener = Listening::Unix(UnixListener::bind(&path).unwrap());
    (Callers::new(listener, None), move || {
        let _dir = &dir;
        std::os::unix::net::UnixStream::connect(&path).unwrap()
    })
}

#[tokio::test]
async fn displaced_connection_ends_while_it_writes() {
    let (mut callers, connect) = listen();
    let _never_reads = connect();
    let (mut stream, _) = callers.accept().await;
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
    // The task waits.
    tokio::task::yield_now().await;
    let mut others = Vec::new();
    for _ in 0..IDLE {
        let client = connect();
        others.push((client, callers.accept().await));
    }
    let ended = tokio::time::timeout(Duration::from_secs(60), writing).await;
    let broken = io::ErrorKind::BrokenPipe;
    assert_eq!(ended.expect("it still writes").unwrap(), (Err(broken), Err(broken)));
}

#[tokio::test]
async fn displaced_caller_begins_nothing() {
    let (mut callers, connect) = listen();
    let _first = connect();
    let (_stream, caller) = callers.accept().await;
    let mut others = Vec::new();
    for _ in 0..IDLE {
        let client = connect();
        others.push((client, callers.accept().await));
    }
    assert_eq!(caller.begin(Class::Other).unwrap_err(), Refusal::Displaced);
}

#[tokio::test]
async fn requests_count_by_class_until_they_end() {
    let (mut callers, connect) = listen();
    let classes = [Class::Other, Class::Wait, Class::End, Class::Stop, Class::Look];
    let mut begun = Vec::new();
    // A full class does not reduce the limit of the others.
    for class in classes {
        for _ in 0..class.limit() {
            let client = connect();
            let (stream, caller) = callers.accept().await;
            begun.push(caller.begin(class).unwrap());
            // The client disconnects; its request continues.
            drop((client, stream));
        }
        let _client = connect();
        let (_stream, caller) = callers.accept().await;
        assert_eq!(caller.begin(class).unwrap_err(), Refusal::Full, "{class:?}");
        drop(begun.pop());
        begun.push(caller.begin(class).unwrap());
    }
}

#[tokio::test]
async fn silent_connection_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limit = Duration::from_millis(200);
    let mut callers = Callers::new(Listening::Tcp(listener), Some(limit));
    let client = tokio::net::TcpStream::connect(address).await.unwrap();
    let (mut stream, _) = callers.accept().await;
    let mut bytes = [0; 16];
    let mut read = async |stream: &mut Stream| {
        let mut buf = ReadBuf::new(&mut bytes);
        let began = Instant::now();
        poll_fn(|context| Pin::new(&mut *stream).poll_read(context, &mut buf)).await.unwrap();
        (buf.filled().len(), began.elapsed())
    };
    // Bytes put the end off.
    for _ in 0..4 {
        tokio::time::sleep(limit / 3).await;
        client.try_write(b"x").unwrap();
        assert_eq!(read(&mut stream).await.0, 1);
    }
    let (bytes, waited) = read(&mut stream).await;
    assert_eq!(bytes, 0, "the end");
    assert!(waited >= limit / 2 && waited < 100 * limit, "{waited:?}");
}

#[tokio::test]
async fn silent_connection_ends_while_it_writes() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut callers = Callers::new(Listening::Tcp(listener), Some(Duration::from_millis(100)));
    let _never_reads = tokio::net::TcpStream::connect(address).await.unwrap();
    let (mut stream, _) = callers.accept().await;
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
