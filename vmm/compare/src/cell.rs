//! One run of one cell: a machine is launched, its guest warms up, its writes are followed for a
//! while, and it is thrown away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{
    Collected, DirtyFrame, FrameRun, RingEntry, Slot, Subscription, TrackingMode,
};
use driftline_guest::{Guest, GuestError};
use driftline_images::PayloadSpec;
use driftline_images::workload::SLICE_NS;
use driftline_machine::config::{Backend, Boot, CpuConfig, HostConfig, MachineConfig, SerialSink};
use driftline_machine::machine::{Machine, MachineError, Special};
use driftline_machine::memory;
use driftline_machine::sinks::{FlatSet, FrameSink, ListSet, SharedSink};
use driftline_machine::vm::{EndReason, Vm};

use super::cpu::{CpuTime, this_thread};
use super::matrix::{Cell, GuestKind};
use super::settings::Settings;
use super::truth::{Audit, Truth};
use super::way::Sink;

/// How long a payload may take until it has been over its working set.
const WARM_UP_LIMIT: Duration = Duration::from_secs(20);
/// A working set of which so much was written is warm: a random choice may take for ever to all of
/// it.
const WARM: f64 = 0.8;
/// The part of a run in which the guest is not paused.
const RUNNING_PART: f64 = 0.7;
/// Between two bursts of a guest that paces itself.
const SLICE: Duration = Duration::from_nanos(SLICE_NS);
/// The fewest pauses of a run.
const MIN_PAUSES: usize = 3;

/// Why a cell has no figures.
#[derive(Debug, thiserror::Error)]
pub(super) enum CellError {
    /// The host lacks what it takes.
    #[error("{0}")]
    Machine(#[from] MachineError),
    #[error("{0}")]
    Guest(#[from] GuestError),
    #[error("{0}")]
    Other(String),
}

/// The steps of one epoch, ns.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EpochTimes {
    pub(super) frames: u64,
    pub(super) harvest_ns: u64,
    pub(super) reprotect_ns: u64,
    pub(super) insert_ns: u64,
    pub(super) drain_ns: u64,
}

impl EpochTimes {
    /// All its steps.
    pub(super) fn total_ns(&self) -> u64 {
        self.harvest_ns + self.reprotect_ns + self.insert_ns + self.drain_ns
    }
}

/// What one run says.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) epochs: Vec<EpochTimes>,
    /// Each from the order to pause to the order to go on, without the time in which pages were
    /// looked at.
    pub(super) pauses_ns: Vec<u64>,
    /// How long the guest was followed without being paused; times, writes and counts below that
    /// are not of pauses are of this.
    pub(super) window: Duration,
    /// Page writes in that time; unknown of guests that do not tell.
    pub(super) writes: Option<u64>,
    pub(super) vcpu_cpu: Duration,
    /// Collector and drain.
    pub(super) host_cpu: Duration,
    pub(super) ring_full_exits: u64,
    pub(super) ring_full: Duration,
    /// Epochs in which all memory counted as dirty (I6).
    pub(super) marked_all: u64,
    /// Pauses in which it did: nothing could be found missing.
    pub(super) marked_all_looks: u64,
    /// Of the pauses, the strict looks; unknown of guests that do not tell.
    pub(super) audit: Option<Audit>,
    /// Pages written in the window that none of its epochs reported. No strict look: one report
    /// hides that another was lost.
    pub(super) missed_in_window: u64,
    pub(super) tracking_bytes: u64,
}

/// An epoch that was taken.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    times: EpochTimes,
    /// Processor time of this thread.
    drain_cpu: Duration,
    /// All memory counted as dirty.
    marked_all: bool,
}

/// Measures `cell` once.
pub(super) fn run(cell: &Cell, settings: &Settings) -> Result<Sample, CellError> {
    let mut bench = Bench::launch(cell, settings)?;
    bench.warm_up(settings)?;
    bench.follow()?;
    bench.settle(settings)?;
    bench.window(settings)?;
    bench.pauses(settings)?;
    bench.end()
}

/// A machine under measurement.
struct Bench {
    machine: Arc<Machine>,
    sink: Option<SharedSink>,
    subscription: Option<Subscription>,
    truth: Option<Truth>,
    runs: Vec<FrameRun>,
    sample: Sample,
}

impl Bench {
    fn launch(cell: &Cell, settings: &Settings) -> Result<Self, CellError> {
        let boot = match &cell.guest {
            GuestKind::Payload(spec) => Boot::Payload(spec.clone()),
            GuestKind::Kernel(kernel) => Boot::Kernel {
                kernel: kernel.clone(),
                initrd: None,
                cmdline: String::new(),
                bare: false,
            },
        };
        let config = MachineConfig {
            identity: Default::default(),
            mem_bytes: cell.mem_bytes,
            vcpus: settings.vcpus,
            tracking: cell.way.source(),
            ring_entries: settings.ring_entries,
            backend: Backend::Kvm,
            boot,
            cpu: CpuConfig::default(),
            devices: Vec::new(),
        };
        let layout = memory::layout(cell.mem_bytes).map_err(MachineError::from)?;
        let sink = match cell.way.sink() {
            None | Some(Sink::Tree) => None,
            Some(Sink::List) => {
                // As many as the rings have at once; a bitmap's list grows to what it needs.
                let room = match cell.way.source() {
                    TrackingMode::DirtyRing => {
                        settings.ring_entries as usize * usize::from(settings.vcpus)
                    }
                    _ => 0,
                };
                Some(FrameSink::List(ListSet::new(&layout, room)))
            }
            Some(Sink::Flat) => Some(FrameSink::Flat(FlatSet::new(&layout))),
        };
        let sink = sink.map(SharedSink::new);
        let host = HostConfig { serial: SerialSink::Null, ..HostConfig::default() };
        let special =
            Special { sink: sink.clone(), sparse: touches_little(&cell.guest, available()) };
        let machine = Machine::launch_special(config, &host, special)?;
        let truth = match &cell.guest {
            GuestKind::Payload(spec) => {
                Some(Truth::new(spec, &*machine).map_err(CellError::Other)?)
            }
            GuestKind::Kernel(_) => None,
        };
        // What the host takes to find memory, which on a host that is a guest is long, is nobody's
        // price of tracking.
        for run in truth.iter().flat_map(Truth::frames) {
            machine.fault_in(run);
        }
        let (runs, sample) = (Vec::new(), Sample::default());
        Ok(Self { machine, sink, subscription: None, truth, runs, sample })
    }

    /// Until a payload has been over its working set; a kernel has a fixed time.
    fn warm_up(&mut self, settings: &Settings) -> Result<(), CellError> {
        self.machine.resume()?;
        let begun = Instant::now();
        let Some(truth) = &self.truth else {
            return self.wait(settings.settle);
        };
        while truth.begun(self.machine.ram(), settings.vcpus) < WARM {
            if begun.elapsed() > WARM_UP_LIMIT {
                let limit = WARM_UP_LIMIT.as_secs();
                return Err(CellError::Other(format!(
                    "its guest was not over its working set in {limit} s"
                )));
            }
            self.wait(Duration::from_millis(2))?;
        }
        Ok(())
    }

    /// Lets the guest run on; an error if it ends.
    fn wait(&self, time: Duration) -> Result<(), CellError> {
        match self.machine.wait_end(Some(time)) {
            None => Ok(()),
            Some(why) => Err(ended(&why)),
        }
    }

    /// From here on writes are caught.
    fn follow(&mut self) -> Result<(), CellError> {
        // Looking gives a page that was never written the host's page of zeros, which userfaultfd
        // would report later.
        if let Some(truth) = &mut self.truth {
            truth.look(self.machine.ram()).map_err(CellError::Other)?;
        }
        if self.machine.machine_config().tracking != TrackingMode::None {
            self.subscription = Some(self.machine.subscribe("compare")?);
        }
        Ok(())
    }

    /// The first epochs, in which every page of the working set is caught for the first time.
    fn settle(&mut self, settings: &Settings) -> Result<(), CellError> {
        for _ in 0..3 {
            self.wait(settings.interval)?;
            self.epoch()?;
        }
        Ok(())
    }

    /// One epoch: bring the set up to date, and take it.
    fn epoch(&mut self) -> Result<Taken, CellError> {
        let Some(subscription) = &mut self.subscription else { return Ok(Taken::default()) };
        let collected: Collected = self.machine.collect()?;
        let (cpu, begun) = (this_thread(), Instant::now());
        let (frames, epoch) = match &self.sink {
            Some(sink) => (sink.lock().drain(&mut self.runs), None),
            None => {
                let epoch = subscription.drain();
                (epoch.frames(), Some(epoch))
            }
        };
        let drain_ns = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let drain_cpu = this_thread().saturating_sub(cpu);
        let times = EpochTimes {
            frames,
            harvest_ns: collected.harvest_ns,
            reprotect_ns: collected.reprotect_ns,
            insert_ns: collected.insert_ns,
            drain_ns,
        };
        match (&mut self.truth, epoch) {
            (Some(truth), Some(epoch)) => {
                truth.report(epoch.runs());
                epoch.commit();
            }
            (Some(truth), None) => truth.report(self.runs.iter().copied()),
            (None, epoch) => epoch.into_iter().for_each(driftline_dirty_tracker::DirtySet::commit),
        }
        Ok(Taken { times, drain_cpu, marked_all: collected.marked_all })
    }

    /// Epoch after epoch while the guest runs, with a look at its pages before and after. Time,
    /// processor time and writes are all of what lies between the two standstills.
    fn window(&mut self, settings: &Settings) -> Result<(), CellError> {
        self.machine.pause()?;
        self.epoch()?;
        self.look()?;
        let (exits, full) = (self.ring_full_exits(), self.machine.ring_full_time());
        let (cpu, begun) = (CpuTime::now(), Instant::now());
        self.machine.resume()?;
        let end = begun + settings.per_run().mul_f64(RUNNING_PART);
        let mut due = begun + settings.interval;
        let (mut drains, mut number) = (Duration::ZERO, 0);
        while due < end {
            let at = due + dither(number, settings.interval);
            number += 1;
            self.wait(at.saturating_duration_since(Instant::now()))?;
            let taken = self.epoch()?;
            drains += taken.drain_cpu;
            self.sample.marked_all += u64::from(taken.marked_all);
            // Without a source there are no epochs.
            if self.subscription.is_some() {
                self.sample.epochs.push(taken.times);
            }
            // What is late is left out, and not made up for.
            due = (due + settings.interval).max(Instant::now());
        }
        self.machine.pause()?;
        // The guest stands: what follows is none of the window's.
        self.sample.window = begun.elapsed();
        let used = CpuTime::now().since(cpu);
        self.sample.vcpu_cpu = used.vcpus;
        self.sample.host_cpu = used.collector + drains;
        self.sample.ring_full_exits = self.ring_full_exits() - exits;
        self.sample.ring_full = self.machine.ring_full_time() - full;
        self.epoch()?;
        let audit = self.look()?;
        self.sample.writes = audit.map(|a| a.writes);
        self.sample.missed_in_window = audit.map_or(0, |a| a.missed);
        self.sample.tracking_bytes = self.tracking_bytes();
        self.machine.resume()?;
        Ok(())
    }

    /// Epochs for which the guest stands, each looked at.
    fn pauses(&mut self, settings: &Settings) -> Result<(), CellError> {
        let end = Instant::now() + settings.per_run().mul_f64(1.0 - RUNNING_PART);
        while Instant::now() < end || self.sample.pauses_ns.len() < MIN_PAUSES {
            let number = u32::try_from(self.sample.pauses_ns.len()).unwrap_or(u32::MAX);
            self.wait(settings.interval + dither(number, settings.interval))?;
            let begun = Instant::now();
            self.machine.pause()?;
            let taken = self.epoch()?;
            let complete = begun.elapsed();
            // Since the look before there was this one epoch: what was written in it must be in it.
            match self.look()? {
                Some(_) if taken.marked_all => self.sample.marked_all_looks += 1,
                Some(audit) => self.sample.audit.get_or_insert_default().add(&audit),
                None => {}
            }
            let going_on = Instant::now();
            self.machine.resume()?;
            let stood = complete + going_on.elapsed();
            self.sample.pauses_ns.push(u64::try_from(stood.as_nanos()).unwrap_or(u64::MAX));
        }
        Ok(())
    }

    /// Compares what was reported since the last look with the pages of the guest, which stands.
    fn look(&mut self) -> Result<Option<Audit>, CellError> {
        let looked = self.truth.as_mut().map(|truth| truth.look(self.machine.ram()));
        looked.transpose().map_err(CellError::Other)
    }

    fn ring_full_exits(&self) -> u64 {
        self.machine.info().vcpu.iter().map(|v| v.ring_full_exits).sum()
    }

    /// What the kernel and this process keep for tracking, by the sizes of their parts.
    fn tracking_bytes(&self) -> u64 {
        let config = self.machine.machine_config();
        let bitmap = |slot: &Slot| slot.frames.div_ceil(64) * 8;
        let slots = || self.machine.layout().slots();
        let sink = match &self.sink {
            Some(sink) => sink.lock().reserved_bytes(),
            None => self.machine.info().dirty.tree_bytes,
        };
        let source = match config.tracking {
            TrackingMode::None => return 0,
            // The ring itself, and the vCPU's list of what was taken from it.
            TrackingMode::DirtyRing => {
                let entry = size_of::<RingEntry>() + size_of::<DirtyFrame>();
                u64::from(config.vcpus) * u64::from(config.ring_entries) * entry as u64
            }
            // All that it knows is in the page tables.
            TrackingMode::UserfaultWp => 0,
            // KVM has two of each slot; ours is as large as the largest.
            _ => slots().map(bitmap).sum::<u64>() * 2 + slots().map(bitmap).max().unwrap_or(0),
        };
        source + sink
    }

    fn end(mut self) -> Result<Sample, CellError> {
        drop(self.subscription.take());
        self.machine.stop("measured");
        Ok(self.sample)
    }
}

/// By how much the epoch of this number is late on purpose: evenly spread over what a guest sleeps
/// between two bursts, or a quarter of the interval if that is shorter.
///
/// A guest that paces itself writes in bursts, one a [`SLICE`]. An interval of whole slices would
/// meet all epochs of a run at one point of the guest's round: in one run at work, in another
/// asleep, by chance. A vCPU at work has to be interrupted when frames are reprotected, which takes
/// longer than all else together; so it would be that chance which a run measures.
fn dither(epoch: u32, interval: Duration) -> Duration {
    /// Multiples of it fill the space between 0 and 1 evenly, however many there are.
    const GOLDEN: f64 = 0.618_033_988_749_895;
    SLICE.min(interval / 4).mul_f64((f64::from(epoch) * GOLDEN).fract())
}

/// Memory that the host can give without swapping; none where it does not say.
fn available() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    memory::meminfo_bytes(&meminfo, "MemAvailable:").unwrap_or(0)
}

/// Whether a guest is known to touch no more than is `available`: only then may it be larger than
/// the host.
fn touches_little(guest: &GuestKind, available: u64) -> bool {
    match guest {
        GuestKind::Payload(spec) => {
            spec.parse::<PayloadSpec>().is_ok_and(|spec| spec.ws_bytes < available)
        }
        GuestKind::Kernel(_) => false,
    }
}

fn ended(why: &EndReason) -> CellError {
    CellError::Other(match why {
        EndReason::Crashed(why) => format!("its guest ended while it was measured: {why}"),
        other => format!("its guest ended while it was measured: {other:?}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_meet_a_guest_at_all_points_of_its_round() {
        let interval = Duration::from_millis(10);
        let mut fifths = [0; 5];
        for epoch in 0..20 {
            let late = dither(epoch, interval);
            assert!(late < SLICE, "{late:?}");
            fifths[(late.as_nanos() * 5 / SLICE.as_nanos()) as usize] += 1;
        }
        assert!(fifths.iter().all(|n| (3..=5).contains(n)), "{fifths:?}");
        let short = Duration::from_micros(100);
        assert!((0..1000).all(|epoch| dither(epoch, short) < short / 4));
    }

    #[test]
    fn only_a_guest_whose_working_set_the_host_has_may_be_larger_than_the_host() {
        let payload = |spec: &str| GuestKind::Payload(spec.to_owned());
        assert!(touches_little(&payload("payload,ws=64M"), 65 << 20));
        assert!(!touches_little(&payload("payload,ws=64M"), 64 << 20));
        assert!(!touches_little(&payload("payload,ws=64G"), 65 << 20));
        assert!(!touches_little(&payload("nonsense"), u64::MAX), "it is not known");
        assert!(!touches_little(&GuestKind::Kernel("vmlinux".into()), u64::MAX), "nor of a kernel");
        assert!(available() > 0);
    }
}
