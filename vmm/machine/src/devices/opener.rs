//! A thread that opens by name what devices need while their guest runs: a tap that is attached
//! again, or a program's socket that the guest connects to. The devices' own threads cannot open
//! files by name or create sockets (see [`sandbox`](crate::sandbox)).
//!
//! One such thread serves all devices of a machine. It has the rights of the thread that built the
//! machine. A device waits for it, but it never waits for a device, and its jobs do not block.

use std::io;
use std::sync::mpsc::{self, Sender};

use crate::{fail_point, log};

/// Handle of the thread. The thread ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Opener {
    jobs: Sender<Job>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Opener {
    pub(crate) fn start() -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<Job>();
        let run = move || inbox.into_iter().for_each(|job| job());
        fail_point::pass("opener")?;
        log::spawn("opener", run)?;
        Ok(Self { jobs })
    }

    /// Runs `job` on that thread and returns its result.
    ///
    /// # Errors
    ///
    /// Fails if the thread has ended.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (reply, answer) = mpsc::channel();
        let job = move || {
            // The caller may have ended meanwhile.
            let _ = reply.send(job());
        };
        let told = self.jobs.send(Box::new(job)).ok();
        let answered = told.and_then(|()| answer.recv().ok());
        answered.ok_or_else(|| io::Error::other("the thread that opens files has ended"))
    }

    /// Wraps `thing` so that it is dropped on the opener's thread. Dropping the wrapper waits for
    /// that. For objects that are removed by name.
    pub(crate) fn keep<T: Send + 'static>(&self, thing: T) -> Kept<T> {
        Kept { thing: Some(thing), opener: self.clone() }
    }
}

/// Object that is dropped on the opener's thread. See [`Opener::keep`].
#[derive(Debug)]
pub(crate) struct Kept<T: Send + 'static> {
    /// `None` only during the drop.
    thing: Option<T>,
    opener: Opener,
}

impl<T: Send + 'static> Drop for Kept<T> {
    fn drop(&mut self) {
        let thing = self.thing.take();
        // If the thread has ended, `thing` is dropped together with the job.
        let _ = self.opener.run(move || drop(thing));
    }
}

#[cfg(test)]
mod tests {
    use std::thread::current;

    use super::*;

    struct Named(Sender<Option<String>>);

    impl Drop for Named {
        fn drop(&mut self) {
            self.0.send(current().name().map(str::to_owned)).unwrap();
        }
    }

    #[test]
    fn it_opens_and_drops_on_a_thread_of_its_own() {
        let opener = Opener::start().unwrap();
        let name = opener.run(|| current().name().map(str::to_owned)).unwrap();
        assert_eq!(name.as_deref(), Some("opener"));
        let (to, dropped) = mpsc::channel();
        let kept = opener.keep(Named(to));
        drop(opener);
        assert!(dropped.try_recv().is_err());
        drop(kept);
        assert_eq!(dropped.try_recv().unwrap().as_deref(), Some("opener"), "the drop has waited");
    }

    #[test]
    fn a_job_that_panics_is_an_error_now_and_later() {
        let opener = Opener::start().unwrap();
        assert!(opener.run(|| panic!("of a test")).is_err());
        assert!(opener.run(|| ()).unwrap_err().to_string().contains("has ended"));
    }
}
