//! Keeps the last of the vCPUs that are woken apart from the others.
//!
//! A kernel that knows of no cache that the processors share, as in many virtual machines, puts a
//! woken thread on the processor where it ran before or on that of the thread that wakes it, and
//! looks no further. Two vCPUs may then share one processor for a scheduler tick (4 ms) while
//! another is idle.
//!
//! The thread that wakes the vCPUs waits afterwards. So its processor is for the last of them, and
//! the others may use any but it, until all have been resumed. They cannot preempt that thread
//! either, unless it has waited in between and was moved. The same is done while the vCPUs of a
//! guest that moves restore their states. The row "Linux" of
//! `cargo bench -p tests --bench local -- 20` shows the effect: its maximum is 1.0 to 1.4 ms in
//! most runs, and 4 to 5 ms without it (two vCPUs, two processors). If there are more vCPUs than
//! processors, the others would crowd together, and nothing is done.
//!
//! Limits: a change of a vCPU thread's affinity meanwhile is lost. A bound vCPU may leave its
//! processors for microseconds when its affinity is restored. A thread that may use its whole
//! cpuset counts as one without an affinity of its own. KVM's worker thread for huge pages, which
//! starts at a machine's first `KVM_RUN`, keeps the affinity that the vCPU has then.

use rustix::io::Errno;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

use crate::schedule::processor;

/// Threads that are kept from some processors. Dropping this restores their affinity.
#[derive(Default)]
pub(super) struct Spread(Vec<(Pid, CpuSet)>);

impl Spread {
    /// Keeps the last thread on the caller's processor and the others from it, as far as each may
    /// use those processors. Costs two system calls for each thread, and two or three when this is
    /// dropped. Does nothing for a single thread, or for more threads than processors. A thread
    /// whose change the kernel refuses keeps its affinity.
    pub(super) fn of(threads: &[Pid]) -> Self {
        let mut kept = Self::default();
        let here = usize::try_from(processor()).ok().filter(|here| *here < CpuSet::MAX_CPU);
        let (Some(here), [first, .., last]) = (here, threads) else { return kept };
        // The call fails on a kernel with more processors than a set can have.
        let Ok(allowed) = sched_getaffinity(Some(*first)) else { return kept };
        if threads.len() > allowed.count() as usize {
            return kept;
        }
        for thread in &threads[..threads.len() - 1] {
            kept.keep(*thread, |mut allowed| {
                allowed.unset(here);
                allowed
            });
        }
        kept.keep(*last, |allowed| {
            let mut only = CpuSet::new();
            if allowed.is_set(here) {
                only.set(here);
            }
            only
        });
        kept
    }

    /// Returns whether any thread is kept from a processor. If so, there are enough processors for
    /// all.
    pub(super) fn keeps_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Lets a thread use what `choose` returns of the processors that it may use.
    fn keep(&mut self, thread: Pid, choose: impl FnOnce(CpuSet) -> CpuSet) {
        let Ok(allowed) = sched_getaffinity(Some(thread)) else { return };
        // An empty set is refused. Then the kernel places the thread as it does without this.
        if sched_setaffinity(Some(thread), &choose(allowed)).is_ok() {
            self.0.push((thread, allowed));
        }
    }
}

impl Drop for Spread {
    fn drop(&mut self) {
        let all = all_processors();
        self.0.iter().for_each(|(thread, before)| restore(*thread, before, &all));
    }
}

/// Lets a thread use the processors that it could use `before`. A thread that had no affinity of
/// its own gets `all`: with `before` it could not use processors that its cpuset gains later.
fn restore(thread: Pid, before: &CpuSet, all: &CpuSet) {
    let most = sched_setaffinity(Some(thread), all).and_then(|()| sched_getaffinity(Some(thread)));
    let restored = match is_own(before, most.ok()) {
        true => sched_setaffinity(Some(thread), before),
        false => Ok(()),
    };
    match restored {
        // A thread that has ended needs none.
        Ok(()) | Err(Errno::SRCH) => {}
        Err(e) => tracing::warn!(
            "the affinity of the vCPU thread {} is not restored: {e}; set it with taskset",
            thread.as_raw_pid()
        ),
    }
}

/// Returns whether a thread that could use `before` had an affinity of its own, if it can use
/// `most` once it may use all processors.
fn is_own(before: &CpuSet, most: Option<CpuSet>) -> bool {
    most.as_ref() != Some(before)
}

/// Returns the set of all processors that a set can have.
fn all_processors() -> CpuSet {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|processor| all.set(processor));
    all
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use rustix::thread::gettid;

    use super::*;
    use crate::testing::skip;

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
        let processors_here = processors(gettid()).len();
        if processors_here < 2 {
            return skip("only_the_last_gets_the_callers_processor", "there is one processor");
        }
        with_threads(processors_here, |here, all, threads| {
            let spread = Spread::of(threads);
            let others: Vec<_> = all.iter().copied().filter(|p| *p != here).collect();
            for thread in &threads[..threads.len() - 1] {
                assert_eq!(processors(*thread), others);
            }
            assert_eq!(processors(*threads.last().unwrap()), [here]);
            drop(spread);
            threads.iter().for_each(|thread| assert_eq!(processors(*thread), all));
        });
    }

    /// An operator's choice of processors holds.
    #[test]
    fn threads_gain_no_processor() {
        with_threads(2, |here, all, threads| {
            let Some(other) = all.iter().copied().find(|p| *p != here) else {
                return skip("threads_gain_no_processor", "there is one processor");
            };
            sched_setaffinity(Some(threads[1]), &set_of(&[other])).unwrap();
            let second = || processors(threads[1]);
            let spread = Spread::of(threads);
            assert_eq!(second(), [other]);
            drop(spread);
            assert_eq!(second(), [other]);
        });
    }

    #[test]
    fn more_threads_than_processors_are_left_alone() {
        with_threads(processors(gettid()).len() + 1, |_, all, threads| {
            let _spread = Spread::of(threads);
            threads.iter().for_each(|thread| assert_eq!(processors(*thread), all));
        });
        with_threads(1, |_, all, threads| {
            let _spread = Spread::of(threads);
            assert_eq!(processors(threads[0]), all);
        });
    }

    #[test]
    fn ended_thread_is_skipped() {
        with_threads(1, |here, all, threads| {
            let ended = thread::spawn(gettid).join().unwrap();
            let spread = Spread::of(&[threads[0], ended]);
            if all.len() > 1 {
                assert!(!processors(threads[0]).contains(&here));
            }
            drop(spread);
            assert_eq!(processors(threads[0]), all);
        });
    }

    #[test]
    fn whole_cpuset_is_no_affinity_of_its_own() {
        let [one, two] = [&[0][..], &[0, 1]].map(set_of);
        assert!(!is_own(&two, Some(two)));
        assert!(is_own(&one, Some(two)));
        assert!(is_own(&one, None));
    }
}
