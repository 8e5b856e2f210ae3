//! Admission of connections: a bounded number is served at a time, and a new one may displace
//! another.
//!
//! A connection begins in [`Stage::Undecided`]; its first message moves it to the stage of its
//! purpose. Each stage has [`MAX_PER_STAGE`] places, so that connections of one kind do not exclude
//! another. If a stage is full, a new connection displaces the oldest connection of the address
//! that has the most connections in it. So a caller with many idle connections displaces its own.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::transport::link::{Closer, Link};
use crate::transport::socket::PeerGroup;

/// Upper bound on connections in each stage.
pub(super) const MAX_PER_STAGE: usize = 16;

/// Upper bound on threads that serve connections, including those of displaced ones that are about
/// to end.
pub(super) const THREADS: usize = 8 * MAX_PER_STAGE;

/// Stage of a connection's introduction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// HELLO has not arrived yet.
    Undecided,
    /// A source that has not sent CONFIG yet.
    Source,
    /// A connection that joins a migration.
    Join,
    /// A question about a migration.
    Query,
}

/// The admitted connections of one listener.
#[derive(Debug, Default)]
pub(super) struct Admission {
    table: Mutex<AdmissionTable>,
    thread_ended: Condvar,
}

#[derive(Debug, Default)]
struct AdmissionTable {
    /// Ordered by the time at which each entered its stage, oldest first.
    all: Vec<AdmittedConnection>,
    /// Id of the newest connection.
    last_id: u64,
    threads: usize,
}

#[derive(Debug)]
struct AdmittedConnection {
    id: u64,
    stage: Stage,
    peer: PeerGroup,
    closer: Closer,
    displaced: Arc<AtomicBool>,
}

/// A connection's place in its stage, freed on drop.
#[derive(Debug)]
pub(super) struct Admitted {
    admission: Arc<Admission>,
    id: u64,
    displaced: Arc<AtomicBool>,
}

/// The count of a thread that serves a connection, given back on drop.
#[derive(Debug)]
pub(super) struct ServingThread(Arc<Admission>);

impl Admission {
    fn lock(&self) -> MutexGuard<'_, AdmissionTable> {
        self.table.lock()
    }

    /// Counts an additional thread. At [`THREADS`], waits at most `limit` for one to end, and
    /// returns `None` if none does.
    pub(super) fn serving_thread(self: &Arc<Self>, limit: Duration) -> Option<ServingThread> {
        let mut entries = self.lock();
        let full = |entries: &mut AdmissionTable| entries.threads == THREADS;
        self.thread_ended.wait_while_for(&mut entries, full, limit);
        if entries.threads == THREADS {
            return None;
        }
        entries.threads += 1;
        Some(ServingThread(self.clone()))
    }

    /// Admits a new connection from `from`.
    pub(super) fn admit(self: &Arc<Self>, link: &Link, from: PeerGroup) -> io::Result<Admitted> {
        let (closer, displaced) = (link.closer()?, Arc::new(AtomicBool::new(false)));
        let mut entries = self.lock();
        entries.last_id += 1;
        let (id, stage, peer) = (entries.last_id, Stage::Undecided, counted(from));
        entries.enter(AdmittedConnection { id, stage, peer, closer, displaced: displaced.clone() });
        Ok(Admitted { admission: self.clone(), id, displaced })
    }
}

impl AdmissionTable {
    /// Enters a connection into its stage, and displaces another one if the stage is full.
    fn enter(&mut self, entry: AdmittedConnection) {
        let of_stage = |e: &&AdmittedConnection| e.stage == entry.stage;
        if self.all.iter().filter(of_stage).count() == MAX_PER_STAGE {
            let same = |peer: PeerGroup| {
                let others = self.all.iter().filter(of_stage);
                others.filter(|e| e.peer == peer).count() + usize::from(entry.peer == peer)
            };
            // `position` below finds the oldest of several.
            let most = self.all.iter().filter(of_stage).map(|e| same(e.peer)).max();
            let is_displaced =
                |e: &AdmittedConnection| e.stage == entry.stage && Some(same(e.peer)) == most;
            if let Some(at) = self.all.iter().position(is_displaced) {
                let displaced = self.all.remove(at);
                displaced.displaced.store(true, Ordering::SeqCst);
                displaced.closer.close();
            }
        }
        self.all.push(entry);
    }
}

impl Admitted {
    /// Moves the connection to `stage`, after its first message. Returns false if it was displaced.
    pub(super) fn advance(&self, stage: Stage) -> bool {
        let mut entries = self.admission.lock();
        let at = entries.all.iter().position(|e| e.id == self.id);
        at.map(|at| entries.all.remove(at))
            .map(|e| entries.enter(AdmittedConnection { stage, ..e }))
            .is_some()
    }

    /// Frees the place early, because another bound applies to the connection from now on. Returns
    /// false if the connection was displaced.
    pub(super) fn leave(&self) -> bool {
        let mut entries = self.admission.lock();
        let before = entries.all.len();
        entries.all.retain(|e| e.id != self.id);
        entries.all.len() < before
    }

    /// Whether this side has closed the connection because another one displaced it.
    pub(super) fn is_displaced(&self) -> bool {
        self.displaced.load(Ordering::SeqCst)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Drop for ServingThread {
    fn drop(&mut self) {
        self.0.lock().threads -= 1;
        self.0.thread_ended.notify_one();
    }
}

/// Returns the group under which a peer's connections are counted: for IPv6 the /64 network, within
/// which a host can use any number of addresses.
fn counted(peer: PeerGroup) -> PeerGroup {
    let PeerGroup::Host(address) = peer else { return peer };
    PeerGroup::Host(match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::transport::socket::Socket;

    struct TestConnections {
        admission: Arc<Admission>,
        links: Vec<Link>,
    }

    impl TestConnections {
        fn new() -> Self {
            Self { admission: Arc::default(), links: Vec::new() }
        }

        fn call(&mut self, from: &str) -> Admitted {
            let (_caller, socket) = Socket::pair().unwrap();
            let link = Link::new(socket, Duration::from_secs(1), Arc::default());
            let peer = PeerGroup::Host(from.parse().unwrap());
            let place = self.admission.admit(&link, peer).unwrap();
            self.links.push(link);
            place
        }
    }

    #[test]
    fn oldest_of_the_most_crowded_address_is_displaced() {
        let mut connections = TestConnections::new();
        let single = connections.call("10.0.0.1");
        let many: Vec<Admitted> =
            (1..MAX_PER_STAGE).map(|_| connections.call("10.0.0.2")).collect();
        assert!(many.iter().all(|place| !place.is_displaced()));
        let third = connections.call("10.0.0.3");
        let again = connections.call("10.0.0.2");
        let displaced: Vec<bool> = many.iter().map(Admitted::is_displaced).collect();
        assert_eq!(displaced[..3], [true, true, false]);
        assert!([&single, &third, &again].iter().all(|place| !place.is_displaced()));
        assert!(!many[0].advance(Stage::Query) && many[2].advance(Stage::Query));
    }

    #[test]
    fn hosts_of_one_ipv6_network_count_as_one() {
        let mut connections = TestConnections::new();
        let other = connections.call("2001:db8:0:2::1");
        let many: Vec<Admitted> =
            (1..MAX_PER_STAGE).map(|n| connections.call(&format!("2001:db8:0:1::{n:x}"))).collect();
        let _more = connections.call("10.0.0.1");
        assert!(many[0].is_displaced() && !other.is_displaced());
        let host = |address: &str| counted(PeerGroup::Host(address.parse().unwrap()));
        assert_eq!(host("::ffff:10.0.0.1"), host("10.0.0.1"));
    }

    #[test]
    fn each_stage_has_places_of_its_own() {
        let mut connections = TestConnections::new();
        let mut admitted = Vec::new();
        for stage in [Stage::Query, Stage::Join, Stage::Source] {
            for _ in 0..MAX_PER_STAGE {
                let place = connections.call("10.0.0.1");
                assert!(place.advance(stage));
                admitted.push(place);
            }
        }
        admitted.extend((0..MAX_PER_STAGE).map(|_| connections.call("10.0.0.1")));
        assert!(admitted.iter().all(|place| !place.is_displaced()));
        let more = connections.call("10.0.0.1");
        assert!(more.advance(Stage::Join));
        let displaced: Vec<usize> =
            (0..admitted.len()).filter(|n| admitted[*n].is_displaced()).collect();
        assert_eq!(
            displaced,
            [MAX_PER_STAGE, 3 * MAX_PER_STAGE],
            "the oldest that joins, and the oldest undecided"
        );
        drop(admitted);
        assert_eq!(connections.admission.lock().all.len(), 1);
        assert!(more.leave() && !more.leave() && !more.is_displaced());
    }

    #[test]
    fn threads_are_counted_until_they_end() {
        let admission = Arc::new(Admission::default());
        let mut threads: Vec<ServingThread> =
            std::iter::from_fn(|| admission.serving_thread(Duration::ZERO)).collect();
        assert_eq!(threads.len(), THREADS);
        let (sender, next) = mpsc::channel();
        std::thread::spawn(move || {
            let thread = admission.serving_thread(Duration::from_secs(600));
            sender.send(thread.is_some()).unwrap();
        });
        // Most often the wait has begun by then.
        std::thread::sleep(Duration::from_millis(50));
        threads.pop();
        let woken = next.recv_timeout(Duration::from_secs(60));
        assert_eq!(woken, Ok(true), "the end of a thread ends the wait");
    }
}
