//! The hand-over of the guest: releases and acquires what only one process may have at a time.

use std::time::Duration;

use driftline_guest::{
    GuestError, GuestIdentity, HandOver, Lifecycle, NextHost, RunState, SharedGuest,
};

use super::KvmMachine;
use crate::devices::{DiskError, Drive, device_files};
use crate::pm_qos;

impl KvmMachine {
    /// Returns where the guest continues after its release here: at `next`, or, until its take-over
    /// is complete, in the process of this host that has offered it with its files.
    fn next_or_last_host(&self, next: NextHost) -> NextHost {
        match self.has_handed_over_files && self.memory.right().is_borrowed() {
            true => NextHost::This,
            false => next,
        }
    }

    /// Writes the guest's last output of this process if the next process is of this host, which
    /// may write to the same file or terminal.
    fn finish_output(&self, next: NextHost) {
        if next == NextHost::This && self.run_state() == RunState::Paused {
            self.serial.drain_for_next_process();
        }
    }

    /// Refuses `request` unless the guest is paused.
    fn require_paused(&self, request: &'static str) -> Result<(), GuestError> {
        match self.run_state() {
            RunState::Paused => Ok(()),
            state => Err(GuestError::State { request, state }),
        }
    }
}

impl HandOver for KvmMachine {
    fn stay_awake(&self) {
        pm_qos::stay_awake();
    }

    fn share(&self) -> Result<SharedGuest, GuestError> {
        let shared = self.memory.share()?;
        if self.config.devices.is_empty() {
            return Ok(shared);
        }
        let files = self.ask("share the devices' files", |supervisor| supervisor.share())?;
        Ok(shared.with_device_files(device_files(&self.config.devices, files)))
    }

    fn flush(&self, limit: Duration) -> Result<bool, GuestError> {
        let failed = |e: DiskError| GuestError::System { what: "flushing", cause: e.into() };
        Drive::flush(&self.drives, limit).map_err(failed)
    }

    fn release(&self, next: NextHost) -> Result<(), GuestError> {
        self.finish_output(next);
        // A guest without devices releases only the right to run, so `MachineStatus` alone decides;
        // no round trip to the supervisor is needed while the guest is paused.
        if self.config.devices.is_empty() {
            return Ok(self.status.set_acquired("release", false)?);
        }
        let next = self.next_or_last_host(next);
        self.ask("release the devices", move |supervisor| supervisor.release(next))
    }

    fn detach(&self, next: NextHost) -> Result<Vec<u8>, GuestError> {
        // No peer can reach a guest without devices. A guest that was stopped meanwhile is refused.
        if self.config.devices.is_empty() {
            return self.require_paused("detach").map(|()| Vec::new());
        }
        let next = self.next_or_last_host(next);
        self.ask("detach the devices", move |supervisor| supervisor.detach(next))
    }

    fn release_and_detach(&self, next: NextHost) -> Result<Vec<u8>, GuestError> {
        if self.config.devices.is_empty() {
            self.release(next)?;
            return self.detach(next);
        }
        self.finish_output(next);
        let next = self.next_or_last_host(next);
        self.ask("release and detach the devices", move |supervisor| {
            supervisor.release(next)?;
            supervisor.detach(next)
        })
    }

    fn attach(&self, queued_packets: &[u8]) {
        if self.config.devices.is_empty() && queued_packets.is_empty() {
            return;
        }
        let (queued_packets, vm_id) = (queued_packets.to_vec(), self.vm_id());
        self.supervisor.tell(move |supervisor| {
            if let Err(e) = supervisor.attach(&queued_packets) {
                tracing::warn!(vm = %vm_id, "packets for the guest are lost: {e}");
            }
        });
    }

    fn acquire(&self) -> Result<(), GuestError> {
        self.memory.right().keep()?;
        if self.config.devices.is_empty() {
            return Ok(self.status.set_acquired("acquire", true)?);
        }
        let from = self.next_or_last_host(NextHost::Another);
        self.ask("acquire the devices", move |supervisor| supervisor.acquire(from))
    }
}
