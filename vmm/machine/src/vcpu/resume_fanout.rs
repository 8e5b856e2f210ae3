//! Resumes many paused vCPUs quickly: the caller wakes the first, and each vCPU wakes up to two
//! others before it runs.
//!
//! If one thread woke all of them in turn, it could lose its processor to the first, and the others
//! would stay paused until a scheduler tick gives it back. With two vCPUs, the second would resume
//! up to 4 ms later while a processor is idle. While that thread runs, two vCPUs may also be put on
//! the one idle processor. The columns "pause p99" and "gap max" of `cargo bench -p tests --bench
//! pause` show the effect.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use crate::actor::Handle;

/// A resume that each vCPU passes to up to two others.
#[derive(Debug)]
pub(crate) struct ResumeFanout<S> {
    /// The handles of all vCPUs, in order of their ids.
    all: Arc<[Handle<S>]>,
    /// Resumes a vCPU. It must call [`pass_on`](Self::pass_on).
    resume: fn(&mut S, &Self),
    /// Dropped with the last clone; the receiver then sees disconnection.
    in_progress: Sender<()>,
}

impl<S: 'static> ResumeFanout<S> {
    /// Has `resume` resume all vCPUs. The returned channel is closed when all have resumed or
    /// ended. It carries no message.
    pub(crate) fn begin(all: Arc<[Handle<S>]>, resume: fn(&mut S, &Self)) -> Receiver<()> {
        let (in_progress, closed) = mpsc::channel();
        Self { all, resume, in_progress }.tell(0);
        closed
    }

    /// Wakes the next vCPUs. vCPU `id` must call this before it resumes, and also if it does not
    /// resume.
    pub(crate) fn pass_on(&self, id: u8) {
        for next in [1, 2] {
            self.tell(2 * usize::from(id) + next);
        }
    }

    fn tell(&self, id: usize) {
        let Some(vcpu) = self.all.get(id) else { return };
        let fanout = self.clone();
        // The vCPU keeps this clone until it has resumed.
        if !vcpu.tell(move |vcpu| (fanout.resume)(vcpu, &fanout)) {
            // Its thread has ended: wake the vCPUs that it would have woken.
            for next in [1, 2] {
                self.tell(2 * id + next);
            }
        }
    }
}

impl<S> Clone for ResumeFanout<S> {
    fn clone(&self) -> Self {
        let Self { all, resume, in_progress } = self;
        Self { all: all.clone(), resume: *resume, in_progress: in_progress.clone() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::TryRecvError;

    use proptest::prelude::*;

    use super::*;
    use crate::actor::{self, Next};

    /// A vCPU that counts as resuming as long as it keeps its clone of the fan-out.
    struct Resuming {
        id: u8,
        resumes: u32,
        slow: bool,
        fanout: Option<ResumeFanout<Self>>,
    }

    impl Resuming {
        fn resume(&mut self, fanout: &ResumeFanout<Self>) {
            self.resumes += 1;
            fanout.pass_on(self.id);
            self.fanout = self.slow.then(|| fanout.clone());
        }
    }

    proptest! {
        /// Holds for every set of ended threads, and every order in which the others run.
        #[test]
        fn fanout_reaches_each_vcpu_once(
            (ended, slow, order) in (1..40usize).prop_flat_map(|vcpus| {
                let flags = || prop::collection::vec(any::<bool>(), vcpus);
                (flags(), flags(), Just((0..vcpus).collect::<Vec<_>>()).prop_shuffle())
            }),
        ) {
            let (all, mut inboxes): (Vec<_>, Vec<_>) = ended
                .iter()
                .map(|_| actor::inbox("a vCPU"))
                .map(|(all, inbox)| (all, Some(inbox)))
                .unzip();
            for (inbox, _) in inboxes.iter_mut().zip(&ended).filter(|(_, ended)| **ended) {
                *inbox = None;
            }
            let vcpu =
                |(slow, id): (&bool, u8)| Resuming { id, resumes: 0, slow: *slow, fanout: None };
            let mut vcpus: Vec<_> = slow.iter().zip(0..).map(vcpu).collect();
            let closed = ResumeFanout::begin(all.into(), Resuming::resume);
            while let Some((id, job)) = order.iter().find_map(|id| {
                match inboxes[*id].as_ref()?.try_recv() {
                    Next::Job(job) => Some((*id, job)),
                    Next::Nothing | Next::End => None,
                }
            }) {
                prop_assert_eq!(closed.try_recv(), Err(TryRecvError::Empty));
                job(&mut vcpus[id]);
            }
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
}
