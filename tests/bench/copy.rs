//! What the machine allows: memory copied through a loopback socket by two threads that do nothing
//! else.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

/// Bytes of one call.
const PIECE: usize = 512 << 10;

/// Sends `bytes` of memory that is there into memory that is not there yet, as that of a guest that
/// arrives; bytes/s.
pub fn bytes_per_second(bytes: usize) -> f64 {
    let from: Vec<u8> = (0..bytes / 8).flat_map(|i| (i as u64 | 1).to_le_bytes()).collect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let receiver = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // Zeroed memory is not there before it is written.
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
    assert!(receiver.join().unwrap() == from, "what was sent has arrived");
    bytes as f64 / took.as_secs_f64()
}
