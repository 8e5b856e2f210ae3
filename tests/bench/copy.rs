//! The upper bound of the machine: two threads copy memory through a loopback socket.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

/// Bytes of one read or write.
const PIECE: usize = 512 << 10;

/// Copies `bytes` of resident memory to memory that is not resident, like that of an arriving
/// guest. Returns bytes/s.
pub fn bytes_per_second(bytes: usize) -> f64 {
    let from: Vec<u8> = (0..bytes / 8).flat_map(|i| (i as u64 | 1).to_le_bytes()).collect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let receiver = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // Zeroed memory is not resident before it is written.
        let mut into = vec![0u8; bytes];
        for piece in into.chunks_mut(PIECE) {
            stream.read_exact(piece).unwrap();
        }
        stream.write_all(&[1]).unwrap();
        into
    });
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    let begun = Instant::now();
    for piece in from.chunks(PIECE) {
        stream.write_all(piece).unwrap();
    }
    stream.read_exact(&mut [0]).unwrap();
    let took = begun.elapsed();
    assert!(receiver.join().unwrap() == from, "the copy is wrong");
    bytes as f64 / took.as_secs_f64()
}
