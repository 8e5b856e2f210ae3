//! System call filters: compiled once, and applied by each thread to itself.
//!
//! A call that the filter does not allow is never executed. The kernel raises `SIGSYS` instead; its
//! handler reports the call and ends the process by that signal.

use std::sync::OnceLock;

use seccompiler::{
    BackendError, BpfProgram, Error, SeccompAction, SeccompFilter, TargetArch, apply_filter,
};

use super::class::Class;
use super::{filters, native};

/// Compiled filter programs.
#[derive(Debug)]
pub(super) struct Filters {
    process: BpfProgram,
    refused: BpfProgram,
    /// Program of each class. The first thread of a class compiles it, to keep the start of main
    /// short.
    classes: [OnceLock<BpfProgram>; Class::ALL.len()],
}

impl Filters {
    /// Compiles the programs that the process needs from the start.
    ///
    /// # Errors
    ///
    /// Fails if the filter tables are invalid.
    pub(super) fn compile() -> Result<Self, BackendError> {
        let refused = SeccompFilter::new(
            filters::refused(),
            SeccompAction::Allow,
            SeccompAction::Errno(libc::ENOSYS as u32),
            TargetArch::x86_64,
        )?;
        let process = allow(filters::of_process()?)?;
        Ok(Self { process, refused: refused.try_into()?, classes: Default::default() })
    }

    /// Applies the widest filter to the calling thread and to all threads that it starts.
    pub(super) fn enter_process(&self) -> Result<(), Error> {
        native::report_violations().map_err(Error::Prctl)?;
        apply_filter(&self.refused)?;
        apply_filter(&self.process)
    }

    /// Narrows the calling thread to its class.
    pub(super) fn enter(&self, class: Class) -> Result<(), Error> {
        let compiled = &self.classes[class as usize];
        let program = match compiled.get() {
            Some(program) => program,
            None => {
                let new = filters::of(class).and_then(allow).map_err(Error::Backend)?;
                // Another thread of the class may have compiled it first.
                compiled.get_or_init(|| new)
            }
        };
        apply_filter(program)
    }
}

/// Returns a program that allows the calls in `rules` and traps all others.
fn allow(rules: filters::Rules) -> Result<BpfProgram, BackendError> {
    let filter =
        SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, TargetArch::x86_64)?;
    filter.try_into()
}
