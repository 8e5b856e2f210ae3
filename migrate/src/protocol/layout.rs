//! Compares the memory layouts of both ends.

use driftline_dirty_tracker::{Layout, Slot};

/// The first difference between the memory layouts of a guest built here and of its source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutDifference {
    /// The numbers of slots differ.
    #[error("{theirs} memory slots there and {ours} here")]
    Slots {
        /// Value here.
        ours: u64,
        /// Value at the source.
        theirs: u64,
    },
    /// A field of a slot differs.
    #[error("{field} of its memory slot {nth} is {theirs:#x} there and {ours:#x} here")]
    Slot {
        /// Index of the slot, by ascending guest address.
        nth: usize,
        /// The field.
        field: &'static str,
        /// Value here.
        ours: u64,
        /// Value at the source.
        theirs: u64,
    },
}

impl LayoutDifference {
    /// Returns the first difference of two layouts, slots ascending by address; `None` if they are
    /// equal.
    pub(crate) fn between(ours: &Layout, theirs: &Layout) -> Option<Self> {
        let fields = |of: &Slot| {
            [
                ("the number", of.id.0.into()),
                ("the first gfn", of.base.0),
                ("the length", of.frames),
            ]
        };
        for (nth, (here, there)) in ours.slots().zip(theirs.slots()).enumerate() {
            let mut pairs = fields(here).into_iter().zip(fields(there));
            if let Some(((field, ours), (_, theirs))) = pairs.find(|(a, b)| a != b) {
                return Some(Self::Slot { nth, field, ours, theirs });
            }
        }
        let (ours, theirs) = (ours.slots().count() as u64, theirs.slots().count() as u64);
        (ours != theirs).then_some(Self::Slots { ours, theirs })
    }
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::{Gfn, SlotId};

    use super::*;

    #[test]
    fn first_layout_difference_is_named() {
        let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
        let layout = |slots: &[Slot]| Layout::new(slots.iter().copied()).unwrap();
        let ours = layout(&[slot(0, 0, 8), slot(1, 16, 8)]);
        for (theirs, expected) in [
            (layout(&[slot(0, 0, 8)]), "1 memory slots there and 2 here"),
            (
                layout(&[slot(0, 0, 8), slot(2, 16, 8)]),
                "the number of its memory slot 1 is 0x2 there and 0x1 here",
            ),
            (
                layout(&[slot(0, 1, 7), slot(1, 16, 8)]),
                "the first gfn of its memory slot 0 is 0x1 there and 0x0 here",
            ),
            (
                layout(&[slot(0, 0, 8), slot(1, 16, 9)]),
                "the length of its memory slot 1 is 0x9 there and 0x8 here",
            ),
        ] {
            let difference = LayoutDifference::between(&ours, &theirs).unwrap();
            assert_eq!(difference.to_string(), expected);
        }
        assert_eq!(LayoutDifference::between(&ours, &ours.clone()), None);
    }
}
