//! What a drain lists.

use super::structure::Tree;
use crate::{FrameRun, Gfn};

/// What a drain lists: [`FrameRun`] or [`Gfn`]. Only this crate implements it.
pub trait Element: Sealed {}

impl Element for FrameRun {}
impl Element for Gfn {}

/// Not visible outside this crate, so that only its types are elements.
pub trait Sealed: Sized {
    /// Empties the tree into `out`. Returns the number of frames.
    fn drain(tree: &Tree, out: &mut Vec<Self>) -> u64;

    /// As `drain`, by the tree's only owner.
    fn drain_exclusive(tree: &mut Tree, out: &mut Vec<Self>) -> u64;
}
