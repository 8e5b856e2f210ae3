//! Tests of connections to the metrics' address.

use std::net::{SocketAddr, TcpListener, TcpStream};

use super::*;

const SCRAPE: &str = "GET /metrics HTTP/1.1\r\n\r\n";

/// Starts a process that serves `metrics`, with the connections that arrive over `adopted`.
fn serve(metrics: TcpListener, adopted: Option<UnixStream>) -> Process {
    metrics.set_nonblocking(true).unwrap();
    let (app, metrics) = (waiting("a process"), Some(metrics));
    let listeners = Listeners { metrics, adopted, ..Listeners::default() };
    Process { server: Server::start(listeners, app.clone()).unwrap(), app }
}

/// Starts a process at an address. Returns both.
fn begin() -> (Process, SocketAddr) {
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = metrics.local_addr().unwrap();
    (serve(metrics, None), address)
}

fn connect(address: SocketAddr) -> KeptClient {
    KeptClient::of(TcpStream::connect(address).unwrap())
}

fn assert_is_page(reply: &str) {
    assert!(reply.starts_with("HTTP/1.1 200 OK\r\n"), "{reply}");
    assert!(reply.contains("process_open_fds"), "{reply}");
}

#[test]
fn metrics_connections_move() {
    let (first, address) = begin();
    let (mut asked, mut silent, mut held) = (connect(address), connect(address), connect(address));
    assert_is_page(&asked.ask(SCRAPE));
    silent.send("GET /met");
    first.app.relay().hold();
    held.send(SCRAPE);
    first.run_ready_tasks();
    held.assert_waits();
    let listener = first.app.relay().metrics().unwrap();
    let (channel, adopted) = UnixStream::pair().unwrap();
    let _next = serve(listener, Some(adopted));
    first.app.relay().move_to(channel);
    // It has no connection any more.
    drop(first);
    assert_is_page(&held.reply());
    assert_is_page(&asked.ask(SCRAPE));
    assert_is_page(&silent.ask("rics HTTP/1.1\r\n\r\n"));
    assert_is_page(&connect(address).ask(SCRAPE));
}

#[test]
fn process_without_the_address_ends_its_connections() {
    let (first, address) = begin();
    let mut client = connect(address);
    assert_is_page(&client.ask(SCRAPE));
    let (dir, (channel, adopted)) = (tempfile::tempdir().unwrap(), UnixStream::pair().unwrap());
    let socket = ListeningSocket::bind(&dir.path().join("api")).unwrap();
    let _next = Process::serve(waiting("next"), socket, Some(adopted));
    first.app.relay().move_to(channel);
    client.assert_ends();
    KeptClient::connect(&dir).ask(ASK);
}
