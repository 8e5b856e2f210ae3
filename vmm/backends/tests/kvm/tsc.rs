//! The time stamp counters of several vCPUs. The test runs in its own process, which has no other
//! vCPUs.

use std::collections::BTreeSet;
use std::os::fd::RawFd;
use std::process::Stdio;
use std::time::Duration;

use driftline_guest::{Clock, GuestContents, GuestFactory, GuestIdentity, Lifecycle, Stateful};
use driftline_machine::config::MachineConfig;
use driftline_machine::machine::MachineFactory;
use driftline_machine::testing::{run_in_child, skip};
use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

use crate::harness::*;
use crate::state::copy;

ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// Returns the descriptors of this process's vCPUs.
fn vcpus() -> BTreeSet<RawFd> {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap().path());
    let of_vcpus = all.filter(|path| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("kvm-vcpu"))
    });
    of_vcpus.map(|path| path.file_name().unwrap().to_str().unwrap().parse().unwrap()).collect()
}

/// Returns the offset that KVM adds to the host's counter for this vCPU. `None` before Linux 5.16,
/// and where a guest sees the host's counter unchanged, whatever is written to its own.
fn offset(vcpu: RawFd) -> Option<u64> {
    let mut offset = 0u64;
    let attr = kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: &raw mut offset as u64,
    };
    // SAFETY: the kernel writes eight bytes to `offset`, and the machine keeps the descriptor open.
    let ret = unsafe { ioctl_with_ref(&vcpu, KVM_GET_DEVICE_ATTR(), &attr) };
    (ret == 0 && offset != 0).then_some(offset)
}

#[test]
fn counters_of_all_vcpus_agree_after_a_restore() {
    const NAME: &str = "counters_of_all_vcpus_agree_after_a_restore";
    const CHILD: &str = "COMPARES_COUNTERS";
    if !kvm_or_skip(NAME) {
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        return run_in_child(&format!("tsc::{NAME}"), CHILD, "1", Stdio::null());
    }
    let console = SerialLog::new();
    let config = MachineConfig { vcpus: 4, ..payload("payload,ws=1M,rate=1M,burst=8") };
    let mut machine = launch(config, &console);
    let mut before = vcpus();
    assert_eq!(before.len(), 4);
    if before.iter().any(|vcpu| offset(*vcpu).is_none()) {
        return skip(NAME, "KVM gives its guests no time stamp counters of their own");
    }
    machine.resume().unwrap();
    console.wait_for_reports(4, 1);
    for clock in [Clock::Advance, Clock::Continue] {
        machine.pause().unwrap();
        let sections = machine.save_state().unwrap();
        let factory = MachineFactory::new(console.host());
        let new = factory.create(machine.vm_id(), &machine.config()).unwrap();
        copy(&machine, &new, machine.populated().unwrap());
        // Longer than the second within which KVM treats two counters as one.
        std::thread::sleep(Duration::from_millis(1500));
        new.restore_state(&sections, clock).unwrap();
        let (both, already) = (vcpus(), console.reports().len());
        let offsets: BTreeSet<_> = both.difference(&before).map(|vcpu| offset(*vcpu)).collect();
        assert_eq!(both.len(), before.len() + 4);
        assert_eq!(offsets.len(), 1, "{clock:?}: they differ: {offsets:?}");
        machine.stop("it is elsewhere now");
        machine = new;
        machine.resume().unwrap();
        console.wait_for("reports", |_| console.reports().len() >= already + 8);
        before = vcpus();
    }
    console.assert_no_errors();
}
