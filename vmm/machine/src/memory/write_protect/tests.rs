//! Write protection of memory with userfaultfd.

use std::sync::mpsc;
use std::thread;

use driftline_dirty_tracker::Gfn;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::memory::{Backing, Discarder, HugePages, Memory, MemoryOptions};

const SOON: Duration = Duration::from_secs(20);

fn run(start: u64, count: u64) -> FrameRun {
    FrameRun { start: Gfn(start), count }
}

fn option_sets() -> impl Iterator<Item = MemoryOptions> {
    let pages = [Some(HugePages::None), Some(HugePages::Thp)];
    [Backing::Anon, Backing::Memfd].into_iter().flat_map(move |backing| {
        pages.map(|huge_pages| MemoryOptions { backing, huge_pages, prefault: false })
    })
}

/// Memory and its write protection, if this host supports it.
fn write_protected(
    test: &str,
    options: &MemoryOptions,
) -> Option<(Memory, Box<dyn WriteProtection>)> {
    // In two slots.
    let memory = Memory::new((3 << 30) + (16 << 20), options).unwrap();
    let protection = memory.write_protection().unwrap();
    if protection.is_none() {
        crate::testing::skip(test, "this host has no userfaultfd for write protection");
    }
    Some((memory, protection?))
}

fn byte(ram: &GuestRam, gfn: u64) -> u8 {
    ram.read_obj(GuestAddress(Gfn(gfn).gpa() + 9)).unwrap()
}

fn write(ram: &GuestRam, gfn: u64, value: u8) {
    ram.write_obj(value, GuestAddress(Gfn(gfn).gpa() + 9)).unwrap();
}

#[test]
fn protected_frame_keeps_its_content_until_unprotected() {
    for options in option_sets() {
        let name = "protected_frame_keeps_its_content_until_unprotected";
        let Some((memory, protection)) = write_protected(name, &options) else { return };
        let ram = memory.ram();
        // Written, never written, and the last of one slot.
        for (gfn, value) in [(5000, 7), (5001, 0), (0xb_ffff, 8)] {
            if value > 0 {
                write(ram, gfn, value);
            }
            protection.protect(&[run(gfn - 1, 2)]).unwrap();
            let (done, finished) = mpsc::channel();
            let theirs = ram.clone();
            let writer = thread::spawn(move || {
                write(&theirs, gfn, 200);
                done.send(()).unwrap();
            });
            assert_eq!(protection.awaited(SOON).unwrap(), Some(run(gfn, 1)), "{options:?}");
            finished.recv_timeout(Duration::from_millis(20)).unwrap_err();
            assert_eq!(byte(ram, gfn), value, "{options:?}");
            protection.unprotect(run(gfn - 1, 1)).unwrap();
            finished.recv_timeout(Duration::from_millis(20)).unwrap_err();
            protection.unprotect(run(gfn, 1)).unwrap();
            finished.recv_timeout(SOON).unwrap();
            writer.join().unwrap();
            assert_eq!(byte(ram, gfn), 200);
            // The write is reported once: no thread waits.
            write(ram, gfn, 201);
            assert_eq!(protection.awaited(Duration::ZERO).unwrap(), None);
        }
    }
}

#[test]
fn dropping_write_protection_wakes_all_writers() {
    for options in option_sets() {
        let name = "dropping_write_protection_wakes_all_writers";
        let Some((memory, protection)) = write_protected(name, &options) else { return };
        // In both slots.
        let frames = [run(100, 1000), run(0x10_0000, 500)];
        protection.protect(&frames).unwrap();
        let writers = [100, 600, 1099, 0x10_0000, 0x10_01f3].map(|gfn| {
            let ram = memory.ram().clone();
            thread::spawn(move || write(&ram, gfn, 3))
        });
        protection.awaited(SOON).unwrap().unwrap();
        let refused = memory.write_protection().err().map(|e| e.to_string());
        assert!(refused.is_some_and(|e| e.contains("userfaultfd")), "one at a time");
        drop(protection);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let again = memory.write_protection().unwrap().unwrap();
        again.protect(&frames).unwrap();
        again.unprotect_all();
        write(memory.ram(), 100, 4);
    }
}

#[test]
fn second_write_protection_is_refused_without_effect() {
    for options in option_sets() {
        let name = "second_write_protection_is_refused_without_effect";
        let Some((memory, protection)) = write_protected(name, &options) else { return };
        let ram = memory.ram();
        write(ram, 70, 5);
        protection.protect(&[run(70, 4), run(0x10_0000, 3)]).unwrap();
        for _ in 0..2 {
            memory.write_protection().map(|other| other.is_some()).unwrap_err();
        }
        assert_eq!(
            memory.protected_frames().lock().protected.frames(),
            7,
            "the balloon waits for them"
        );
        let (done, finished) = mpsc::channel();
        for gfn in [70, 0x10_0002] {
            let (theirs, done) = (ram.clone(), done.clone());
            thread::spawn(move || {
                write(&theirs, gfn, 6);
                done.send(()).unwrap();
            });
            assert_eq!(protection.awaited(SOON).unwrap(), Some(run(gfn, 1)), "{options:?}");
        }
        finished.recv_timeout(Duration::from_millis(20)).unwrap_err();
        assert_eq!(byte(ram, 70), 5, "{options:?}");
        protection.unprotect_all();
        finished.recv_timeout(SOON).unwrap();
        finished.recv_timeout(SOON).unwrap();
        assert_eq!((byte(ram, 70), memory.protected_frames().lock().protected.frames()), (6, 0));
    }
}

#[test]
fn frame_protected_again_meanwhile_is_unprotected_at_end() {
    const RUNS: u64 = 2000;
    for options in option_sets() {
        let name = "frame_protected_again_meanwhile_is_unprotected_at_end";
        let Some((memory, protection)) = write_protected(name, &options) else { return };
        let (ram, protection) = (memory.ram(), &*protection);
        let runs = (0..RUNS).map(|n| run(256 + 32 * n, 1)).collect::<Vec<_>>();
        runs.iter().for_each(|run| write(ram, run.start.0, 1));
        for _ in 0..10 {
            let writes = AtomicBool::new(true);
            let all_written = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while writes.load(Ordering::Relaxed) {
                        runs.iter().rev().take(200).for_each(|run| write(ram, run.start.0, 2));
                    }
                    all_written.store(true, Ordering::Relaxed);
                });
                scope.spawn(|| {
                    while !all_written.load(Ordering::Relaxed) {
                        if let Some(run) = protection.awaited(Duration::from_millis(1)).unwrap() {
                            protection.unprotect(run).unwrap();
                        }
                    }
                });
                (0..4).for_each(|_| protection.protect(&runs).unwrap());
                writes.store(false, Ordering::Relaxed);
            });
            protection.unprotect_all();
            let (done, finished) = mpsc::channel();
            let (theirs, to_write) = (ram.clone(), runs.clone());
            thread::spawn(move || {
                to_write.iter().for_each(|run| write(&theirs, run.start.0, 3));
                done.send(()).unwrap();
            });
            finished.recv_timeout(SOON).unwrap_or_else(|_| {
                let waits = protection.awaited(Duration::ZERO).unwrap();
                panic!("{waits:?} is protected and in no set: {options:?}")
            });
        }
    }
}

#[test]
fn failed_unprotect_wakes_writers_and_ends_protection() {
    for options in option_sets() {
        let memory = Memory::new((3 << 30) + (16 << 20), &options).unwrap();
        let ram = memory.ram();
        let Some(protection) = MemoryWriteProtection::open(ram, memory.protected_frames()).unwrap()
        else {
            let name = "failed_unprotect_wakes_writers_and_ends_protection";
            return crate::testing::skip(name, "this host has no userfaultfd for write protection");
        };
        let (done, finished) = mpsc::channel();
        for gfn in [500, 0x10_0007] {
            protection.protect(&[run(gfn, 1)]).unwrap();
            let (theirs, done) = (ram.clone(), done.clone());
            thread::spawn(move || {
                write(&theirs, gfn, 6);
                done.send(()).unwrap();
            });
            assert_eq!(protection.awaited(SOON).unwrap(), Some(run(gfn, 1)), "{options:?}");
        }
        // From here on the kernel refuses to unprotect frames, and wakes no writer.
        let first = ram.iter().next().unwrap();
        protection.userfault.unregister(first.as_ptr() as u64, first.len()).unwrap();
        protection.unprotect(run(500, 1)).unwrap_err();
        finished.recv_timeout(Duration::from_millis(20)).unwrap_err();
        protection.unprotect_all();
        finished.recv_timeout(SOON).unwrap();
        finished.recv_timeout(SOON).unwrap();
        protection.protect(&[run(0x10_0000, 1)]).unwrap_err();
        protection.unprotect(run(0x10_0000, 1)).unwrap_err();
        drop(protection);
        let again = memory.write_protection().unwrap().unwrap();
        again.protect(&[run(500, 1)]).unwrap();
    }
}

#[test]
fn discard_waits_until_protected_frames_are_unprotected() {
    for options in option_sets().filter(|o| o.huge_pages == Some(HugePages::None)) {
        let name = "discard_waits_until_protected_frames_are_unprotected";
        let Some((memory, protection)) = write_protected(name, &options) else { return };
        let ram = memory.ram();
        (64..128).for_each(|gfn| write(ram, gfn, 9));
        protection.protect(&[run(70, 4), run(120, 50)]).unwrap();
        let mut discarder = Discarder::open(memory.protected_frames().clone()).unwrap();
        // Discarding frames that are not protected does not wait.
        assert_eq!(discarder.discard(ram, run(64, 6)).unwrap(), 6);
        let theirs = ram.clone();
        let balloon = thread::spawn(move || discarder.discard(&theirs, run(64, 64)).unwrap());
        for (first, all) in [(70, run(70, 4)), (120, run(120, 50))] {
            // The balloon waits without a fault, so no descriptor reports it.
            let mut looks =
                (0..4000).map(|_| protection.awaited(Duration::from_millis(5)).unwrap());
            let awaited = looks.find_map(|awaited| awaited);
            assert_eq!(awaited.map(|run| run.start), Some(Gfn(first)));
            assert_eq!(byte(ram, first), 9, "{options:?}");
            protection.unprotect(all).unwrap();
        }
        assert_eq!(balloon.join().unwrap(), 58);
        assert!((64..128).all(|gfn| byte(ram, gfn) == 0));
    }
}
