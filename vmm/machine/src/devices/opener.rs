//! A thread that opens by name what devices need while their guest runs: a tap that is attached
//! again, or a program's socket that the guest connects to. The devices' own threads cannot open
//! files by name or create sockets (see [`sandbox`](crate::sandbox)).
//!
//! One such thread serves all devices of a machine. It has the rights of the thread that built the
//! machine. A device waits for it, but it never waits for a device, and its jobs do not block.

use std::io;
use std::time::{Duration, Instant};

use crate::actor::{self, Handle};
use crate::{fail_point, log};

/// Limit on waiting for the thread. Its jobs do not block, so only a defect takes this long. It is
/// shorter than the limit of a request to a device, which can then still report it.
const ANSWER_LIMIT: Duration = Duration::from_secs(4);

/// Handle of the thread. The thread ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Opener(Handle<()>);

impl Opener {
    pub(crate) fn start() -> io::Result<Self> {
        let (handle, inbox) = actor::inbox("the opener");
        fail_point::pass("opener")?;
        log::spawn("opener", move || inbox.serve(&mut ()))?;
        Ok(Self(handle))
    }

    /// Runs `job` on that thread and returns its result.
    ///
    /// # Errors
    ///
    /// Fails if the thread has ended or does not answer.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        self.0.call("open a file", deadline, |()| job()).map_err(io::Error::other)
    }

    /// Wraps `value` so that it is dropped on the opener's thread. Dropping the wrapper waits for
    /// that. For objects that are removed by name.
    pub(crate) fn drop_here<T: Send + 'static>(&self, value: T) -> DropOnOpener<T> {
        DropOnOpener { value: Some(value), opener: self.clone() }
    }
}

/// Object that is dropped on the opener's thread. See [`Opener::drop_here`].
#[derive(Debug)]
pub(crate) struct DropOnOpener<T: Send + 'static> {
    /// `None` only during the drop.
    value: Option<T>,
    opener: Opener,
}

impl<T: Send + 'static> DropOnOpener<T> {
    /// Returns the object.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref()
    }
}

impl<T: Send + 'static> Drop for DropOnOpener<T> {
    fn drop(&mut self) {
        let value = self.value.take();
        // If the thread has ended, or misses the deadline, `value` is dropped with the job.
        let _ = self.opener.run(move || drop(value));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Sender};
    use std::thread::current;

    use super::*;

    struct ReportThreadName(Sender<Option<String>>);

    impl Drop for ReportThreadName {
        fn drop(&mut self) {
            self.0.send(current().name().map(str::to_owned)).unwrap();
        }
    }

    #[test]
    fn jobs_and_drops_run_on_the_opener() {
        let opener = Opener::start().unwrap();
        let name = opener.run(|| current().name().map(str::to_owned)).unwrap();
        assert_eq!(name.as_deref(), Some("opener"));
        let (to, dropped) = mpsc::channel();
        let wrapped = opener.drop_here(ReportThreadName(to));
        drop(opener);
        assert!(dropped.try_recv().is_err());
        drop(wrapped);
        assert_eq!(dropped.try_recv().unwrap().as_deref(), Some("opener"), "the drop has waited");
    }

    #[test]
    fn panicking_job_is_an_error_also_later() {
        let opener = Opener::start().unwrap();
        assert!(opener.run(|| panic!("of a test")).is_err());
        assert!(opener.run(|| ()).unwrap_err().to_string().contains("has ended"));
    }
}
