//! The element types of a drain's output.

use super::structure::Tree;
use crate::{FrameRun, Gfn};

/// The element type of a drain's output: [`FrameRun`] or [`Gfn`]. Only this crate implements it.
pub trait Element: Sealed {}

impl Element for FrameRun {}
impl Element for Gfn {}

/// A supertrait that other crates cannot name, so only this crate's types are elements.
pub trait Sealed: Sized {
    /// Empties the tree into `out`. Returns the number of frames.
    fn drain(tree: &Tree, out: &mut Vec<Self>) -> u64;

    /// As `drain`, by the tree's only owner.
    fn drain_exclusive(tree: &mut Tree, out: &mut Vec<Self>) -> u64;
}
