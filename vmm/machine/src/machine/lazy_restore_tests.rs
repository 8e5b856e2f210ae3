//! Machines in a lazy restore with lost pages, in a process that does not exit on a lost page:
//! every request still completes.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
use driftline_guest::{
    Clock, Lifecycle, PageSource, PageSourceError, Populate, RunState, Section, Stateful, VmId,
};
use driftline_store::StoreError;

use super::tests::{LONG, wait_until};
use super::{BuildOptions, KvmMachine};
use crate::boot;
use crate::config::{HostConfig, SerialSink};
use crate::testing::{Elf, kernel_config, kvm_or_skip, skip};

/// Frame of the guest's kvmclock.
const CLOCK_FRAME: Gfn = Gfn(0x200);

/// Enables kvmclock, then prints an R.
#[rustfmt::skip]
const CLOCKED: [u8; 23] = [
    // mov ecx, 0x4b564d01; mov eax, 0x200001; xor edx, edx; wrmsr
    0xb9, 0x01, 0x4d, 0x56, 0x4b, 0xb8, 0x01, 0x00, 0x20, 0x00, 0x31, 0xd2, 0x0f, 0x30,
    // mov dx, 0x3f8; mov al, 'R'; out dx, al; jmp $
    0x66, 0xba, 0xf8, 0x03, 0xb0, b'R', 0xee, 0xeb, 0xfe,
];

/// A source of zeroed pages, one of which may be damaged. Each read waits for a message from
/// `gate`, or until its sender is dropped.
struct ZeroPageSource {
    frames: FrameSet,
    damaged: Option<Gfn>,
    gate: Receiver<()>,
}

impl PageSource for ZeroPageSource {
    fn epoch(&self) -> u64 {
        7
    }

    fn frames(&self) -> &FrameSet {
        &self.frames
    }

    fn working_set(&self) -> &[FrameRun] {
        &[]
    }

    fn finish(&mut self, _: &[FrameRun]) {}

    fn read(&mut self, run: FrameRun, contents: &mut [u8]) -> Result<(), PageSourceError> {
        let _ = self.gate.recv();
        contents.fill(0);
        match self.damaged.filter(|gfn| (run.start..run.end()).contains(gfn)) {
            Some(_) => Err(PageSourceError::new(StoreError::NoEpoch {
                dir: "a store".into(),
                epoch: Some(7),
            })),
            None => Ok(()),
        }
    }
}

/// Returns the state of a guest with a kvmclock.
fn state() -> Vec<Section> {
    let dir = tempfile::tempdir().unwrap();
    let (kernel, serial) = (dir.path().join("kernel"), dir.path().join("serial"));
    std::fs::write(&kernel, Elf::new(&CLOCKED).bytes()).unwrap();
    let host = HostConfig { serial: SerialSink::File(serial.clone()), ..Default::default() };
    let machine = KvmMachine::launch(kernel_config(&kernel), &host).unwrap();
    machine.resume().unwrap();
    wait_until("a kvmclock", || std::fs::read_to_string(&serial).unwrap_or_default() == "R");
    machine.pause().unwrap();
    machine.save_state().unwrap()
}

/// Returns a machine that fetches both frames lazily, and a sender: reads wait until it is dropped.
fn restoring(test: &str, damaged: Option<Gfn>) -> Option<(Arc<KvmMachine>, Sender<()>)> {
    if !kvm_or_skip(test) {
        return None;
    }
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let config = kernel_config(std::path::Path::new("none"));
    let built = KvmMachine::build(VmId::random(), config, &host, BuildOptions::empty());
    let machine = built.unwrap();
    let (open, gate) = mpsc::channel();
    let frames = [CLOCK_FRAME, boot::generation_frame()];
    let frames = frames.into_iter().map(|start| FrameRun { start, count: 1 }).collect();
    if machine.fetch_lazily(Box::new(ZeroPageSource { frames, damaged, gate })).unwrap().is_some() {
        skip(test, "this host has no userfaultfd for missing pages");
        return None;
    }
    Some((machine, open))
}

fn refused(machine: &KvmMachine, sections: &[Section]) -> String {
    let began = Instant::now();
    let why = machine.restore_state(sections, Clock::Continue).unwrap_err().to_string();
    assert!(began.elapsed() < LONG, "{:?}: {why}", began.elapsed());
    why
}

#[test]
fn lost_generation_id_page_refuses_the_restore() {
    let test = "lost_generation_id_page_refuses_the_restore";
    let Some((machine, open)) = restoring(test, Some(boot::generation_frame())) else { return };
    drop(open);
    let why = refused(&machine, &state());
    assert!(why.contains("page 0xff of checkpoint 7 is lost"), "{why}");
    let began = Instant::now();
    machine.stop("it cannot run");
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    assert_eq!(machine.run_state(), RunState::Stopped);
}

#[test]
fn lost_page_of_the_clock_refuses_the_restore() {
    let test = "lost_page_of_the_clock_refuses_the_restore";
    let Some((machine, open)) = restoring(test, Some(CLOCK_FRAME)) else { return };
    drop(open);
    let why = refused(&machine, &state());
    assert!(why.contains("page 0x200 of checkpoint 7 is lost"), "{why}");
    machine.stop("it cannot run");
}

#[test]
fn vcpu_without_restored_state_is_named() {
    let Some((machine, open)) = restoring("vcpu_without_restored_state_is_named", None) else {
        return;
    };
    let why = refused(&machine, &state());
    assert!(why.contains("vCPU 0 did not restore its state"), "{why}");
    let why = machine.resume().unwrap_err().to_string();
    assert!(why.contains("restoring it failed half-way"), "{why}");
    // The page arrives after all, and the thread ends.
    drop(open);
    machine.stop("it cannot run");
}
