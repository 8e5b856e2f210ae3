//! How vCPUs that stand go on: the first is woken, and each wakes up to two others before it runs,
//! so that many do not wait long.
//!
//! One thread that wakes all of them in turn may lose its processor to the first, and the others
//! stand until a tick gives it back, which may be 4 ms. And while it runs, two vCPUs may be put on
//! the one processor that is idle.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use super::Command;

/// Goes from vCPU to vCPU.
#[derive(Clone, Debug)]
pub(crate) struct Wave {
    /// To each vCPU, in their order.
    all: Arc<[Sender<Command>]>,
    /// The last to go closes it.
    _under_way: Option<Sender<()>>,
}

impl Wave {
    /// Has all of them go on. What it gives out is closed when they have, or have ended; nothing is
    /// ever sent to it.
    pub(crate) fn begin(all: Arc<[Sender<Command>]>) -> Receiver<()> {
        let (under_way, over) = mpsc::channel();
        Self { all, _under_way: Some(under_way) }.tell(0);
        over
    }

    /// For a vCPU that is told to go on by itself.
    pub(crate) fn alone() -> Self {
        Self { all: Arc::from([]), _under_way: None }
    }

    /// To be called by vCPU `id` before it goes on, and even if it does not. It keeps this until it
    /// has.
    pub(crate) fn pass_on(&self, id: u8) {
        for next in [1, 2] {
            self.tell(2 * usize::from(id) + next);
        }
    }

    fn tell(&self, id: usize) {
        let Some(vcpu) = self.all.get(id) else { return };
        if vcpu.send(Command::Resume(self.clone())).is_err() {
            // Its thread has ended.
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
        /// Whichever threads have ended, and in whatever order the others run.
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
            // A vCPU is on its way as long as it holds what it was told with: some take their time.
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
