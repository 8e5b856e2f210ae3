//! An upgrade whose two processes talk through a proxy.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};

use super::upgrade_proxy::{StepAction, UpgradeProxy};
use super::{TestDir, Vmm, request};

/// The next process of an upgrade through a proxy. Killed when dropped.
pub struct KilledNextProcess(pub Child);

impl Drop for KilledNextProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What is left of an upgrade through a proxy.
pub struct ProxiedUpgrade {
    pub next: KilledNextProcess,
    pub proxy: UpgradeProxy,
    /// The API's answer.
    pub answer: String,
}

impl ProxiedUpgrade {
    /// Replaces the process of `vmm`. The next process seems not to offer `hidden_features`; the
    /// proxy takes the action that `plan` returns for that process. The next process logs its
    /// sandbox to the guest's log.
    pub fn make(
        tmp: &TestDir,
        vmm: &Vmm<'_>,
        hidden_features: u64,
        plan: impl FnOnce(u32) -> Option<StepAction>,
    ) -> Self {
        let (at, next_at) = (tmp.path("proxy"), tmp.path("next"));
        let listener = UnixListener::bind(&next_at).unwrap();
        // Another process that starts meanwhile must not get the listener.
        let take_over = "exec \"$0\" take-over 3 3<&0 </dev/null";
        let next = Command::new("sh")
            .args(["-c", take_over, env!("CARGO_BIN_EXE_driftline")])
            .env("RUST_LOG", "warn,driftline_machine::sandbox=debug")
            .stdin(OwnedFd::from(listener))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let planned = plan(next.id());
        let proxy = UpgradeProxy::start(&at, next_at, planned, hidden_features);
        let body = format!("{{\"socket\":{at:?}}}");
        let answer = request(&vmm.socket(), "POST", "/v1/upgrade", &body);
        Self { next: KilledNextProcess(next), proxy, answer }
    }
}
