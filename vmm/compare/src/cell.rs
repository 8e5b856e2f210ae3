//! Runs one cell once: launches a machine, lets its guest warm up, tracks its writes for a while,
//! and discards the machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_backends::PayloadError;
use driftline_dirty_tracker::ring::RingEntry;
use driftline_dirty_tracker::{FrameRun, Slot, Subscription};
use driftline_guest::{
    CollectionReport, DirtyLog, GuestContents, GuestError, GuestIdentity, Lifecycle, VmId,
};
use driftline_images::PayloadSpec;
use driftline_images::workload::SLICE_NS;
use driftline_machine::HostMemory;
use driftline_machine::config::{
    BackendKind, Boot, CpuConfig, HostConfig, MachineConfig, SerialSink,
};
use driftline_machine::machine::{BuildOptions, KvmMachine, MachineError};
use driftline_machine::measure::{FlatSet, FrameSink, ListSet, MeasureOptions, SharedSink};
use driftline_machine::memory;
use driftline_machine::tracking::TrackingMode;
use driftline_machine::vm::{EndReason, Vm};

use super::cpu::{CpuTime, this_thread};
use super::matrix::{GuestKind, MatrixCell};
use super::settings::CompareSettings;
use super::truth::{Audit, GroundTruth, TruthError};
use super::way::{SinkKind, WayUnavailable};

/// Limit for a payload to cover its working set.
const WARM_UP_LIMIT: Duration = Duration::from_secs(20);
/// Share of the working set that a warm guest has written. A random pattern may never write all of
/// it.
const WARM: f64 = 0.8;
/// Share of a run in which the guest is not paused.
const RUNNING_PART: f64 = 0.7;
/// Time between two bursts of a guest that paces itself.
const SLICE: Duration = Duration::from_nanos(SLICE_NS);
/// Minimum number of pauses in a run.
const MIN_PAUSES: usize = 3;

/// The reason why a cell has no figures.
#[derive(Debug, thiserror::Error)]
pub(super) enum CellError {
    /// The host cannot track in this way.
    #[error(transparent)]
    HostLacks(#[from] WayUnavailable),
    /// The machine cannot be built.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The payload does not fit the machine.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// The guest refuses a request.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The guest's pages cannot be compared with the reports.
    #[error(transparent)]
    Truth(#[from] TruthError),
    /// The guest is too slow.
    #[error("its guest did not cover its working set in {} s", WARM_UP_LIMIT.as_secs())]
    NotWarm,
    /// The guest has ended.
    #[error("its guest ended while it was measured: {}", reason_of(.0))]
    Ended(EndReason),
}

/// The steps of one epoch, in ns.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EpochTimes {
    pub(super) frames: u64,
    pub(super) harvest_ns: u64,
    pub(super) reprotect_ns: u64,
    pub(super) insert_ns: u64,
    pub(super) drain_ns: u64,
}

impl EpochTimes {
    /// Returns the sum of all steps.
    pub(super) fn total_ns(&self) -> u64 {
        self.harvest_ns + self.reprotect_ns + self.insert_ns + self.drain_ns
    }
}

/// The result of one run.
#[derive(Clone, Debug, Default)]
pub(super) struct RunSample {
    pub(super) epochs: Vec<EpochTimes>,
    /// Duration of each pause, from the request to pause until the guest has resumed, without the
    /// time to read the guest's pages.
    pub(super) pauses_ns: Vec<u64>,
    /// Time for which the guest was tracked without being paused. The times, writes and counts
    /// below refer to this window, except those of pauses.
    pub(super) window: Duration,
    /// Number of page writes in the window; unknown for guests that do not record them.
    pub(super) writes: Option<u64>,
    pub(super) vcpu_cpu: Duration,
    /// Processor time of the collector and of draining.
    pub(super) host_cpu: Duration,
    pub(super) ring_full_exits: u64,
    pub(super) ring_full: Duration,
    /// Number of epochs in which all memory counted as dirty (I6).
    pub(super) marked_all: u64,
    /// Number of pauses in which all memory counted as dirty, so that no frame could be found
    /// missing.
    pub(super) marked_all_checks: u64,
    /// Audit of the strict checks, which are made in pauses; unknown for guests that do not record
    /// their writes.
    pub(super) audit: Option<Audit>,
    /// Number of pages written in the window that none of its epochs reported. This is not a strict
    /// check: one report of a page hides that another was lost.
    pub(super) missed_in_window: u64,
    pub(super) tracking_bytes: u64,
}

/// The result of one epoch.
#[derive(Clone, Copy, Debug, Default)]
struct EpochResult {
    times: EpochTimes,
    /// Processor time of the draining thread, which is the calling thread.
    drain_cpu: Duration,
    /// Whether all memory counted as dirty.
    marked_all: bool,
}

/// Measures `cell` once.
pub(super) fn run(cell: &MatrixCell, settings: &CompareSettings) -> Result<RunSample, CellError> {
    let mut bench = MachineBench::launch(cell, settings)?;
    bench.warm_up(settings)?;
    bench.start_tracking()?;
    bench.discard_first_epochs(settings)?;
    bench.window(settings)?;
    bench.pauses(settings)?;
    bench.end()
}

/// A machine under measurement.
struct MachineBench {
    machine: Arc<KvmMachine>,
    sink: Option<SharedSink>,
    subscription: Option<Subscription>,
    truth: Option<GroundTruth>,
    runs: Vec<FrameRun>,
    sample: RunSample,
}

impl MachineBench {
    fn launch(cell: &MatrixCell, settings: &CompareSettings) -> Result<Self, CellError> {
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
            backend: BackendKind::Kvm,
            boot,
            cpu: CpuConfig::default(),
            devices: Vec::new(),
        };
        let layout = memory::layout(cell.mem_bytes).map_err(MachineError::from)?;
        let sink = match cell.way.sink() {
            None | Some(SinkKind::Tree) => None,
            Some(SinkKind::List) => {
                // The initial capacity is what the rings can hold together. A bitmap's list grows
                // as needed.
                let room = match cell.way.source() {
                    TrackingMode::DirtyRing => {
                        settings.ring_entries as usize * usize::from(settings.vcpus)
                    }
                    _ => 0,
                };
                Some(FrameSink::List(ListSet::new(&layout, room)))
            }
            Some(SinkKind::Flat) => Some(FrameSink::Flat(FlatSet::new(&layout))),
        };
        let sink = sink.map(SharedSink::new);
        let image = driftline_backends::image(&config)?;
        let host = HostConfig { serial: SerialSink::Null, image, ..HostConfig::default() };
        let measured =
            MeasureOptions { sink: sink.clone(), sparse: touches_little(&cell.guest, available()) };
        let options = BuildOptions { measured, ..BuildOptions::default() };
        let machine = KvmMachine::build(VmId::random(), config, &host, options)?;
        let truth = match &cell.guest {
            GuestKind::Payload(spec) => Some(GroundTruth::new(spec, &*machine)?),
            GuestKind::Kernel(_) => None,
        };
        // Populating memory can take long, in particular if the host is itself a guest. That time
        // is not a cost of tracking.
        for run in truth.iter().flat_map(GroundTruth::frames) {
            machine.fault_in(run);
        }
        let (runs, sample) = (Vec::new(), RunSample::default());
        Ok(Self { machine, sink, subscription: None, truth, runs, sample })
    }

    /// Waits until a payload has covered its working set. A kernel gets a fixed time.
    fn warm_up(&mut self, settings: &CompareSettings) -> Result<(), CellError> {
        self.machine.resume()?;
        let begun = Instant::now();
        let Some(truth) = &self.truth else {
            return self.wait(settings.boot_time);
        };
        while truth.written_share(self.machine.ram(), settings.vcpus) < WARM {
            if begun.elapsed() > WARM_UP_LIMIT {
                return Err(CellError::NotWarm);
            }
            self.wait(Duration::from_millis(2))?;
        }
        Ok(())
    }

    /// Lets the guest run for `time`. Returns an error if it ends.
    fn wait(&self, time: Duration) -> Result<(), CellError> {
        match self.machine.wait_end(Some(time)) {
            None => Ok(()),
            Some(why) => Err(CellError::Ended(why)),
        }
    }

    /// Starts to track writes.
    fn start_tracking(&mut self) -> Result<(), CellError> {
        // Reading a page that was never written maps the host's zero page into it, which
        // userfaultfd would report later.
        if let Some(truth) = &mut self.truth {
            truth.check(self.machine.ram())?;
        }
        if self.machine.machine_config().tracking != TrackingMode::None {
            self.subscription = Some(self.machine.subscribe("compare")?);
        }
        Ok(())
    }

    /// Runs the first epochs, in which every page of the working set faults for the first time.
    /// They are not measured.
    fn discard_first_epochs(&mut self, settings: &CompareSettings) -> Result<(), CellError> {
        for _ in 0..3 {
            self.wait(settings.interval)?;
            self.epoch()?;
        }
        Ok(())
    }

    /// Runs one epoch: collects, then drains.
    fn epoch(&mut self) -> Result<EpochResult, CellError> {
        let Some(subscription) = &mut self.subscription else { return Ok(EpochResult::default()) };
        let collected: CollectionReport = self.machine.collect()?;
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
        Ok(EpochResult { times, drain_cpu, marked_all: collected.marked_all })
    }

    /// Runs one epoch after another while the guest runs, with a check of its pages before and
    /// after. Time, processor time and writes all refer to the interval between the two pauses.
    fn window(&mut self, settings: &CompareSettings) -> Result<(), CellError> {
        self.machine.pause()?;
        self.epoch()?;
        self.check()?;
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
            let epoch = self.epoch()?;
            drains += epoch.drain_cpu;
            self.sample.marked_all += u64::from(epoch.marked_all);
            // Without a source there are no epochs.
            if self.subscription.is_some() {
                self.sample.epochs.push(epoch.times);
            }
            // Missed intervals are skipped; later epochs do not make up for them.
            due = (due + settings.interval).max(Instant::now());
        }
        self.machine.pause()?;
        // The guest is paused: what follows does not belong to the window.
        self.sample.window = begun.elapsed();
        let used = CpuTime::now().since(cpu);
        self.sample.vcpu_cpu = used.vcpus;
        self.sample.host_cpu = used.collector + drains;
        self.sample.ring_full_exits = self.ring_full_exits() - exits;
        self.sample.ring_full = self.machine.ring_full_time() - full;
        self.epoch()?;
        let audit = self.check()?;
        self.sample.writes = audit.map(|a| a.writes);
        self.sample.missed_in_window = audit.map_or(0, |a| a.missed);
        self.sample.tracking_bytes = self.tracking_bytes();
        self.machine.resume()?;
        Ok(())
    }

    /// Runs epochs in pauses, each followed by a check.
    fn pauses(&mut self, settings: &CompareSettings) -> Result<(), CellError> {
        let end = Instant::now() + settings.per_run().mul_f64(1.0 - RUNNING_PART);
        while Instant::now() < end || self.sample.pauses_ns.len() < MIN_PAUSES {
            let number = u32::try_from(self.sample.pauses_ns.len()).unwrap_or(u32::MAX);
            self.wait(settings.interval + dither(number, settings.interval))?;
            let begun = Instant::now();
            self.machine.pause()?;
            let epoch = self.epoch()?;
            let complete = begun.elapsed();
            // Exactly one epoch lies between the previous check and this one, so it must report
            // every page written since then.
            match self.check()? {
                Some(_) if epoch.marked_all => self.sample.marked_all_checks += 1,
                Some(audit) => self.sample.audit.get_or_insert_default().add(&audit),
                None => {}
            }
            let resuming = Instant::now();
            self.machine.resume()?;
            let paused = complete + resuming.elapsed();
            self.sample.pauses_ns.push(u64::try_from(paused.as_nanos()).unwrap_or(u64::MAX));
        }
        Ok(())
    }

    /// Compares the reports since the last check with the pages of the paused guest.
    fn check(&mut self) -> Result<Option<Audit>, CellError> {
        let checked = self.truth.as_mut().map(|truth| truth.check(self.machine.ram()));
        Ok(checked.transpose()?)
    }

    fn ring_full_exits(&self) -> u64 {
        self.machine.info().vcpu.iter().map(|v| v.ring_full_exits).sum()
    }

    /// Returns the memory that the kernel and this process use for tracking, computed from the
    /// sizes of its parts.
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
            // The ring itself, and the vCPU's list of the entries taken from it, of the same size.
            TrackingMode::DirtyRing => {
                let entry = 2 * size_of::<RingEntry>();
                u64::from(config.vcpus) * u64::from(config.ring_entries) * entry as u64
            }
            // All of its state is in the page tables.
            TrackingMode::UserfaultWp => 0,
            // KVM has two bitmaps for each slot. This process has one, as large as the largest
            // slot's.
            TrackingMode::DirtyBitmap | TrackingMode::DirtyBitmapManual => {
                slots().map(bitmap).sum::<u64>() * 2 + slots().map(bitmap).max().unwrap_or(0)
            }
        };
        source + sink
    }

    fn end(mut self) -> Result<RunSample, CellError> {
        drop(self.subscription.take());
        self.machine.stop("measured");
        Ok(self.sample)
    }
}

/// Returns the deliberate delay of an epoch. The delays are spread evenly over the time for which a
/// guest sleeps between two bursts, or over a quarter of the interval if that is shorter.
///
/// A guest that paces itself writes in bursts, one per [`SLICE`]. If the interval were a multiple
/// of the slice, all epochs of a run would meet the guest at the same point of its round: at work
/// in one run and asleep in another. Reprotecting frames interrupts a vCPU that is at work, which
/// takes longer than everything else together. The result of a run would then depend on chance.
fn dither(epoch: u32, interval: Duration) -> Duration {
    /// The fractions of its multiples spread evenly between 0 and 1, for any number of them.
    const GOLDEN: f64 = 0.618_033_988_749_895;
    SLICE.min(interval / 4).mul_f64((f64::from(epoch) * GOLDEN).fract())
}

/// Returns the memory that the host can provide without swapping, in bytes, or 0 if it does not
/// report that.
fn available() -> u64 {
    HostMemory::read().map_or(0, |host| host.available)
}

/// Returns whether a guest's working set is known to be smaller than `available` bytes. Only such a
/// guest may have more memory than the host.
fn touches_little(guest: &GuestKind, available: u64) -> bool {
    match guest {
        GuestKind::Payload(spec) => {
            spec.parse::<PayloadSpec>().is_ok_and(|spec| spec.ws_bytes < available)
        }
        GuestKind::Kernel(_) => false,
    }
}

fn reason_of(why: &EndReason) -> String {
    match why {
        EndReason::Crashed(why) => why.clone(),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_spread_over_the_guests_round() {
        let interval = Duration::from_millis(10);
        let mut fifths = [0; 5];
        for epoch in 0..20 {
            let delay = dither(epoch, interval);
            assert!(delay < SLICE, "{delay:?}");
            fifths[(delay.as_nanos() * 5 / SLICE.as_nanos()) as usize] += 1;
        }
        assert!(fifths.iter().all(|n| (3..=5).contains(n)), "{fifths:?}");
        let short = Duration::from_micros(100);
        assert!((0..1000).all(|epoch| dither(epoch, short) < short / 4));
    }

    #[test]
    fn guest_exceeds_host_only_with_small_working_set() {
        let payload = |spec: &str| GuestKind::Payload(spec.to_owned());
        assert!(touches_little(&payload("payload,ws=64M"), 65 << 20));
        assert!(!touches_little(&payload("payload,ws=64M"), 64 << 20));
        assert!(!touches_little(&payload("payload,ws=64G"), 65 << 20));
        assert!(!touches_little(&payload("nonsense"), u64::MAX), "an invalid spec");
        assert!(!touches_little(&GuestKind::Kernel("vmlinux".into()), u64::MAX), "a kernel");
        assert!(available() > 0);
    }
}
