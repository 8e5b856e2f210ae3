//! What the tests of this folder share: a host with records, receivers on threads, a proxy that
//! counts records and cuts.
#![allow(dead_code, unused_imports, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

mod drives;
mod hooked;
mod proxy;
pub mod raw;

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_guest::testing::{Drive, Faults, MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{
    DirtyLog, Guest, GuestFactory, GuestIdentity, HandOver, Lifecycle, RunState,
};
use driftline_migrate::{
    Cause, GuestPlace, Phase, ReceiveControl, ReceiveError, ReceiveOptions, Received, Records,
    SendControl, SendError, SendOptions, SendReport, Tag, receive, send,
};
pub use drives::{CopyFaults, DriveCopyFactory, GuestWithDrives};
pub use hooked::HookedGuest;
pub use proxy::{At, CutPoint, Proxy, ProxyPlan};

/// More than anything takes here, on a busy machine, too.
pub const LONG: Duration = Duration::from_secs(60);

/// One world: a drive that only one guest may hold, records of both sides in one temporary folder.
pub struct HostPair {
    dir: tempfile::TempDir,
    /// Held by whoever may run the guest; knows how many ran at once.
    pub drive: Arc<Drive>,
    /// Of guests that receivers build.
    pub there: Arc<Faults>,
    /// Of guests started here.
    pub here: Arc<Faults>,
}

impl HostPair {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { dir, drive: Arc::default(), there: Arc::default(), here: Arc::default() }
    }

    pub fn source_records(&self) -> PathBuf {
        self.dir.path().join("source")
    }

    pub fn destination_records(&self) -> PathBuf {
        self.dir.path().join("destination")
    }

    /// Records on either side, their sites aside.
    pub fn records_left(&self) -> Vec<PathBuf> {
        [self.source_records(), self.destination_records()]
            .iter()
            .filter_map(|dir| std::fs::read_dir(dir).ok())
            .flatten()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "json"))
            .collect()
    }

    /// A running guest that holds the drive.
    pub fn start(&self, config: MemoryConfig) -> Arc<MemoryGuest> {
        let template = MemoryGuest::new(driftline_guest::VmId::random(), config).unwrap();
        let factory = MemoryGuestFactory {
            faults: self.here.clone(),
            drive: self.drive.clone(),
            ..Default::default()
        };
        let guest = factory.create(template.vm_id(), &template.config()).unwrap();
        guest.acquire().unwrap();
        guest.resume().unwrap();
        guest
    }

    /// No limit ends a migration, however busy this machine is.
    pub fn receive_options(&self) -> ReceiveOptions {
        let mut options = ReceiveOptions::new(self.destination_records());
        (options.commit_deadline, options.handshake_timeout) = (LONG, LONG);
        (options.progress_timeout, options.pace_window) = (LONG, LONG);
        options.tell_limit = Duration::from_secs(5);
        options
    }

    pub fn receiver(&self) -> Receiver {
        self.receiver_with(self.receive_options())
    }

    pub fn receiver_with(&self, options: ReceiveOptions) -> Receiver {
        self.receive(self.factory(), options)
    }

    /// One that builds its guests so.
    pub fn receiver_of(
        &self,
        factory: impl GuestFactory<Guest = MemoryGuest> + 'static,
    ) -> Receiver {
        self.receive(factory, self.receive_options())
    }

    /// What receivers build guests by.
    pub fn factory(&self) -> MemoryGuestFactory {
        MemoryGuestFactory {
            faults: self.there.clone(),
            drive: self.drive.clone(),
            ..Default::default()
        }
    }

    pub fn receive(
        &self,
        factory: impl GuestFactory<Guest = MemoryGuest> + 'static,
        options: ReceiveOptions,
    ) -> Receiver {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap().to_string();
        let control = ReceiveControl::new();
        let mine = control.clone();
        let thread =
            std::thread::spawn(move || receive(listener, Arc::new(factory), &options, &mine));
        Receiver { to, control, thread, again: true }
    }
}

pub type ReceiveResult = Result<Received<MemoryGuest>, ReceiveError>;

/// A receiver on a thread.
pub struct Receiver {
    pub to: String,
    pub control: Arc<ReceiveControl>,
    pub thread: JoinHandle<ReceiveResult>,
    /// [`exactly_one_runs`] has it receive the guest once more after a failure.
    pub again: bool,
}

impl Receiver {
    /// It has turned somebody away and waits for another.
    pub fn waits_on(&self) -> bool {
        let progress = self.control.progress();
        progress.refused > 0 && progress.phase == Phase::Waiting
    }

    pub fn outcome(self) -> ReceiveResult {
        self.thread.join().expect("the receiver does not panic")
    }

    pub fn guest(self) -> Received<MemoryGuest> {
        self.outcome().unwrap()
    }

    pub fn error(self) -> ReceiveError {
        self.outcome().unwrap_err()
    }

    /// Why no guest came, whether it has ended by that or waits on.
    pub fn failure(self) -> String {
        within(LONG, "it fails", || self.thread.is_finished() || self.waits_on());
        if self.thread.is_finished() {
            return self.error().to_string();
        }
        self.control.cancel().unwrap();
        let said = self.control.progress().last_refusal.unwrap();
        assert!(matches!(self.error().cause, Cause::Cancelled));
        said
    }
}

/// Options with a short interval between questions. No limit ends a migration, however busy this
/// machine is: a test that waits for one sets it.
pub fn quick_send(hosts: &HostPair) -> SendOptions {
    let mut options = SendOptions::new(hosts.source_records());
    (options.progress_timeout, options.setup_timeout) = (LONG, LONG);
    (options.commit_timeout, options.connect_timeout) = (LONG, LONG);
    options.ask_interval = Duration::from_millis(50);
    options
}

/// The number of the message with this name.
pub fn tag(name: &str) -> u16 {
    (1..=64).find(|n| Tag::from_number(*n).is_some_and(|t| t.name() == name)).unwrap()
}

/// `send` on a thread of its own, so that a hang is a failed test.
pub struct Sender {
    pub control: Arc<SendControl>,
    result: std::sync::mpsc::Receiver<Result<SendReport, SendError>>,
}

impl Sender {
    pub fn start<G: Guest + 'static>(guest: &Arc<G>, to: &str, options: &SendOptions) -> Self {
        let (tell, result) = std::sync::mpsc::channel();
        let (guest, to, options) = (guest.clone(), to.to_owned(), options.clone());
        let control = SendControl::new();
        let mine = control.clone();
        std::thread::spawn(move || {
            // A test that has failed meanwhile does not listen any more.
            let _ = tell.send(send(&*guest, &to, &options, &mine));
        });
        Self { control, result }
    }

    pub fn result(self) -> Result<SendReport, SendError> {
        // Several limits of `LONG` may pass, one after the other.
        let result = self.result.recv_timeout(LONG * 4);
        result.unwrap_or_else(|_| panic!("send hangs: {:?}", self.control.progress()))
    }
}

/// What must hold after a migration, however it went: exactly one guest runs, it is the one that
/// both sides say, its memory is whole, and never did two run.
pub fn exactly_one_runs(
    hosts: &HostPair,
    source: &Arc<MemoryGuest>,
    sent: &Result<SendReport, SendError>,
    there: Receiver,
    context: &str,
) {
    let ended = |r: &Receiver| r.thread.is_finished();
    match sent {
        Ok(_) => {
            let arrived = there.outcome().unwrap_or_else(|e| panic!("{context}: {e}"));
            assert_eq!(source.run_state(), RunState::Stopped, "{context}");
            assert_eq!(arrived.guest.run_state(), RunState::Running, "{context}");
            arrived.guest.verify().unwrap_or_else(|e| panic!("{context}: {e}"));
        }
        Err(e) => {
            assert_eq!(e.guest, GuestPlace::Here, "{context}: {e}");
            assert_eq!(source.run_state(), RunState::Running, "{context}: {e}");
            let pending = Records::open(hosts.source_records()).unwrap().pending().unwrap();
            assert!(pending.records.is_empty(), "{context}: {pending:?}");
            within(LONG, &format!("{context}: the receiver settles"), || {
                ended(&there) || there.waits_on()
            });
            if ended(&there) {
                let failed = there.outcome().expect_err(context);
                assert!(failed.was_prepared, "{context}: {failed}");
            } else if !there.again {
                assert!(!there.failure().is_empty());
            } else {
                // Nothing of it is left: it takes the guest now.
                takes_it_now(hosts, source, there, context);
            }
            source.verify().unwrap_or_else(|e| panic!("{context}: {e}"));
        }
    }
    assert_eq!(hosts.drive.most_running(), 1, "{context}: I7");
}

/// A receiver that waits on receives the guest. On a busy host it may take several tries to keep
/// within the limits of these tests, or one may fail after PREPARED, which ends it.
fn takes_it_now(hosts: &HostPair, source: &Arc<MemoryGuest>, there: Receiver, context: &str) {
    let mut tries = 0;
    while let Err(e) = Sender::start(source, &there.to, &quick_send(hosts)).result() {
        tries += 1;
        assert!(tries < 10, "{context}: another try: {e}");
        within(LONG, &format!("{context}: {e}: it settles"), || {
            there.thread.is_finished() || there.waits_on()
        });
        if there.thread.is_finished() {
            let failed = there.outcome().expect_err(context);
            assert!(failed.was_prepared, "{context}: {failed}");
            return;
        }
    }
    let arrived = there.outcome().unwrap_or_else(|e| panic!("{context}: {e}"));
    arrived.guest.verify().unwrap_or_else(|e| panic!("{context}: {e}"));
}

/// Waits until something holds.
pub fn within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < until, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
