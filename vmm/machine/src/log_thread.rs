//! The threads that write the log of a process that has a guest.

use std::io;
use std::sync::Arc;

use crate::log::{LogOutput, outputs};
use crate::sandbox::{self, Class};

/// Keeps the log's readers from blocking the threads that log. To be called once the process is
/// restricted, since it starts threads.
pub fn start() -> io::Result<()> {
    outputs().try_for_each(start_for)
}

/// Leaves all lines of `output` from now on to a thread of their own.
fn start_for(output: &Arc<LogOutput>) -> io::Result<()> {
    let theirs = output.clone();
    let thread = sandbox::spawn(Class::Log, "log", move || theirs.write_for_ever())?;
    // It ends with the process: what it writes to may never take another byte.
    drop(thread);
    output.leave_to_thread();
    Ok(())
}
