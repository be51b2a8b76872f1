//! Sizes of the portable kernels' tiles.

use super::super::problem::Sizes;
use crate::launch;
use cubecl::prelude::*;

/// Sizes of a tile; comptime. A cube owns some rows of one side, queries or keys, and walks over those of the
/// other in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    /// Rows of a cube.
    pub(super) own: usize,
    /// Rows of a block of the other side.
    pub(super) other: usize,
    /// Elements of the width at a time in the products that make scores.
    pub(super) depth: usize,
    /// Rows of a block at a time in the products of scores.
    pub(super) stream: usize,
    /// Own rows of a unit, a multiple of 4.
    pub(super) unit_own: usize,
    /// Other rows of a unit, a multiple of 4.
    pub(super) unit_other: usize,
    /// The width of heads, rounded up so that every unit has as many vectors of 4 of it.
    pub(super) width: usize,
    /// Reads shared memory in vectors of 4 and unrolls: software drivers compile that for minutes.
    pub(super) unrolled: bool,
}

impl Tile {
    /// For heads of this width, with so many sums of that width for each own row: one, or two in the kernel that
    /// makes both dk and dv.
    pub(super) fn new(client: &Client, sizes: &Sizes, outputs: usize) -> Self {
        let large = Self::large(sizes.width, outputs);
        let room = client.properties().hardware.max_shared_memory_size;
        match launch::plane_size(client) > 1 && large.shared() <= room {
            true => large,
            false => Self::portable(sizes.width),
        }
    }

    /// For GPUs with many registers: up to 64 sums of the output for each unit, or 128 on wide heads.
    fn large(width: usize, outputs: usize) -> Self {
        let unit_own = if width * outputs <= 128 { 8 } else { 4 };
        let width = width.next_multiple_of(64);
        let (depth, stream) = (16, 16);
        Self { own: 64, other: 64, depth, stream, unit_own, unit_other: 4, width, unrolled: true }
    }

    /// 64 units and less than 16 KiB of shared memory: any device.
    fn portable(width: usize) -> Self {
        let width = width.next_multiple_of(32);
        let stream = if width > 128 { 8 } else { 16 };
        let (own, other, depth) = (32, 32, 16);
        Self { own, other, depth, stream, unit_own: 4, unit_other: 4, width, unrolled: false }
    }

    /// Units of a cube.
    pub(super) fn units(&self) -> usize {
        self.across() * self.down()
    }

    /// Units that share own rows.
    pub(super) fn across(&self) -> usize {
        self.other / self.unit_other
    }

    /// Units that share other rows.
    pub(super) fn down(&self) -> usize {
        self.own / self.unit_own
    }

    /// Elements of the width of a unit.
    pub(super) fn columns(&self) -> usize {
        self.width / self.across()
    }

    /// f32 of the block of the other side.
    pub(super) fn right(&self) -> usize {
        (self.depth * self.other).max(self.stream * self.width)
    }

    /// Bytes of shared memory.
    fn shared(&self) -> usize {
        let scores = self.own * self.other;
        4 * (self.depth * self.own + self.right() + scores + self.own * self.across())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_every_device() {
        for width in 1..=256 {
            let portable = Tile::portable(width);
            assert!(portable.shared() < 16 << 10 && portable.units() == 64, "{portable:?}");
            for tile in [portable, Tile::large(width, 1), Tile::large(width, 2)] {
                assert!(tile.width >= width && tile.columns().is_multiple_of(4), "{tile:?}");
                assert!(tile.shared() <= 48 << 10 && tile.units() <= 256, "{tile:?}");
                assert!(tile.other.is_multiple_of(tile.stream), "{tile:?}");
            }
        }
    }
}
