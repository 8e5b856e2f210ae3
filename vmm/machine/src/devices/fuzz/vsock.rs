//! The socket device, and the host's programs.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::LazyLock;

use tempfile::TempDir;

use super::device::{FuzzedDevice, given};
use super::input::FuzzInput;
use super::memory::FuzzMemory;
use crate::config::VsockConfig;
use crate::devices::opener::Opener;
use crate::devices::virtio::{Device, DriverBuffer};
use crate::devices::vsock::Vsock;

/// Directory of the unix sockets, with a program that listens for the guest.
struct SocketDir {
    dir: TempDir,
    listener: UnixListener,
}

thread_local! {
    static SOCKETS: Rc<SocketDir> = {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("v_{}", FuzzedVsock::LISTENS));
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Rc::new(SocketDir { dir, listener })
    };
}

/// The socket device, with programs on both sides.
pub(super) struct FuzzedVsock {
    queue: usize,
    config: VsockConfig,
    place: Rc<SocketDir>,
    programs: Vec<UnixStream>,
}

impl FuzzedVsock {
    const CID: u32 = 5;
    const LISTENS: u32 = 1;

    pub(super) fn new(queue: usize) -> Self {
        let place = SOCKETS.with(Rc::clone);
        // Connections of an earlier run.
        while place.listener.accept().is_ok() {}
        let config = VsockConfig { cid: Self::CID, uds: place.dir.path().join("v") };
        Self { queue, config, place, programs: Vec::new() }
    }

    fn program(&mut self, from: &mut FuzzInput<'_>) -> Option<&mut UnixStream> {
        let count = self.programs.len().max(1);
        self.programs.get_mut(usize::from(from.u8()) % count)
    }
}

impl FuzzedDevice for FuzzedVsock {
    fn make(&mut self) -> Box<dyn Device> {
        Box::new(Vsock::new(&self.config, opener()).unwrap())
    }

    fn queue(&self) -> usize {
        self.queue
    }

    fn request(
        &mut self,
        queue: usize,
        from: &mut FuzzInput<'_>,
        guest: &mut FuzzMemory,
    ) -> Vec<DriverBuffer> {
        if queue != 1 {
            let mut pieces = from.pieces(true);
            if from.u8() < 200 {
                let len = 44 + u32::from(from.u16()) % 5000;
                pieces.push(DriverBuffer { addr: from.address(), len, writable: true });
            }
            return pieces;
        }
        let mut header = Vec::new();
        let cid = if from.u8() < 240 { Self::CID.into() } else { from.u64() };
        header.extend(cid.to_le_bytes());
        header.extend(if from.u8() < 240 { 2u64 } else { from.u64() }.to_le_bytes());
        // Ports of the guest and of the host: a listening one, a connecting one, or any.
        header.extend(u32::from(from.u8() % 4).to_le_bytes());
        let port = from.one_of(&[1, 1, 1 << 30, (1 << 30) + 1, 2]);
        header.extend(u32::to_le_bytes(port));
        let data = usize::from(from.u8());
        let len = if from.u8() < 230 { data as u32 } else { from.u32() };
        header.extend(len.to_le_bytes());
        header.extend(if from.u8() < 240 { 1u16 } else { from.u16() }.to_le_bytes());
        header.extend(u16::from(from.u8() % 9).to_le_bytes());
        header.extend(u32::from(from.u8() % 4).to_le_bytes());
        let room = if from.flip() { 256 << 10 } else { from.u32() };
        header.extend(u32::to_le_bytes(room));
        header.extend(u32::from(from.u8()).to_le_bytes());
        let mut pieces = given(&header, from, guest);
        if data > 0 {
            pieces.push(DriverBuffer { addr: from.address(), len: data as u32, writable: false });
        }
        pieces
    }

    fn cause_backend_event(&mut self, from: &mut FuzzInput<'_>) {
        match from.u8() % 6 {
            0 => {
                // If the listen queue is full, no program connects.
                let Ok(mut program) = UnixStream::connect(&self.config.uds) else { return };
                program.set_nonblocking(true).unwrap();
                let port = from.u8() % 4;
                let _ = match from.u8() {
                    0..200 => program.write_all(format!("CONNECT {port}\n").as_bytes()),
                    _ => program.write_all(from.bytes(40)),
                };
                self.programs.push(program);
            }
            1 => {
                if let Ok((program, _)) = self.place.listener.accept() {
                    program.set_nonblocking(true).unwrap();
                    self.programs.push(program);
                }
            }
            2 => {
                let data = vec![0x33; from.u16().into()];
                if let Some(program) = self.program(from) {
                    let _ = program.write(&data);
                }
            }
            3 => {
                if let Some(program) = self.program(from) {
                    let _ = program.read(&mut [0; 4096]);
                }
            }
            4 => {
                let how = from.one_of(&[Shutdown::Read, Shutdown::Write]);
                if let Some(program) = self.program(from) {
                    let _ = program.shutdown(how);
                }
            }
            _ => {
                if !self.programs.is_empty() {
                    let which = usize::from(from.u8()) % self.programs.len();
                    self.programs.swap_remove(which);
                }
            }
        }
    }
}

/// Returns the opener, shared by all inputs.
fn opener() -> &'static Opener {
    static OPENER: LazyLock<Opener> = LazyLock::new(|| Opener::start().unwrap());
    &OPENER
}
