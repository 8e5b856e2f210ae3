//! The threads that write the log of a process that has a guest.

use std::io;
use std::sync::Arc;

use crate::log::{LogOutput, outputs};
use crate::sandbox::{self, Class};

/// Starts the threads that write the log, so that its readers cannot block the threads that log.
/// Call it once the process is restricted, because it starts threads.
///
/// # Errors
///
/// A thread cannot be started.
pub fn start() -> io::Result<()> {
    outputs().try_for_each(start_for)
}

/// Starts a thread that writes all further lines of `output`.
///
/// # Errors
///
/// The thread cannot be started.
pub fn start_for(output: &Arc<LogOutput>) -> io::Result<()> {
    let theirs = output.clone();
    let thread = sandbox::spawn(Class::Log, "log", move || theirs.write_for_ever())?;
    // The thread ends with the process: its destination may never accept another byte.
    drop(thread);
    output.leave_to_thread();
    Ok(())
}
