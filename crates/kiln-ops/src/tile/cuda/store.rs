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

    /// The addresses s1..s3 of a unit's other parts from that of its first, s0: some rows on, or other bits of the
    /// place, swizzled, in the row or its neighbour.
    fn parts(self, transposed: bool) -> String {
        let part = |i: usize| match (self, transposed) {
            (_, false) => format!("xor.b32 s{i}, s0, {};\n", 32 * i),
            (Self::Float16(_), true) => format!("add.u32 s{i}, s0, {};\n", 2048 * i),
            // Element i of every four is in line i % 2, and 8·(i / 2) along it.
            (Self::F32, true) => format!("xor.b32 s{i}, s0, {};\n", i % 2 * 144 + i / 2 * 32),
        };
        (1..4).map(part).collect()
    }

    /// Stores chunk `c` of the sums `%0..` to the addresses s0..s3. A transposed chunk has the columns of the
    /// sums in its rows: of 16 bits chunk c transposed; of f32 64 columns and half of the rows, so that chunks
    /// 2c and 2c + 1 are one square. Of 16 bits only the first `parts` of four parts, of 16 columns each.
    fn chunk(self, c: usize, parts: usize, transposed: bool) -> String {
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
                (0..parts).map(part).collect()
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

/// Where a unit stores the first of its parts of a chunk, and of a transposed one.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ChunkAddresses {
    straight: u32,
    transposed: u32,
}

/// Those of unit `unit` of a warpgroup, of chunks at `base`, which is a multiple of 1024.
#[cube]
pub(crate) fn chunk_addresses(base: u32, unit: u32, #[comptime] stored: Stored) -> ChunkAddresses {
    let (warp, lane) = (unit / 32, unit % 32);
    if comptime!(stored == Stored::F32) {
        let row = lane / 4;
        let line = lane % 4 * 2;
        let along = warp % 2 * 16 + lane / 4;
        ChunkAddresses {
            straight: base + (warp * 16 + row) * 128 + (((lane % 4 / 2) ^ row) << 4) + lane % 2 * 8,
            transposed: base + line * 128 + (((along / 4) ^ line) << 4) + along % 4 * 4,
        }
    } else {
        let swizzle = lane % 8;
        ChunkAddresses {
            straight: base + (warp * 16 + lane % 16) * 128 + (((lane / 16) ^ swizzle) << 4),
            transposed: base
                + (lane / 16 * 8 + swizzle) * 128
                + (((warp * 2 + lane / 8 % 2) ^ swizzle) << 4),
        }
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
    store_parts::<N>(sums, places, offset, chunk, 4usize, stored, transposed);
}

/// The same of the first `parts` of the four parts of a chunk, of 16 columns of 16 bits each.
#[cube]
pub(crate) fn store_parts<N: Size>(
    sums: Vector<f32, N>,
    places: &ChunkAddresses,
    #[comptime] offset: u32,
    #[comptime] chunk: usize,
    #[comptime] parts: usize,
    #[comptime] stored: Stored,
    #[comptime] transposed: bool,
) {
    let first = if comptime!(transposed) { places.transposed } else { places.straight };
    gpu_asm!(
        "{{ .reg .b32 r<4>, s<4>; .reg .pred p; // {acc}",
        "add.u32 s0, {first}, {o};",
        "{parts} {body} }}",
        acc = in(_) sums, first = in(_) first, o = const offset,
        parts = const stored.parts(transposed), body = const stored.chunk(chunk, parts, transposed)
    );
}

/// sums + beta times the numbers of 16 bits that stand where chunk `chunk` of them would be stored: chunks follow each
/// other.
#[cube]
pub(crate) fn add_chunk<N: Size>(
    sums: Vector<f32, N>,
    places: &ChunkAddresses,
    beta: f32,
    #[comptime] chunk: usize,
    #[comptime] float: Float16,
) -> Vector<f32, N> {
    let held = N::value();
    let added: Vector<f32, N>;
    gpu_asm!(
        "{{ .reg .b32 r<4>, s<4>; .reg .b16 l, h; .reg .f32 beta, low, high; // {o} {i}",
        "mov.b32 beta, {beta};",
        "add.u32 s0, {first}, {at};",
        "xor.b32 s1, s0, 32; xor.b32 s2, s0, 64; xor.b32 s3, s0, 96;",
        "{body} }}",
        o = out(_) added, i = in(_) sums, beta = in(_) beta, first = in(_) places.straight,
        at = const 8192 * chunk, body = const added_chunk(chunk, held, float)
    );
    added
}

fn added_chunk(chunk: usize, held: usize, float: Float16) -> String {
    let mut text = String::new();
    // The others stay as they are.
    for i in (0..held).filter(|i| i / 32 != chunk) {
        text += &format!("mov.f32 %{i}, %{};\n", held + i);
    }
    for part in 0..4 {
        text +=
            &format!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{r0, r1, r2, r3}}, [s{part}];\n");
        for r in 0..4 {
            let at = 32 * chunk + 8 * part + 2 * r;
            match float {
                Float16::Bf16 => {
                    text += &format!("shl.b32 low, r{r}, 16; and.b32 high, r{r}, 0xffff0000;\n");
                }
                Float16::F16 => {
                    text += &format!("mov.b32 {{l, h}}, r{r};\n");
                    text += "cvt.f32.f16 low, l; cvt.f32.f16 high, h;\n";
                }
            }
            for (half, number) in [("low", at), ("high", at + 1)] {
                text += &format!("fma.rn.f32 %{number}, {half}, beta, %{};\n", held + number);
            }
        }
    }
    text
}

/// Stores a chunk of numbers that are rounded already, in pairs, as the fragments of sums have them; `offset` bytes
/// after the addresses.
#[cube]
pub(crate) fn store_rounded<N: Size>(
    pairs: Vector<u32, N>,
    places: &ChunkAddresses,
    #[comptime] offset: u32,
    #[comptime] chunk: usize,
) {
    gpu_asm!(
        "{{ .reg .b32 s<4>; // {pairs}",
        "add.u32 s0, {first}, {o};",
        "xor.b32 s1, s0, 32; xor.b32 s2, s0, 64; xor.b32 s3, s0, 96;",
        "{body} }}",
        pairs = in(_) pairs, first = in(_) places.straight, o = const offset,
        body = const rounded_chunk(chunk)
    );
}

fn rounded_chunk(chunk: usize) -> String {
    let part = |i: usize| {
        let at = 4 * (4 * chunk + i);
        let pairs: Vec<_> = (at..at + 4).map(|pair| format!("%{pair}")).collect();
        let pairs = pairs.join(", ");
        format!("stmatrix.sync.aligned.m8n8.x4.shared.b16 [s{i}], {{{pairs}}};\n")
    };
    (0..4).map(part).collect()
}
