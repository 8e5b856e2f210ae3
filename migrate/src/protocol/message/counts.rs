//! Counts of a pass or a migration.

/// Numbers of frames, or blocks, with content and of zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) normal: u64,
    pub(crate) zero: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.normal += other.normal;
        self.zero += other.zero;
    }
}
