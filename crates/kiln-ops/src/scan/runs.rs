//! Numbers of a plane's units by way of shared memory. Each unit works on a run of neighbouring items; but neighbouring
//! units read and write neighbouring addresses, else every access would touch as many lines of the cache as there are
//! lanes.

use super::Span;
use cubecl::prelude::*;

/// Runs begin four f32 further apart than they are long: no two lanes of a quarter meet in a bank.
const APART: usize = 4;

/// f32 of shared memory for a unit with a run of `count`.
pub(crate) const fn shared(count: usize) -> usize {
    count + APART
}

/// `count` neighbouring numbers, in vectors of four if they fill some and `vectors`: then they begin where one may.
#[cube]
pub(crate) fn run(
    values: &[f32],
    at: usize,
    #[comptime] count: usize,
    #[comptime] vectors: bool,
) -> Array<f32> {
    let mut run = Array::<f32>::new(count);
    if comptime!(vectors && count.is_multiple_of(4)) {
        let fours = values.as_vectorized().with_vector_size::<Const<4>>();
        #[unroll]
        for k in 0..comptime!(count / 4) {
            let four = fours[at / 4 + k];
            #[unroll]
            for i in 0..4usize {
                run[comptime!(4 * k + i)] = four.extract(i);
            }
        }
    } else {
        #[unroll]
        for e in 0..count {
            run[e] = values[at + e];
        }
    }
    run
}

/// Writes `count` of the numbers from number `from` on, as [`run`] reads them.
#[cube]
pub(crate) fn write_run(
    to: &mut [f32],
    at: usize,
    values: &Array<f32>,
    #[comptime] from: usize,
    #[comptime] count: usize,
    #[comptime] vectors: bool,
) {
    if comptime!(vectors && count.is_multiple_of(4)) {
        let fours = to.as_vectorized_mut().with_vector_size_mut::<Const<4>>();
        #[unroll]
        for k in 0..comptime!(count / 4) {
            let mut four = Vector::<f32, Const<4>>::empty();
            #[unroll]
            for i in 0..4usize {
                four.insert(i, values[comptime!(from + 4 * k + i)]);
            }
            fours[at / 4 + k] = four;
        }
    } else {
        #[unroll]
        for e in 0..count {
            to[at + e] = values[comptime!(from + e)];
        }
    }
}

/// Whether each of the items of a whole plane, `count` for each unit, has another behind it: then the plane may take
/// them together.
#[cube]
pub(crate) fn together(span: &Span, #[comptime] count: usize) -> bool {
    let behind = comptime!(span.lanes as usize) - lane(comptime!(span.lanes));
    span.first + behind * count < span.end
}

/// Where the plane's own part of a cube's memory begins, of `size` f32 for each unit.
#[cube]
pub(crate) fn of_plane(span: &Span, size: usize) -> usize {
    let at = (UNIT_POS / comptime!(span.lanes)) as usize * comptime!(span.lanes as usize) * size;
    // Within shared memory: said to the compiler, that lets it add constants in addresses.
    at & 0xF_FFFFusize
}

/// The lane of a row of whole planes: a remainder by a constant, which UNIT_POS_PLANE is not to the compiler.
#[cube]
fn lane(#[comptime] lanes: u32) -> usize {
    (UNIT_POS_X % lanes) as usize
}

/// Where the unit's own run of `count` begins in the part of a plane.
#[cube]
pub(crate) fn own_run(of_plane: usize, #[comptime] lanes: u32, #[comptime] count: usize) -> usize {
    of_plane + lane(lanes) * comptime!(shared(count))
}

/// How a plane goes across its runs: in steps of `width` neighbouring numbers for each lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Across {
    /// Numbers of a run.
    pub(crate) count: usize,
    /// Lanes of the plane.
    pub(crate) lanes: u32,
    /// Numbers that a lane takes at once, in a vector.
    pub(crate) width: usize,
    /// Indices are 32-bit numbers below 2³¹: said to the compiler, that lets it add constants in addresses.
    pub(crate) narrow: bool,
}

impl Across {
    pub(crate) fn new(count: usize, lanes: u32, vectors: bool, narrow: bool) -> Self {
        Self { count, lanes, width: if vectors { 4 } else { 1 }, narrow }
    }

    pub(crate) fn steps(&self) -> usize {
        self.count / self.width
    }

    /// From a lane's numbers to its next ones.
    fn stride(&self) -> usize {
        self.lanes as usize * self.width
    }

    /// From the first number of a lane to behind its last one.
    fn reach(&self) -> usize {
        (self.steps() - 1) * self.stride() + self.width
    }
}

/// The numbers of a plane, in the order in which it takes them; `at` is where the unit's own run begins.
#[cube]
pub(crate) fn read_across(values: &[f32], at: usize, #[comptime] across: Across) -> Array<f32> {
    let mut numbers = Array::<f32>::new(comptime!(across.count));
    let first = first_across(at, across);
    // What depends on the row is in the beginning; the distances from there are constants.
    let own = &values[first..first + comptime!(across.reach())];
    #[unroll]
    for k in 0..comptime!(across.steps()) {
        let some = run(own, comptime!(k * across.stride()), across.width, true);
        #[unroll]
        for j in 0..comptime!(across.width) {
            numbers[comptime!(k * across.width + j)] = some[j];
        }
    }
    numbers
}

/// Writes numbers as [`read_across`] reads them.
#[cube]
pub(crate) fn write_across(
    to: &mut [f32],
    at: usize,
    numbers: &Array<f32>,
    #[comptime] across: Across,
) {
    let first = first_across(at, across);
    let own = &mut to[first..first + comptime!(across.reach())];
    #[unroll]
    for k in 0..comptime!(across.steps()) {
        let i = comptime!(k * across.stride());
        write_run(own, i, numbers, comptime!(k * across.width), across.width, true);
    }
}

/// Where the first number lies that a lane takes of those of its plane.
#[cube]
fn first_across(at: usize, #[comptime] across: Across) -> usize {
    let lane = lane(across.lanes);
    let mut first = at - lane * across.count + lane * across.width;
    if comptime!(across.narrow) {
        first &= 0x7FFF_FFFFusize;
    }
    first
}

/// Where that is in a plane's shared memory, whose steps go across whole runs, and how far the steps reach.
#[cube]
fn first_in_runs(#[comptime] across: Across) -> usize {
    let first = lane(across.lanes) * across.width;
    first / across.count * comptime!(shared(across.count)) + first % across.count
}

impl Across {
    /// From a step to the next where numbers lie in runs.
    fn stride_in_runs(&self) -> usize {
        self.stride() / self.count * shared(self.count)
    }

    fn reach_in_runs(&self) -> usize {
        (self.steps() - 1) * self.stride_in_runs() + self.width
    }
}

/// Numbers that were taken across the plane become those of each unit's run. `memory` is the plane's.
#[cube]
pub(crate) fn to_runs(
    memory: &mut [f32],
    across_plane: &Array<f32>,
    #[comptime] across: Across,
) -> Array<f32> {
    put_across(memory, across_plane, across);
    sync_plane();
    run(&*memory, own_run(0usize, across.lanes, across.count), across.count, true)
}

#[cube]
pub(crate) fn put_across(
    memory: &mut [f32],
    across_plane: &Array<f32>,
    #[comptime] across: Across,
) {
    let first = first_in_runs(across);
    let own = &mut memory[first..first + comptime!(across.reach_in_runs())];
    #[unroll]
    for k in 0..comptime!(across.steps()) {
        let (to, from) = comptime!((k * across.stride_in_runs(), k * across.width));
        write_run(own, to, across_plane, from, across.width, true);
    }
}

/// The numbers of the units' runs as they lie across the plane.
#[cube]
pub(crate) fn to_across(
    memory: &mut [f32],
    own: &Array<f32>,
    #[comptime] across: Across,
) -> Array<f32> {
    write_run(memory, own_run(0usize, across.lanes, across.count), own, 0usize, across.count, true);
    sync_plane();
    let mut numbers = Array::<f32>::new(comptime!(across.count));
    let first = first_in_runs(across);
    let of_lane = &memory[first..first + comptime!(across.reach_in_runs())];
    #[unroll]
    for k in 0..comptime!(across.steps()) {
        let at = comptime!(k * across.stride_in_runs());
        let some = run(of_lane, at, across.width, true);
        #[unroll]
        for i in 0..comptime!(across.width) {
            numbers[comptime!(k * across.width + i)] = some[i];
        }
    }
    numbers
}
