//! A disk whose process was killed in the middle of its work.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;

use super::*;

const TEST: &str = "devices::block::tests::killed::disk_of_a_killed_process_is_free";
/// Environment variable that names the disk for the process that is killed.
const DISK: &str = "KILLED_DISK";

/// Limit on waiting for a line of that process.
const LIMIT: Duration = Duration::from_secs(60);

/// Makes 16 writes and a flush at a time until the process is killed. Prints a line after each
/// time.
fn work_until_killed(path: &Path) -> ! {
    let config = crate::testing::disk("d", path, BYTES);
    let mut block = BlockDevice::open(&config, 2, VmId::random(), None).unwrap();
    block.acquire(NextHost::Another).unwrap();
    let mut driver = Driver::started(Box::new(block));
    let data = driver.readable(&[1; 64 << 10]);
    let (out, flush) = (VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_FLUSH);
    let (out, flush) = (header(&mut driver, out, 0), header(&mut driver, flush, 0));
    let status = driver.writable(1);
    loop {
        let heads = [0; 16].map(|_| driver.post(0, &[out, data, status]));
        let flush = driver.post(0, &[flush, status]);
        driver.kick(0);
        for head in heads.into_iter().chain([flush]) {
            driver.wait_used(0, head);
        }
        eprintln!("busy");
    }
}

/// The kernel closes the files of a killed process's io_uring a little after the process has ended.
/// A process that opens the disk at once still gets the lock.
#[test]
fn disk_of_a_killed_process_is_free() {
    if let Some(path) = std::env::var_os(DISK) {
        work_until_killed(path.as_ref());
    }
    let disk = Disk::new();
    for _ in 0..5 {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", TEST, "--nocapture"]).env(DISK, disk.file.path());
        let mut child = child.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, busy) = mpsc::channel();
        // The thread ends with the child.
        let reader = thread::spawn(move || {
            for _ in lines.map_while(Result::ok).filter(|line| line == "busy") {
                // Nothing receives the last lines.
                let _ = sender.send(());
            }
        });
        let is_busy = (0..20).all(|_| busy.recv_timeout(LIMIT).is_ok());
        child.kill().unwrap();
        child.wait().unwrap();
        reader.join().unwrap();
        assert!(is_busy, "the child does not work");
        let file = DiskFile::open(&disk.config, VmId::random()).unwrap();
        file.lock().unwrap();
    }
}
