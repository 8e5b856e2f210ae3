//! Ends a chain whose guest moves to another process, and continues one that has come from there.

use driftline_dirty_tracker::{DirtySet, FrameRun, OutOfSlot, Subscription};

use super::Checkpointer;
use crate::chain::EpochChain;
use crate::commit_thread::CommitThread;
use crate::moved_chain::{DirtyDrive, DirtySince, FollowedWrites, MovedChain};

/// Why a chain does not continue.
#[derive(Debug, thiserror::Error)]
enum ChainEnd {
    #[error("the guest's writes were not followed")]
    NotFollowed,
    #[error(
        "the last checkpoint before the move is {expected}, and the store's is {}",
        or_none(*found)
    )]
    StoreChanged { expected: u64, found: Option<u64> },
    #[error("the guest has other disks than its last checkpoint")]
    Drives,
    #[error(transparent)]
    OutOfSlot(#[from] OutOfSlot),
}

fn or_none(epoch: Option<u64>) -> String {
    epoch.map_or("none".to_owned(), |epoch| epoch.to_string())
}

impl Checkpointer {
    /// Ends, after the guest has moved to another process. Returns what that process needs to
    /// continue the chain. The guest's writes must have been collected in its last pause here,
    /// because this does not collect them. On return, the store is closed; that waits for epochs in
    /// flight without a limit.
    pub fn into_moved(mut self) -> MovedChain {
        let chain = self.chain.take().filter(|_| !self.lock_lost);
        let dirty = chain.and_then(|mut chain| {
            let drives = chain.drives.0.iter_mut().map(|drive| DirtyDrive {
                id: drive.head.id.clone(),
                bytes: drive.head.bytes,
                blocks: drained(&mut drive.writes),
            });
            let drives = drives.collect();
            let memory = drained(&mut chain.subscription);
            chain.last.map(|epoch| DirtySince { epoch, memory, drives })
        });
        MovedChain { next: self.next, dirty }
    }

    /// Continues a chain of another process, whose guest this one has now. `writes` are those of
    /// the guest since it runs here. If the chain cannot continue, the log says why, and the next
    /// epoch is full. Must be called before the first epoch.
    pub fn continue_moved(&mut self, writes: Option<FollowedWrites>, moved: MovedChain) {
        self.next = self.next.max(moved.next);
        let Some(dirty) = moved.dirty else { return };
        match self.continued(writes, &dirty) {
            Ok(chain) => self.chain = Some(chain),
            Err(why) => tracing::warn!("beginning again with a full checkpoint: {why}"),
        }
    }

    fn continued(
        &self,
        writes: Option<FollowedWrites>,
        dirty: &DirtySince,
    ) -> Result<EpochChain, ChainEnd> {
        let FollowedWrites(mut chain) = writes.ok_or(ChainEnd::NotFollowed)?;
        let found = self.commit_thread.as_ref().and_then(CommitThread::last);
        let expected = dirty.epoch;
        if found != Some(expected) {
            return Err(ChainEnd::StoreChanged { expected, found });
        }
        let of_chain = dirty.drives.iter().map(|drive| (&drive.id, drive.bytes));
        let followed = chain.drives.0.iter().map(|drive| (&drive.head.id, drive.head.bytes));
        let of_guest = self.drives.iter().map(|head| (&head.id, head.bytes));
        if !of_chain.clone().eq(followed) || !of_chain.eq(of_guest) {
            return Err(ChainEnd::Drives);
        }
        dirty.memory.iter().try_for_each(|run| chain.subscription.mark(*run))?;
        for (drive, dirty) in chain.drives.0.iter().zip(&dirty.drives) {
            dirty.blocks.iter().try_for_each(|run| drive.writes.mark(*run))?;
        }
        chain.last = Some(expected);
        Ok(chain)
    }
}

/// Returns what a subscriber that ends has not drained.
fn drained(writes: &mut Subscription) -> Vec<FrameRun> {
    let dirty: DirtySet = writes.drain();
    let runs = dirty.runs().collect();
    // Not given back: the chain ends here, and one that is not continued begins with a full epoch.
    dirty.commit();
    runs
}
