//! Tiles on the way out: sums of a warpgroup rounded into chunks of shared memory, 64 rows of 128 swizzled
//! bytes, from where TMA stores them.

use super::ptx::Float16;
use cubecl::prelude::*;

/// Element type of a stored tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stored {
    Float16(Float16),
    F32,
}

impl Stored {
    /// Columns of a chunk.
    pub(crate) fn columns(self) -> usize {
        match self {
            Self::Float16(_) => 64,
            Self::F32 => 32,
        }
    }

    /// Stores chunk `c` of the sums `%0..` to the addresses s0..s3. A transposed chunk has the columns of the
    /// sums in its rows: of 16 bits chunk c transposed; of f32 64 columns and half of the rows, so that chunks
    /// 2c and 2c + 1 are one square.
    fn chunk(self, c: usize, transposed: bool) -> String {
        match (self, transposed) {
            (Self::Float16(float), _) => {
                let trans = if transposed { ".trans" } else { "" };
                let part = |i: usize| {
                    let j = 4 * (8 * c + 2 * i);
                    let round = |r: usize| {
                        let [high, low] = [j + 2 * r + 1, j + 2 * r];
                        format!("cvt.rn.{}x2.f32 r{r}, %{high}, %{low};\n", float.name())
                    };
                    let rounded: String = (0..4).map(round).collect();
                    rounded
                        + &format!(
                            "stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [s{i}], {{r0, r1, r2, r3}};\n"
                        )
                };
                (0..4).map(part).collect()
            }
            (Self::F32, false) => {
                let part = |i: usize| {
                    let j = 4 * (4 * c + i);
                    let two = |at: usize, rows: usize| {
                        format!("st.shared.v2.f32 [s{i}+{rows}], {{%{at}, %{}}};\n", at + 1)
                    };
                    two(j, 0) + &two(j + 2, 1024)
                };
                (0..4).map(part).collect()
            }
            (Self::F32, true) => {
                let element = |i: usize| {
                    let (lines, e) = (i / 4 * 1024, i % 4);
                    format!("@p st.shared.f32 [s{e}+{lines}], %{};\n", 32 * (c / 2) + i)
                };
                // The rows of two of the four warps of a warpgroup, which begins at a multiple of 128 units.
                let warps = format!(
                    "mov.u32 r0, %%tid.x; bfe.u32 r0, r0, 6, 1; setp.eq.u32 p, r0, {};\n",
                    c % 2
                );
                warps + &(0..32).map(element).collect::<String>()
            }
        }
    }
}

/// Where a unit stores its parts of a chunk, and of a transposed one.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ChunkAddresses {
    s0: u32,
    s1: u32,
    s2: u32,
    s3: u32,
    t0: u32,
    t1: u32,
    t2: u32,
    t3: u32,
}

/// Those of unit `unit` of a warpgroup, of chunks at `base`.
#[cube]
pub(crate) fn chunk_addresses(base: u32, unit: u32, #[comptime] stored: Stored) -> ChunkAddresses {
    ChunkAddresses {
        s0: chunk_address(base, unit, 0u32, stored, false),
        s1: chunk_address(base, unit, 1u32, stored, false),
        s2: chunk_address(base, unit, 2u32, stored, false),
        s3: chunk_address(base, unit, 3u32, stored, false),
        t0: chunk_address(base, unit, 0u32, stored, true),
        t1: chunk_address(base, unit, 1u32, stored, true),
        t2: chunk_address(base, unit, 2u32, stored, true),
        t3: chunk_address(base, unit, 3u32, stored, true),
    }
}

#[cube]
fn chunk_address(
    base: u32,
    unit: u32,
    #[comptime] part: u32,
    #[comptime] stored: Stored,
    #[comptime] transposed: bool,
) -> u32 {
    let (warp, lane) = (unit / 32, unit % 32);
    if comptime!(stored == Stored::F32) {
        if comptime!(transposed) {
            // Element e of every four: column 2·(lane % 4) + e % 2, row lane / 4 + 8·(e / 2) of 16.
            let line = lane % 4 * 2 + comptime!(part % 2);
            let along = warp % 2 * 16 + lane / 4 + comptime!(part / 2 * 8);
            base + line * 128 + (((along / 4) ^ line) << 4) + along % 4 * 4
        } else {
            let row = lane / 4;
            let block = comptime!(2 * part) + lane % 4 / 2;
            base + (warp * 16 + row) * 128 + ((block ^ row) << 4) + lane % 2 * 8
        }
    } else if comptime!(transposed) {
        let row = comptime!(16 * part) + lane / 16 * 8 + lane % 8;
        base + row * 128 + (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) << 4)
    } else {
        let block = comptime!(2 * part) + lane / 16;
        base + (warp * 16 + lane % 16) * 128 + ((block ^ (lane % 8)) << 4)
    }
}

/// Rounds a chunk of the sums and stores it, `transposed` or as it is, `offset` bytes after the addresses.
#[cube]
pub(crate) fn store_chunk<N: Size>(
    sums: Vector<f32, N>,
    places: &ChunkAddresses,
    #[comptime] offset: u32,
    #[comptime] chunk: usize,
    #[comptime] stored: Stored,
    #[comptime] transposed: bool,
) {
    let (s0, s1, s2, s3) = if comptime!(transposed) {
        (places.t0, places.t1, places.t2, places.t3)
    } else {
        (places.s0, places.s1, places.s2, places.s3)
    };
    gpu_asm!(
        "{{ .reg .b32 r<4>, s<4>; .reg .pred p; // {acc}",
        "add.u32 s0, {s0}, {o}; add.u32 s1, {s1}, {o}; add.u32 s2, {s2}, {o}; add.u32 s3, {s3}, {o};",
        "{body} }}",
        acc = in(_) sums, s0 = in(_) s0, s1 = in(_) s1, s2 = in(_) s2, s3 = in(_) s3,
        o = const offset, body = const stored.chunk(chunk, transposed)
    );
}
