//! Filters of system calls: compiled once at the start, put on by each thread for itself.
//!
//! A call that a filter does not know never happens: the kernel raises `SIGSYS` in its place, whose
//! handler says which call it was, and ends the process by that signal.

use std::collections::BTreeMap;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};

use super::{Class, filters, native};

/// The programs of all classes.
#[derive(Debug)]
pub(super) struct Filters {
    classes: BTreeMap<Class, BpfProgram>,
    process: BpfProgram,
    refused: BpfProgram,
}

impl Filters {
    /// Compiles them.
    pub(super) fn compile() -> Result<Self, seccompiler::BackendError> {
        let class = |class| Ok((class, allow(filters::of(class)?)?));
        let refused = SeccompFilter::new(
            filters::refused(),
            SeccompAction::Allow,
            SeccompAction::Errno(libc::ENOSYS as u32),
            TargetArch::x86_64,
        )?;
        Ok(Self {
            classes: Class::ALL.into_iter().map(class).collect::<Result<_, _>>()?,
            process: allow(filters::of_process()?)?,
            refused: refused.try_into()?,
        })
    }

    /// Puts the widest filter on the calling thread, and on all that it will start.
    pub(super) fn enter_process(&self) -> Result<(), seccompiler::Error> {
        native::report_violations().map_err(seccompiler::Error::Prctl)?;
        apply_filter(&self.refused)?;
        apply_filter(&self.process)
    }

    /// Narrows the calling thread to its class.
    pub(super) fn enter(&self, class: Class) -> Result<(), seccompiler::Error> {
        self.classes.get(&class).map_or(Ok(()), |program| apply_filter(program))
    }
}

/// A program that allows what `rules` say and traps everything else.
fn allow(rules: filters::Rules) -> Result<BpfProgram, seccompiler::BackendError> {
    let filter =
        SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, TargetArch::x86_64)?;
    filter.try_into()
}
