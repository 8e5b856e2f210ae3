//! Shared parts of the migration tests: hosts with records, receivers on threads, a proxy that
//! counts records and cuts connections.
#![allow(dead_code, unused_imports, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

mod connection;
mod drives;
mod hooked;
mod proxy;
pub mod raw;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use connection::ProxyConnection;
use driftline_guest::testing::{
    ExclusiveDrive, Faults, MemoryConfig, MemoryGuest, MemoryGuestFactory,
};
use driftline_guest::{
    DirtyLog, Guest, GuestFactory, GuestIdentity, HandOver, Lifecycle, RunState,
};
use driftline_migrate::{
    Cause, GuestPlace, Listener, Phase, ReceiveControl, ReceiveError, ReceiveOptions, Received,
    Records, SendControl, SendError, SendOptions, SendReport, Tag, receive, send,
};
pub use drives::{CopyFaults, DriveCopyFactory, GuestWithDrives};
pub use hooked::HookedGuest;
pub use proxy::{At, CutPoint, Proxy, ProxyPlan};

/// Longer than any operation takes here, also on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

/// Time limit for COMMIT where a cut may lose it: a connection that is closed before its peer has
/// read everything loses the rest.
pub const CUT_COMMIT_DEADLINE: Duration = Duration::from_secs(10);

/// A source host and a destination host: the records of both in a temporary directory, and a disk
/// that only one guest may hold.
pub struct HostPair {
    dir: tempfile::TempDir,
    /// Disk that the running guest holds; counts how many guests ran at the same time.
    pub drive: Arc<ExclusiveDrive>,
    /// Faults of guests that receivers build.
    pub there: Arc<Faults>,
    /// Faults of guests started here.
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

    /// Returns the records of both sides, without their sites.
    pub fn records_left(&self) -> Vec<PathBuf> {
        [self.source_records(), self.destination_records()]
            .iter()
            .filter_map(|dir| std::fs::read_dir(dir).ok())
            .flatten()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "json"))
            .collect()
    }

    /// Starts a guest, which holds the disk.
    pub fn start(&self, config: MemoryConfig) -> Arc<MemoryGuest> {
        self.start_on(config, false)
    }

    /// Starts a guest whose memory is in files.
    pub fn start_in_files(&self, config: MemoryConfig) -> Arc<MemoryGuest> {
        self.start_on(config, true)
    }

    fn start_on(&self, config: MemoryConfig, shares_memory: bool) -> Arc<MemoryGuest> {
        let template = MemoryGuest::new(driftline_guest::VmId::random(), config).unwrap();
        let factory = MemoryGuestFactory {
            faults: self.here.clone(),
            drive: self.drive.clone(),
            shares_memory,
            ..Default::default()
        };
        let guest = factory.create(template.vm_id(), &template.config()).unwrap();
        guest.acquire().unwrap();
        guest.resume().unwrap();
        guest
    }

    /// Returns options whose limits end no migration, also on a busy machine.
    pub fn receive_options(&self) -> ReceiveOptions {
        let mut options = ReceiveOptions::new(self.destination_records());
        (options.commit_deadline, options.handshake_timeout) = (LONG, LONG);
        (options.progress_timeout, options.pace_window) = (LONG, LONG);
        options.answer_timeout = Duration::from_secs(5);
        options
    }

    pub fn receiver(&self) -> Receiver {
        self.receiver_with(self.receive_options())
    }

    pub fn receiver_with(&self, options: ReceiveOptions) -> Receiver {
        self.receive(self.factory(), options)
    }

    /// Starts a receiver with this factory.
    pub fn receiver_of(
        &self,
        factory: impl GuestFactory<Guest = MemoryGuest> + 'static,
    ) -> Receiver {
        self.receive(factory, self.receive_options())
    }

    /// Returns the factory of receivers.
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
        self.receive_on(Listener::bind("127.0.0.1:0").unwrap(), factory, options)
    }

    /// Starts a receiver that waits at a unix socket of its own.
    pub fn local_receiver(&self, options: ReceiveOptions) -> Receiver {
        let path =
            tempfile::Builder::new().make_in(self.dir.path(), |path| UnixListener::bind(path));
        let (listener, path) = path.unwrap().into_parts();
        // The directory is removed with this value.
        let path = path.keep().unwrap();
        self.receive_on(Listener::unix(listener, &path), self.factory(), options)
    }

    /// Starts a receiver that waits at `listener`.
    pub fn receive_on(
        &self,
        listener: Listener,
        factory: impl GuestFactory<Guest = MemoryGuest> + 'static,
        options: ReceiveOptions,
    ) -> Receiver {
        let to = listener.address();
        let to = to.strip_prefix("tcp:").unwrap_or(to).to_owned();
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
    /// Whether [`exactly_one_runs`] sends the guest again after a failure.
    pub again: bool,
}

impl Receiver {
    /// Whether it has refused a caller and waits for another one.
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

    /// Returns why no guest arrived, whether the receiver has ended or waits for another source.
    pub fn failure(self) -> String {
        within(LONG, "it fails", || self.thread.is_finished() || self.waits_on());
        if self.thread.is_finished() {
            return self.error().to_string();
        }
        self.control.cancel().unwrap();
        let message = self.control.progress().last_refusal.unwrap();
        assert!(matches!(self.error().cause, Cause::Cancelled));
        message
    }
}

/// Returns options with a short interval between questions, and with limits that end no migration,
/// also on a busy machine. A test that needs a limit sets it.
pub fn quick_send(hosts: &HostPair) -> SendOptions {
    let mut options = SendOptions::new(hosts.source_records());
    (options.progress_timeout, options.setup_timeout) = (LONG, LONG);
    options.disk_limit = LONG;
    (options.commit_timeout, options.connect_timeout) = (LONG, LONG);
    options.ask_interval = Duration::from_millis(50);
    options
}

/// Returns the tag of the message with this name.
pub fn tag(name: &str) -> u16 {
    (1..=64).find(|n| Tag::from_number(*n).is_some_and(|t| t.name() == name)).unwrap()
}

/// `send` on a separate thread, so that a hang fails the test.
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
            // The receiver is gone if the test has failed meanwhile.
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

/// Checks the state after a migration, successful or not: exactly one guest runs, both sides agree
/// which one, its memory is whole, and two guests never ran at the same time.
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
            assert!(matches!(e.guest, GuestPlace::Here), "{context}: {e}");
            assert_eq!(source.run_state(), RunState::Running, "{context}: {e}");
            let pending = Records::open(hosts.source_records()).unwrap().pending().unwrap();
            assert!(pending.records.is_empty(), "{context}: {pending:?}");
            within(LONG, &format!("{context}: the receiver ends or waits"), || {
                ended(&there) || there.waits_on()
            });
            if ended(&there) {
                let failed = there.outcome().expect_err(context);
                assert!(failed.was_prepared, "{context}: {failed}");
            } else if !there.again {
                assert!(!there.failure().is_empty());
            } else {
                // The failure has left nothing behind, so a second migration succeeds.
                second_migration_succeeds(hosts, source, there, context);
            }
            source.verify().unwrap_or_else(|e| panic!("{context}: {e}"));
        }
    }
    assert_eq!(hosts.drive.most_running(), 1, "{context}: I7");
}

/// Sends the guest to a receiver that waits for another source. On a busy machine the limits of
/// these tests may need several tries, or a try may fail after PREPARED, which ends the receiver.
fn second_migration_succeeds(
    hosts: &HostPair,
    source: &Arc<MemoryGuest>,
    there: Receiver,
    context: &str,
) {
    let mut tries = 0;
    while let Err(e) = Sender::start(source, &there.to, &quick_send(hosts)).result() {
        tries += 1;
        assert!(tries < 10, "{context}: another try: {e}");
        within(LONG, &format!("{context}: {e}: the receiver ends or waits"), || {
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

/// Waits until a guest has written `more` times, or does not run any more.
pub fn await_writes(guest: &impl Lifecycle, writes: impl Fn() -> u64, more: u64) {
    let before = writes();
    within(LONG, "the guest writes", || {
        writes() >= before + more || guest.run_state() != RunState::Running
    });
}

/// Waits until the proxy has forwarded the last message of a migration that succeeded.
pub fn await_last_message(proxy: &Proxy) {
    within(LONG, "ENDED is forwarded", || {
        proxy.from_source.lock().unwrap().last() == Some(&tag("ENDED"))
    });
}

/// Number of migrations that run at the same time. Most of the time they wait for a guest's writes
/// or for a limit.
pub const AT_ONCE: usize = 4;

/// Calls `work` for each case, `at_a_time` at a time, because a case waits for most of its time. A
/// failure fails the test.
pub fn each<T: Send>(cases: Vec<T>, at_a_time: usize, work: impl Fn(T) + Sync) {
    let left = Mutex::new(cases.into_iter());
    std::thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                // The block releases the lock before the work.
                while let Some(next) = { left.lock().unwrap().next() } {
                    work(next);
                }
            });
        }
    });
}

/// Waits until a condition holds.
pub fn within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < until, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
