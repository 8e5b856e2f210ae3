//! A tree with the largest value of each half, quarter and so on of a row. It finds the leftmost
//! value that is large enough without reading all of them.

/// A row of numbers, 0 until set.
#[derive(Clone, Debug, Default)]
pub(super) struct MaxTree {
    /// The larger of nodes 2n and 2n + 1 in node n; the leaves are the second half.
    nodes: Vec<u32>,
}

impl MaxTree {
    fn leaves(&self) -> usize {
        self.nodes.len() / 2
    }

    /// Makes room for `leaves` numbers. Takes O(leaves) when the tree has to grow, which doubles
    /// it.
    pub(super) fn grow(&mut self, leaves: usize) {
        if leaves <= self.leaves() {
            return;
        }
        let row = leaves.next_power_of_two();
        let mut nodes = vec![0; row * 2];
        nodes[row..row + self.leaves()].copy_from_slice(&self.nodes[self.leaves()..]);
        for n in (1..row).rev() {
            nodes[n] = nodes[2 * n].max(nodes[2 * n + 1]);
        }
        self.nodes = nodes;
    }

    /// Sets number `leaf`, for which there must be room.
    pub(super) fn set(&mut self, leaf: usize, value: u32) {
        let mut n = leaf + self.leaves();
        if self.nodes[n] == value {
            return;
        }
        self.nodes[n] = value;
        while n > 1 {
            n /= 2;
            let larger = self.nodes[2 * n].max(self.nodes[2 * n + 1]);
            if self.nodes[n] == larger {
                return;
            }
            self.nodes[n] = larger;
        }
    }

    /// Returns the largest number.
    pub(super) fn max(&self) -> u32 {
        self.nodes.get(1).copied().unwrap_or(0)
    }

    /// Returns the position of the first number from `from` on that is at least `value`, which is
    /// not 0.
    pub(super) fn first_at_least(&self, value: u32, from: u32) -> Option<u32> {
        if self.max() < value || from as usize >= self.leaves() {
            return None;
        }
        let mut n = from as usize + self.leaves();
        while self.nodes[n] < value {
            // Go up while this is a right half, then to the right half beside it; the root has
            // none.
            while n % 2 == 1 {
                n /= 2;
            }
            if n == 0 {
                return None;
            }
            n += 1;
        }
        while n < self.leaves() {
            n = if self.nodes[2 * n] >= value { 2 * n } else { 2 * n + 1 };
        }
        Some((n - self.leaves()) as u32)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn tree_finds_what_a_linear_search_finds(
            values in prop::collection::vec(0u32..20, 1..70),
            value in 1u32..20,
            from in 0u32..80,
        ) {
            let mut tree = MaxTree::default();
            for (i, &v) in values.iter().enumerate() {
                tree.grow(i + 1);
                tree.set(i, v);
            }
            let plain = values.iter().enumerate().skip(from as usize).find(|(_, v)| **v >= value);
            prop_assert_eq!(tree.first_at_least(value, from), plain.map(|(i, _)| i as u32));
            prop_assert_eq!(tree.max(), values.iter().copied().max().unwrap_or(0));
        }
    }
}
