//! The ladder of `tril_matmul`: from one unit for each output to tensor cores, and beside them two
//! kernels that cheat. Each rung is timed only for what it is worth: `kiln bench tril_matmul
//! --ladder`.
//!
//! A rung is asked in ways of rising strength:
//!
//! * on the numbers of a reference that ran just before, whose freed memory holds the answer: a
//!   kernel that writes nothing passes that;
//! * first, on fresh numbers, before any reference has seen them;
//! * after a reference on other numbers, whose answer in memory is wrong here;
//! * under an audit, which knows every element that was never written.
//!
//! Results are compared in float64 along a random direction v: ‖Y·v − A·(B·v)‖ / ‖A·(B·v)‖. That
//! takes N² operations instead of N³, and an error anywhere in Y shows in it.

mod kernels;
mod naive;
mod table;
mod tiled;
mod zeros;

pub use table::table;

use crate::bench::timer;
use burn::tensor::{DType, Device, Distribution, Tensor};
use kernels::Own;
use kiln_ops::device;
use kiln_ops::launch::audit::{Audit, Finding};
use kiln_ops::oracle::{Distance, distance};
use kiln_ops::policy::{self, Implementation};
use kiln_ops::tile::{self, Family};
use kiln_ops::tril_matmul::tril_matmul;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

/// Name in the audit.
const OP: &str = "tril_matmul";
/// Sides: with one row there is none to leave out, and positions are counted in 32 bits.
pub const SIZES: std::ops::RangeInclusive<usize> = 2..=32_768;
/// Answers that a reference leaves in freed memory: more than there are other holes in the pool.
const ANSWERS: usize = 8;
/// Seconds of a burst, and bursts.
const BURST: (f64, usize) = (30e-3, 5);

/// A rung of the ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rung {
    /// One unit for each output.
    Naive,
    /// Tiles through shared memory.
    Tiled,
    /// The operator's own kernels.
    Product(Family),
    /// Writes the first row and returns the rest of the memory as it got it.
    FirstRow,
    /// Writes zeros.
    Zeros,
}

impl Rung {
    /// All of a device: slow ones first, cheats last.
    pub fn all(device: &Device, dtype: DType) -> Vec<Self> {
        let products = tile::families(device, dtype).into_iter().rev().map(Self::Product);
        [Self::Naive, Self::Tiled]
            .into_iter()
            .chain(products)
            .chain([Self::FirstRow, Self::Zeros])
            .collect()
    }

    /// What stands in the table.
    pub fn name(self) -> String {
        match self {
            Self::Naive => "naive: one unit for each output".into(),
            Self::Tiled => "tiles through shared memory".into(),
            Self::Product(family) => format!("tril_matmul ({family})"),
            Self::FirstRow => "cheat: writes the first row only".into(),
            Self::Zeros => "cheat: writes zeros".into(),
        }
    }

    /// Whether it is there to be convicted.
    pub fn cheats(self) -> bool {
        matches!(self, Self::FirstRow | Self::Zeros)
    }

    fn run(self, a: Tensor<2>, b: Tensor<2>) -> Result<Tensor<2>, String> {
        let own = match self {
            Self::Naive => Own::Naive,
            Self::Tiled => Own::Tiled,
            Self::FirstRow => Own::FirstRow,
            Self::Zeros => Own::Zeros,
            Self::Product(family) => {
                let run = || policy::force(Implementation::Fused, || tril_matmul(a, b));
                return tile::force(family, run).map_err(|e| e.to_string());
            }
        };
        Ok(kernels::run(a, b, own))
    }
}

/// What was found of a rung.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    /// Its name.
    pub rung: String,
    /// Whether it is there to be convicted.
    pub cheats: bool,
    /// Right on numbers that a reference has just been run on: what a careless test asks.
    pub right_on_stale_answers: bool,
    /// Right when it runs first.
    pub right_first: bool,
    /// Right after a reference on other numbers.
    pub right_after_reference: bool,
    /// Elements of the output that were never written.
    pub unwritten: usize,
    /// Row and column of the first of them.
    pub first_unwritten: Option<[usize; 2]>,
    /// Row and column of the last of them.
    pub last_unwritten: Option<[usize; 2]>,
    /// Bytes written outside the output.
    pub outside: usize,
    /// The larger relative error of the two orders; none if results were not finite.
    pub error: Option<f64>,
    /// Median device time of a call in microseconds; worth nothing if the rung is convicted.
    pub us: f64,
}

impl Step {
    /// What it is convicted of; nothing if it passes.
    pub fn charges(&self) -> Vec<&'static str> {
        let charges = [
            (self.unwritten > 0, "leaves its output unwritten"),
            (self.outside > 0, "writes outside its output"),
            (!self.right_first && !self.right_after_reference, "wrong in both orders"),
            (!self.right_first && self.right_after_reference, "wrong when it runs first"),
            (self.right_first && !self.right_after_reference, "wrong after a reference"),
        ];
        let mut charges: Vec<_> =
            charges.into_iter().filter(|(guilty, _)| *guilty).map(|(_, charge)| charge).collect();
        if self.right_on_stale_answers && !charges.is_empty() {
            charges.push("returns the reference's answer from freed memory");
        }
        charges
    }

    /// Whether it may be believed.
    pub fn passes(&self) -> bool {
        self.charges().is_empty()
    }
}

/// A climb.
#[derive(Debug, Clone, Serialize)]
pub struct Ladder {
    /// Device: `cuda:0`, `wgpu`.
    pub device: String,
    /// The part's name.
    pub gpu: String,
    /// Day, UTC.
    pub date: String,
    /// The command that made it.
    pub command: String,
    /// Element type.
    pub dtype: String,
    /// Side of the matrices.
    pub size: usize,
    /// The rungs.
    pub steps: Vec<Step>,
}

impl Ladder {
    /// Whether all honest rungs pass and all cheats are convicted.
    pub fn as_expected(&self) -> bool {
        self.steps.iter().all(|step| step.passes() != step.cheats)
    }
}

/// Tries every rung on matrices of side `n`. The audit sees every kernel output of the process: run
/// nothing beside it.
///
/// # Errors
///
/// One line if the device has no kernels or not this element type, `n` is out of range, or the
/// device fails.
pub fn climb(
    device: &Device,
    dtype: DType,
    n: usize,
    command: String,
    note: &mut dyn FnMut(&str),
) -> Result<Ladder, String> {
    let name = device::name(device);
    if !device::is_cube(device) {
        return Err(format!("the ladder is made of kernels: cuda, wgpu or vulkan, not {name}"));
    }
    if !device.supports_dtype(dtype) {
        return Err(format!("{name} does not have {dtype:?}"));
    }
    if !SIZES.contains(&n) {
        return Err(format!("size is {n}, must be from {} to {}", SIZES.start(), SIZES.end()));
    }
    let run = crate::bench::Run::new(device, command);
    let mut climber = Climber { device, dtype, n, rng: ChaCha8Rng::seed_from_u64(11) };
    let mut steps = vec![];
    for rung in Rung::all(device, dtype) {
        note(&rung.name());
        steps.push(climber.step(rung)?);
    }
    let dtype = format!("{dtype:?}").to_lowercase();
    let crate::bench::Run { device, gpu, date, command, .. } = run;
    Ok(Ladder { device, gpu, date, command, dtype, size: n, steps })
}

struct Climber<'a> {
    device: &'a Device,
    dtype: DType,
    n: usize,
    rng: ChaCha8Rng,
}

/// Two lower triangles, and what their product makes of a vector.
struct Data {
    a: Tensor<2>,
    b: Tensor<2>,
    direction: Vec<f64>,
    expected: Vec<f64>,
}

impl Data {
    /// The reference: the triangles are stored with their zeros, so it is one product.
    fn reference(&self) -> Tensor<2> {
        self.a.clone().matmul(self.b.clone())
    }

    /// How far a result is off.
    fn distance(&self, y: Tensor<2>) -> Result<Distance, String> {
        let y = crate::host::download(&y)?;
        Ok(distance(&along(&y, &self.direction), &self.expected))
    }
}

/// M·v.
fn along(matrix: &[f64], v: &[f64]) -> Vec<f64> {
    matrix.chunks(v.len()).map(|row| row.iter().zip(v).map(|(m, v)| m * v).sum()).collect()
}

impl Climber<'_> {
    /// Numbers that no memory of the device holds the answer for.
    fn fresh(&mut self) -> Result<Data, String> {
        let (n, random) = ([self.n, self.n], Distribution::Normal(0.1, 1.0));
        let triangle = || Tensor::<2>::random(n, random, (self.device, self.dtype)).tril(0);
        let (a, b) = (triangle(), triangle());
        let direction = crate::host::HostTensor::normal(&[self.n], 0.0, &mut self.rng).values;
        let expected =
            along(&crate::host::download(&a)?, &along(&crate::host::download(&b)?, &direction));
        Ok(Data { a, b, direction, expected })
    }

    fn step(&mut self, rung: Rung) -> Result<Step, String> {
        let run = |data: &Data| rung.run(data.a.clone(), data.b.clone());
        // First: nothing but the kernel has seen these numbers.
        let data = self.fresh()?;
        let first = data.distance(run(&data)?)?;

        // The reference first, on numbers of its own.
        let other = self.fresh()?;
        let data = self.fresh()?;
        self.leave_answers(&other)?;
        let after = data.distance(run(&data)?)?;

        // What a careless test asks: the reference first, on the same numbers.
        self.leave_answers(&data)?;
        let stale = data.distance(run(&data)?)?;

        let found = self.audit(|| data.distance(run(&data)?).map(drop))?;
        let right = |distance: &Distance| distance.within(self.dtype, 1);
        let position = |flat: usize| [flat / self.n, flat % self.n];
        let finite = first.not_finite + after.not_finite == 0;
        Ok(Step {
            rung: rung.name(),
            cheats: rung.cheats(),
            right_on_stale_answers: right(&stale),
            right_first: right(&first),
            right_after_reference: right(&after),
            unwritten: found.unwritten,
            first_unwritten: found.first_unwritten.map(position),
            last_unwritten: found.last_unwritten.map(position),
            outside: found.guard_bytes,
            error: finite.then(|| first.relative.max(after.relative)),
            us: self.time(&|| run(&data).map(drop))?,
        })
    }

    /// Runs the reference and frees what it returned: the pool hands that memory to whoever asks
    /// next.
    fn leave_answers(&self, data: &Data) -> Result<(), String> {
        let answers: Vec<_> = (0..ANSWERS).map(|_| data.reference()).collect();
        for answer in answers.iter().map(|answer| answer.clone().slice([0..1, 0..1])) {
            crate::host::download(&answer)?;
        }
        self.device.sync().map_err(|e| format!("{e:?}"))
    }

    /// What an audit finds of the one output of `run`.
    fn audit(&self, run: impl FnOnce() -> Result<(), String>) -> Result<Finding, String> {
        // What was put off is not this run's.
        self.device.sync().map_err(|e| format!("{e:?}"))?;
        let audit = Audit::begin();
        let result = run();
        let findings = audit.finish();
        result?;
        let finding = findings.into_iter().find(|finding| finding.op == OP);
        finding.ok_or_else(|| "the audit saw no output".into())
    }

    /// Median device time of a call in microseconds.
    fn time(&self, call: &(impl Fn() -> Result<(), String> + Sync)) -> Result<f64, String> {
        let burst = |calls: usize| {
            let (result, time) = timer::time(self.device, || (0..calls).try_for_each(|_| call()))?;
            result.map(|()| time / calls as f64)
        };
        burst(1)?;
        let (seconds, bursts) = BURST;
        let calls = ((seconds / burst(1)?.max(1e-7)).ceil() as usize).clamp(1, 500);
        let recorded = timer::Recording::new(self.device, || {
            // What fails here has failed in the burst before.
            let _ = (0..calls).try_for_each(|_| call());
        });
        let mut times = vec![];
        for _ in 0..bursts {
            times.push(match &recorded {
                // SAFETY: the caller's inputs outlive this function.
                Some((recording, ())) => unsafe { recording.time(self.device, 1) }? / calls as f64,
                None => burst(calls)?,
            });
        }
        times.sort_by(f64::total_cmp);
        Ok(1e6 * times[bursts / 2])
    }
}
