//! Resumes many paused vCPUs quickly: the caller wakes the first, and each vCPU wakes up to two
//! others before it runs.
//!
//! If one thread woke all of them in turn, it could lose its processor to the first, and the others
//! would stay paused until a scheduler tick gives it back, up to 4 ms later. While that thread
//! runs, two vCPUs may also be put on the one idle processor.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use super::Command;

/// Passed from vCPU to vCPU.
#[derive(Clone, Debug)]
pub(crate) struct Wave {
    /// The command channels of all vCPUs, in order of their ids.
    all: Arc<[Sender<Command>]>,
    /// Dropped with the last clone; the receiver then sees disconnection.
    _under_way: Option<Sender<()>>,
}

impl Wave {
    /// Resumes all of them. The returned channel is closed when all have resumed or ended; nothing
    /// is ever sent on it.
    pub(crate) fn begin(all: Arc<[Sender<Command>]>) -> Receiver<()> {
        let (under_way, over) = mpsc::channel();
        Self { all, _under_way: Some(under_way) }.tell(0);
        over
    }

    /// Creates a wave that resumes one vCPU only.
    pub(crate) fn alone() -> Self {
        Self { all: Arc::from([]), _under_way: None }
    }

    /// Wakes the next vCPUs. vCPU `id` must call this before it resumes, and also if it does not
    /// resume. It keeps the wave until it has resumed.
    pub(crate) fn pass_on(&self, id: u8) {
        for next in [1, 2] {
            self.tell(2 * usize::from(id) + next);
        }
    }

    fn tell(&self, id: usize) {
        let Some(vcpu) = self.all.get(id) else { return };
        if vcpu.send(Command::Resume(self.clone())).is_err() {
            // Its thread has ended: wake the vCPUs that it would have woken.
            for next in [1, 2] {
                self.tell(2 * id + next);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::TryRecvError;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// True whichever threads have ended, and in whatever order the others run.
        #[test]
        fn all_are_told_once_and_it_is_over_when_they_have_gone_on(
            (ended, slow, order) in (1..40usize).prop_flat_map(|vcpus| {
                let flags = || prop::collection::vec(any::<bool>(), vcpus);
                (flags(), flags(), Just((0..vcpus).collect::<Vec<_>>()).prop_shuffle())
            }),
        ) {
            let (all, mut inboxes): (Vec<_>, Vec<_>) =
                ended.iter().map(|_| mpsc::channel()).map(|(all, inbox)| (all, Some(inbox))).unzip();
            for (inbox, _) in inboxes.iter_mut().zip(&ended).filter(|(_, ended)| **ended) {
                *inbox = None;
            }
            let over = Wave::begin(all.into());
            let mut told = vec![0; ended.len()];
            // A vCPU counts as resuming as long as it holds its clone of the wave; some take their
            // time.
            let mut under_way = Vec::new();
            while let Some((id, heard)) = order.iter().find_map(|id| {
                inboxes[*id].as_ref()?.try_recv().ok().map(|heard| (*id, heard))
            }) {
                prop_assert_eq!(over.try_recv(), Err(TryRecvError::Empty));
                told[id] += 1;
                let Command::Resume(wave) = &heard else { panic!("{heard:?}") };
                wave.pass_on(id as u8);
                if slow[id] {
                    under_way.push(heard);
                }
            }
            let waits = if under_way.is_empty() { TryRecvError::Disconnected } else { TryRecvError::Empty };
            prop_assert_eq!(over.try_recv(), Err(waits));
            under_way.clear();
            prop_assert_eq!(over.try_recv(), Err(TryRecvError::Disconnected));
            for ((told, ended), inbox) in told.iter().zip(&ended).zip(&inboxes) {
                prop_assert_eq!(*told, u64::from(!ended));
                let heard = inbox.as_ref().map(|inbox| inbox.try_recv().is_ok());
                prop_assert_ne!(heard, Some(true), "told twice");
            }
        }
    }
}
