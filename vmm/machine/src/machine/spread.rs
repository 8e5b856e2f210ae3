//! Spreads vCPUs over the processors while they are woken.
//!
//! A kernel that knows of no cache that the processors share, as in many virtual machines, puts a
//! woken thread on the processor where it ran before or on that of the thread that wakes it, and
//! looks no further. On a host with few processors two vCPUs may then share one for a scheduler
//! tick (4 ms) while another is idle: in the slow hand-overs of Linux in `cargo bench -p tests
//! --bench local`, which the column of the longest ones shows.
//!
//! The thread that wakes the vCPUs waits afterwards. So its processor is for the last of them, and
//! the others may use any but it. Once all have been resumed, each may use what it could before.

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

use crate::schedule::processor;

/// Threads that are kept from some processors. Dropping it gives them back. Another thread must not
/// change what processors they may use in between: that change would be lost.
#[derive(Default)]
pub(super) struct Spread(Vec<(Pid, CpuSet)>);

impl Spread {
    /// Keeps the last thread on the caller's processor and the others from it, as far as each may
    /// use those processors. Does nothing for a single thread, and nothing that the kernel refuses.
    pub(super) fn of(threads: &[Pid]) -> Self {
        let mut kept = Self::default();
        let here = usize::try_from(processor()).ok().filter(|here| *here < CpuSet::MAX_CPU);
        if let (Some(here), [first, others @ .., last]) = (here, threads) {
            let all = all_processors();
            for thread in [first].into_iter().chain(others) {
                kept.keep(*thread, &all, |mut allowed| {
                    allowed.unset(here);
                    allowed
                });
            }
            kept.keep(*last, &all, |allowed| {
                let mut only = CpuSet::new();
                if allowed.is_set(here) {
                    only.set(here);
                }
                only
            });
        }
        kept
    }

    /// Lets a thread use what `choose` returns of the processors that it may use.
    fn keep(&mut self, thread: Pid, all: &CpuSet, choose: impl Fn(CpuSet) -> CpuSet) {
        // The kernel has no such call for more processors than a set can have.
        let Ok(allowed) = sched_getaffinity(Some(thread)) else { return };
        // A thread that is allowed all processors of its cpuset gets all there are back. Given only
        // those, it would not get the processors that the cpuset gains later.
        if sched_setaffinity(Some(thread), all).is_err() {
            return;
        }
        let unrestricted = sched_getaffinity(Some(thread)).is_ok_and(|most| most == allowed);
        let before = if unrestricted { *all } else { allowed };
        self.0.push((thread, before));
        // An empty set is refused. Then the kernel places the thread as it does without this.
        if sched_setaffinity(Some(thread), &choose(allowed)).is_err() {
            let _ = sched_setaffinity(Some(thread), &before);
        }
    }
}

/// Returns the set of all processors that a set can have.
fn all_processors() -> CpuSet {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|processor| all.set(processor));
    all
}

impl Drop for Spread {
    fn drop(&mut self) {
        for (thread, allowed) in &self.0 {
            if let Err(e) = sched_setaffinity(Some(*thread), allowed) {
                tracing::warn!("a vCPU may use only the processors of its last resume: {e}");
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use rustix::thread::gettid;

    use super::*;

    fn processors(of: Pid) -> Vec<usize> {
        let set = sched_getaffinity(Some(of)).unwrap();
        (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect()
    }

    fn set_of(processors: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        processors.iter().for_each(|processor| set.set(*processor));
        set
    }

    /// Calls `check` with the caller's only processor, all processors, and as many threads.
    fn with_threads(count: usize, check: impl FnOnce(usize, &[usize], &[Pid]) + Send) {
        thread::scope(|scope| {
            let (id, ids) = mpsc::channel();
            let ends: Vec<_> = (0..count)
                .map(|_| {
                    let ((end, ended), id) = (mpsc::channel::<()>(), id.clone());
                    scope.spawn(move || {
                        id.send(gettid()).unwrap();
                        ended.recv().unwrap_err();
                    });
                    end
                })
                .collect();
            let threads: Vec<_> = ids.iter().take(count).collect();
            // Only this thread moves to one processor, and it ends with the test.
            let caller = scope.spawn(move || {
                let all = processors(gettid());
                let here = processor() as usize;
                sched_setaffinity(None, &set_of(&[here])).unwrap();
                check(here, &all, &threads);
            });
            let checked = caller.join();
            drop(ends);
            checked.unwrap();
        });
    }

    #[test]
    fn only_the_last_gets_the_callers_processor() {
        with_threads(4, |here, all, threads| {
            let spread = Spread::of(threads);
            let mut others: Vec<_> = all.iter().copied().filter(|p| *p != here).collect();
            if others.is_empty() {
                others = all.to_vec();
            }
            let now: Vec<_> = threads.iter().map(|thread| processors(*thread)).collect();
            assert_eq!(now, [&others[..], &others, &others, &[here]]);
            drop(spread);
            threads.iter().for_each(|thread| assert_eq!(processors(*thread), all));
        });
    }

    /// An operator's choice of processors holds.
    #[test]
    fn threads_gain_no_processor() {
        with_threads(2, |here, all, threads| {
            let Some(other) = all.iter().copied().find(|p| *p != here) else { return };
            sched_setaffinity(Some(threads[0]), &set_of(&[here])).unwrap();
            sched_setaffinity(Some(threads[1]), &set_of(&[other])).unwrap();
            let now = || [processors(threads[0]), processors(threads[1])];
            let spread = Spread::of(threads);
            assert_eq!(now(), [[here], [other]]);
            drop(spread);
            assert_eq!(now(), [[here], [other]]);
        });
    }

    #[test]
    fn single_thread_is_left_alone() {
        with_threads(1, |_, all, threads| {
            let _spread = Spread::of(threads);
            assert_eq!(processors(threads[0]), all);
        });
    }
}
