//! Resumes many paused vCPUs quickly: the caller wakes the first, does what it has to do, and wakes
//! the others right before it waits. A vCPU that has taken the caller's processor wakes them
//! instead.
//!
//! A thread that is woken is often put on the processor of the thread that wakes it: a kernel that
//! knows of no cache that the processors share looks no further, as in many virtual machines. A
//! caller that is about to wait leaves its processor to one vCPU. If instead a vCPU wakes the next
//! one and then runs the guest, the next one may wait on that processor for a scheduler tick (up to
//! 4 ms) while another processor is idle. A vCPU that has taken the caller's processor wakes the
//! others all the same: otherwise they would wait until the caller runs again, and on the same
//! processor. Whether that happens depends on where the threads ran last, so a median of `cargo
//! bench -p tests --bench local` shows the effect only over several runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};

use crate::actor::Handle;
use crate::schedule::processor;

/// A resume of all vCPUs, as one of them gets it.
#[derive(Debug)]
pub(crate) struct ResumeFanout<S> {
    /// The handles of all vCPUs, in order of their ids.
    all: Arc<[Handle<S>]>,
    /// Id of the next vCPU to wake.
    next: Arc<AtomicUsize>,
    /// Resumes a vCPU. It calls [`pass_on`](Self::pass_on) first.
    resume: fn(&mut S, &Self),
    /// The processor of the thread that woke this vCPU.
    woken_from: libc::c_int,
    /// Dropped with the last clone; the receiver then sees disconnection.
    in_progress: Sender<()>,
}

/// A resume of which the first vCPU has been woken.
#[must_use = "the other vCPUs may not have been woken"]
#[derive(Debug)]
pub(crate) struct BegunResume<S> {
    fanout: ResumeFanout<S>,
    closed: Receiver<()>,
}

impl<S: 'static> BegunResume<S> {
    /// Wakes the vCPUs that have not been woken. The returned channel is closed when all have
    /// resumed or ended. It carries no message.
    pub(crate) fn finish(self) -> Receiver<()> {
        while self.fanout.wake_next() {}
        self.closed
    }
}

impl<S: 'static> ResumeFanout<S> {
    /// Has `resume` resume the first vCPU. [`BegunResume::finish`] resumes the others, at the
    /// latest.
    pub(crate) fn begin(all: Arc<[Handle<S>]>, resume: fn(&mut S, &Self)) -> BegunResume<S> {
        let (in_progress, closed) = mpsc::channel();
        let next = Arc::default();
        let fanout = Self { all, next, resume, woken_from: processor(), in_progress };
        fanout.wake_next();
        BegunResume { fanout, closed }
    }

    /// Wakes the other vCPUs if this one has the processor of the thread that woke it. A vCPU calls
    /// this before it runs the guest, and also if it does not run it. Without the call the others
    /// wait for [`BegunResume::finish`].
    pub(crate) fn pass_on(&self) {
        if processor() == self.woken_from {
            while self.wake_next() {}
        }
    }

    /// Wakes a vCPU that no thread has woken yet. Returns false if there is none.
    fn wake_next(&self) -> bool {
        let Some(vcpu) = self.all.get(self.next.fetch_add(1, Ordering::Relaxed)) else {
            return false;
        };
        let fanout = Self { woken_from: processor(), ..self.clone() };
        // The vCPU keeps this clone until it has resumed. A vCPU whose thread has ended has none.
        vcpu.tell(move |vcpu| (fanout.resume)(vcpu, &fanout));
        true
    }
}

impl<S> Clone for ResumeFanout<S> {
    fn clone(&self) -> Self {
        let Self { all, next, resume, woken_from, in_progress } = self;
        Self {
            all: all.clone(),
            next: next.clone(),
            resume: *resume,
            woken_from: *woken_from,
            in_progress: in_progress.clone(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::TryRecvError;

    use proptest::prelude::*;
    use rustix::thread::{CpuSet, sched_setaffinity};

    use super::*;
    use crate::actor::{self, Inbox, Next};

    /// A number that no processor has.
    const NO_PROCESSOR: libc::c_int = -1;

    /// A vCPU that counts as resuming as long as it keeps its clone of the fan-out.
    struct Resuming {
        resumes: u32,
        slow: bool,
        /// Whether it has the processor of the thread that woke it.
        takes_processor: bool,
        fanout: Option<ResumeFanout<Self>>,
    }

    impl Resuming {
        fn resume(&mut self, fanout: &ResumeFanout<Self>) {
            self.resumes += 1;
            let next = || fanout.next.load(Ordering::Relaxed);
            let before = next();
            ResumeFanout { woken_from: NO_PROCESSOR, ..fanout.clone() }.pass_on();
            assert_eq!(next(), before, "a vCPU on another processor woke one");
            if self.takes_processor {
                while fanout.wake_next() {}
            }
            self.fanout = self.slow.then(|| fanout.clone());
        }
    }

    /// Lets a vCPU resume that has been woken, the first one in `order`. Returns false if there is
    /// none.
    fn run_one(
        vcpus: &mut [Resuming],
        inboxes: &mut [Option<Inbox<Resuming>>],
        order: &[usize],
    ) -> bool {
        let woken = order.iter().find_map(|id| match inboxes[*id].as_ref()?.try_recv() {
            Next::Job(job) => Some((*id, job)),
            Next::Nothing | Next::End => None,
        });
        woken.map(|(id, job)| job(&mut vcpus[id])).is_some()
    }

    proptest! {
        /// Holds for every set of ended threads, every set of vCPUs that take the processor of the
        /// thread that wakes them, every order in which they run, and a caller that runs on at any
        /// time.
        #[test]
        fn fanout_reaches_each_vcpu_once(
            (ended, slow, takes, order) in (1..40usize).prop_flat_map(|vcpus| {
                let flags = || prop::collection::vec(any::<bool>(), vcpus);
                let order = Just((0..vcpus).collect::<Vec<_>>()).prop_shuffle();
                (flags(), flags(), flags(), order)
            }),
            before in 0..40usize,
        ) {
            let (all, mut inboxes): (Vec<_>, Vec<_>) = ended
                .iter()
                .map(|_| actor::inbox("a vCPU"))
                .map(|(all, inbox)| (all, Some(inbox)))
                .unzip();
            for (inbox, _) in inboxes.iter_mut().zip(&ended).filter(|(_, ended)| **ended) {
                *inbox = None;
            }
            let vcpu = |(slow, takes): (&bool, &bool)| {
                Resuming { resumes: 0, slow: *slow, takes_processor: *takes, fanout: None }
            };
            let mut vcpus: Vec<_> = slow.iter().zip(&takes).map(vcpu).collect();
            let begun = ResumeFanout::begin(all.into(), Resuming::resume);
            for _ in 0..before {
                run_one(&mut vcpus, &mut inboxes, &order);
            }
            let closed = begun.finish();
            let unfinished = |vcpus: &[Resuming]| {
                vcpus.iter().zip(&ended).any(|(vcpu, ended)| vcpu.resumes == 0 && !ended)
            };
            while unfinished(&vcpus) {
                prop_assert_eq!(closed.try_recv(), Err(TryRecvError::Empty));
                prop_assert!(run_one(&mut vcpus, &mut inboxes, &order), "a vCPU was not woken");
            }
            prop_assert!(!run_one(&mut vcpus, &mut inboxes, &order), "a vCPU was woken twice");
            let slow = vcpus.iter().any(|vcpu| vcpu.fanout.is_some());
            let waits = if slow { TryRecvError::Empty } else { TryRecvError::Disconnected };
            prop_assert_eq!(closed.try_recv(), Err(waits));
            vcpus.iter_mut().for_each(|vcpu| vcpu.fanout = None);
            prop_assert_eq!(closed.try_recv(), Err(TryRecvError::Disconnected));
            for (vcpu, ended) in vcpus.iter().zip(&ended) {
                prop_assert_eq!(vcpu.resumes, u32::from(!ended));
            }
        }
    }

    /// A vCPU that has the processor of the thread that woke it wakes the others: that thread may
    /// not run for a while.
    #[test]
    fn vcpu_on_the_callers_processor_wakes_the_others() {
        struct Woken(bool);
        fn resume(vcpu: &mut Woken, fanout: &ResumeFanout<Woken>) {
            vcpu.0 = true;
            fanout.pass_on();
        }
        let thread = std::thread::spawn(|| {
            // Only this thread moves to one processor, and it ends with the test.
            let mut one = CpuSet::new();
            one.set(processor() as usize);
            sched_setaffinity(None, &one).unwrap();
            let (all, inboxes): (Vec<_>, Vec<_>) = (0..5).map(|_| actor::inbox("a vCPU")).unzip();
            let _caller = ResumeFanout::begin(all.into(), resume);
            inboxes.iter().all(|inbox| {
                let mut vcpu = Woken(false);
                if let Next::Job(job) = inbox.try_recv() {
                    job(&mut vcpu);
                }
                vcpu.0
            })
        });
        assert!(thread.join().unwrap());
    }
}
