//! Filters of system calls: compiled once, put on by each thread for itself.
//!
//! A call that a filter does not know never happens: the kernel raises `SIGSYS` in its place, whose
//! handler says which call it was, and ends the process by that signal.

use std::sync::OnceLock;

use seccompiler::{
    BackendError, BpfProgram, Error, SeccompAction, SeccompFilter, TargetArch, apply_filter,
};

use super::{Class, filters, native};

/// The programs.
#[derive(Debug)]
pub(super) struct Filters {
    process: BpfProgram,
    refused: BpfProgram,
    /// Of each class, compiled by the first thread that is of it: main has enough to do at a start.
    classes: [OnceLock<BpfProgram>; Class::ALL.len()],
}

impl Filters {
    /// Compiles those that the process needs at once.
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

    /// Puts the widest filter on the calling thread, and on all that it will start.
    pub(super) fn enter_process(&self) -> Result<(), Error> {
        native::report_violations().map_err(Error::Prctl)?;
        apply_filter(&self.refused)?;
        apply_filter(&self.process)
    }

    /// Narrows the calling thread to its class.
    pub(super) fn enter(&self, class: Class) -> Result<(), Error> {
        let kept = &self.classes[class as usize];
        let program = match kept.get() {
            Some(program) => program,
            None => {
                let compiled = filters::of(class).and_then(allow).map_err(Error::Backend)?;
                // Another thread of the class may have been faster.
                kept.get_or_init(|| compiled)
            }
        };
        apply_filter(program)
    }
}

/// A program that allows what `rules` say and traps everything else.
fn allow(rules: filters::Rules) -> Result<BpfProgram, BackendError> {
    let filter =
        SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, TargetArch::x86_64)?;
    filter.try_into()
}
