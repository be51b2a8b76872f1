//! What is timed: one pass of an operator over rotating inputs.

use super::{Pass, launches, timer};
use crate::attributes::Attributes;
use crate::host::{self, HostTensor, Input};
use crate::operator::with_saved;
use crate::registry::{Call, Case, Holds, Operator};
use crate::spot::Spot;
use burn::tensor::{DType, Device, Distribution, Gradients, Tensor};
use kiln_ops::oracle::Rounding;
use kiln_ops::policy::{self, Implementation};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Memory that the inputs rotate through: many times the largest caches.
const ROTATED: f64 = 1e9;
/// Seconds of a burst: opening and closing the clock's window costs some 0.3 ms.
const BURST: f64 = 30e-3;
/// Most calls of a burst.
const CALLS: usize = 500;
/// Most graphs that wait for a timed backward.
const GRAPHS: usize = 20;
/// Memory that results which are kept until the end of a burst may take.
const KEPT: f64 = 8e9;

pub(super) struct Workload<'a> {
    op: &'a dyn Operator,
    device: &'a Device,
    pass: Pass,
    attributes: Attributes,
    sets: Vec<Vec<Input>>,
    cotangents: Vec<Tensor<1>>,
    /// Inputs and cotangents without autodiff, where the operator's backward kernels can be called
    /// on them.
    plain: Option<(Vec<Vec<Input>>, Vec<Tensor<1>>)>,
    bytes: f64,
    /// Calls of a burst of the reference and of the kernel.
    calls: [AtomicUsize; 2],
    /// The bursts, where the device can record them; they end before what they read.
    #[cfg(feature = "cube")]
    recordings: [std::sync::OnceLock<Option<timer::Recording<Vec<Left>>>>; 2],
}

/// What a call left.
#[derive(Clone)]
enum Left {
    /// Its outputs, or the gradients of the float inputs.
    Results(Vec<Tensor<1>>),
    /// What the backward kernels returned.
    Kernels(Vec<Tensor<2>>),
}

/// What the last call of a burst left.
enum Last {
    Left(Left),
    /// A walk through a graph.
    Gradients(Gradients),
}

/// What a single warm call told.
pub(super) struct Extra {
    pub(super) launches: Option<u64>,
    pub(super) peak_mib: Option<f64>,
}

impl<'a> Workload<'a> {
    pub(super) fn new(
        op: &'a dyn Operator,
        case: &Case,
        dtype: DType,
        device: &'a Device,
        pass: Pass,
        bytes: f64,
    ) -> Result<Self, String> {
        let spec = op.spec();
        let dims = spec.dims(&case.shapes)?;
        let sets = ((ROTATED / bytes.max(1.0)).ceil() as usize).clamp(1, 16);
        let backward = pass == Pass::Backward;
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let mut set = || -> Vec<Input> {
            let inputs =
                spec.inputs.iter().zip(&case.shapes).map(|(input, shape)| match input.holds {
                    Holds::Classes(dim) => {
                        let classes = dims[dim][0];
                        let n = shape.iter().product();
                        let values = (0..n).map(|_| rng.random_range(0..classes) as f64).collect();
                        Input::int(&HostTensor::new(shape.as_slice(), values), backward, device)
                    }
                    holds => {
                        let dtype = if holds == Holds::F32 { DType::F32 } else { dtype };
                        random(shape, input.mean, dtype, backward, device)
                    }
                });
            inputs.collect()
        };
        let sets: Vec<Vec<Input>> = (0..sets).map(|_| set()).collect();
        let cotangents: Vec<Tensor<1>> = if backward {
            let outputs = spec.outputs.iter().map(|output| {
                let dtype = if output.f32 { DType::F32 } else { dtype };
                let n = spec.output_shape(output, &dims).iter().product::<usize>();
                Tensor::<1>::random([n], Distribution::Normal(0.1, 1.0), (device, dtype)).autodiff()
            });
            outputs.collect()
        } else {
            vec![]
        };
        let attributes = case.attributes(spec)?;
        let calls = [AtomicUsize::new(1), AtomicUsize::new(1)];
        let mut plain = None;
        if backward && kiln_ops::device::is_cube(device) {
            let inner: Vec<_> = cotangents.iter().map(|t| t.clone().inner()).collect();
            let plain_of = |set: &Vec<Input>| -> Vec<Input> {
                with_saved(op, set.iter().map(Input::inner).collect(), &attributes)
            };
            let sets: Vec<Vec<_>> = sets.iter().map(plain_of).collect();
            let call = Call { inputs: &sets[0], attributes: &attributes };
            if op.backward_kernels(&call, &inner).is_some() {
                plain = Some((sets, inner));
            }
        }
        Ok(Self {
            op,
            device,
            pass,
            attributes,
            sets,
            cotangents,
            plain,
            bytes,
            calls,
            #[cfg(feature = "cube")]
            recordings: Default::default(),
        })
    }

    fn forward(
        &self,
        turn: usize,
        implementation: Implementation,
    ) -> Result<Vec<Tensor<1>>, String> {
        let call = self.call(turn);
        policy::force(implementation, || self.op.run(&call)).map_err(|e| e.to_string())
    }

    fn call(&self, turn: usize) -> Call<'_> {
        Call { inputs: &self.sets[turn % self.sets.len()], attributes: &self.attributes }
    }

    /// What the backward kernels are timed on, if they can be called past autodiff.
    fn kernels(
        &self,
        implementation: Implementation,
    ) -> Option<&(Vec<Vec<Input>>, Vec<Tensor<1>>)> {
        self.plain.as_ref().filter(|_| implementation == Implementation::Fused)
    }

    /// The scalar whose backward is the pass.
    fn graph(&self, turn: usize, implementation: Implementation) -> Result<Tensor<1>, String> {
        let outputs = self.forward(turn, implementation)?;
        let pulls = outputs.into_iter().zip(&self.cotangents).map(|(y, dy)| pull(y, dy.clone()));
        pulls
            .reduce(|a, b| a.cast(DType::F32) + b.cast(DType::F32))
            .ok_or_else(|| "no output".into())
    }

    /// Whether the pass is a walk through a graph of autodiff.
    fn walks(&self, implementation: Implementation) -> bool {
        self.pass == Pass::Backward && self.kernels(implementation).is_none()
    }

    /// A call that is no walk through a graph.
    fn run(&self, turn: usize, implementation: Implementation) -> Result<Left, String> {
        let Some((sets, cotangents)) = self.kernels(implementation) else {
            return self.forward(turn, implementation).map(Left::Results);
        };
        let call = Call { inputs: &sets[turn % sets.len()], attributes: &self.attributes };
        let kernels = self.op.backward_kernels(&call, cotangents);
        kernels.map(Left::Kernels).ok_or_else(|| "there are no backward kernels".into())
    }

    /// Seconds of `calls` calls.
    fn time(&self, calls: usize, implementation: Implementation) -> Result<f64, String> {
        self.measure(calls, implementation).map(|(time, ..)| time)
    }

    /// Seconds of `calls` calls, the kernels that each of them launched, and what the last one left.
    fn measure(
        &self,
        calls: usize,
        implementation: Implementation,
    ) -> Result<(f64, u64, Last), String> {
        let (outcome, launches) = if self.walks(implementation) {
            let graphs = (0..calls).map(|turn| self.graph(turn, implementation));
            let mut graphs = graphs.collect::<Result<Vec<_>, _>>()?.into_iter();
            let walk = |_: usize| -> Result<Gradients, String> {
                Ok(graphs.next().ok_or("there is no graph")?.backward())
            };
            let (outcome, launches) = timed(self.device, || kept(calls, implementation, walk));
            (outcome.map(|(mut all, time)| (all.pop().map(Last::Gradients), time)), launches)
        } else {
            let run = |turn: usize| self.run(turn, implementation);
            let (outcome, launches) = timed(self.device, || kept(calls, implementation, run));
            (outcome.map(|(mut all, time)| (all.pop().map(Last::Left), time)), launches)
        };
        let (last, time) = outcome?;
        Ok((time, launches / calls as u64, last.ok_or("there was no call")?))
    }

    /// Compiles, counts launches and memory of one call, and settles the number of calls of a burst.
    pub(super) fn warm_up(&self, implementation: Implementation) -> Result<Extra, String> {
        for _ in 0..2 {
            self.time(1, implementation)?;
        }
        self.device.memory_cleanup();
        let before = self.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let (_, launches, _) = self.measure(1, implementation)?;
        let after = self.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let few = self.time(3, implementation)? / 3.0;
        let calls = (BURST / few.max(1e-7)).ceil() as usize;
        let most = match keeps(implementation) {
            true => (KEPT / self.bytes.max(1.0)) as usize,
            false => CALLS,
        };
        // Graphs that wait for their backward make autodiff's bookkeeping slow.
        let most = if self.walks(implementation) { most.min(GRAPHS) } else { most };
        let at = usize::from(implementation == Implementation::Fused);
        self.calls[at].store(calls.min(most).clamp(1, CALLS), Ordering::Relaxed);
        Ok(Extra {
            launches: (launches > 0).then_some(launches),
            peak_mib: before
                .zip(after)
                .map(|(before, after)| after.saturating_sub(before) as f64 / 1048576.0),
        })
    }

    /// The calls of a burst, recorded; a backward only where it is past autodiff, whose graphs are
    /// used up by walking them.
    #[cfg(feature = "cube")]
    fn record(&self, implementation: Implementation) -> Option<timer::Recording<Vec<Left>>> {
        if self.walks(implementation) {
            return None;
        }
        let calls = self.calls(implementation);
        let run = || kept(calls, implementation, |turn| self.run(turn, implementation));
        let mut recording = timer::Recording::new(self.device, || run().unwrap_or_default())?;
        // What earlier calls left only the recording needs, and it keeps that memory itself.
        let earlier = recording.results.len().checked_sub(1)?;
        recording.results.drain(..earlier);
        Some(recording)
    }

    #[cfg(feature = "cube")]
    fn recording(&self, implementation: Implementation) -> Option<&timer::Recording<Vec<Left>>> {
        let at = usize::from(implementation == Implementation::Fused);
        self.recordings[at].get_or_init(|| self.record(implementation)).as_ref()
    }

    /// Calls of a burst.
    fn calls(&self, implementation: Implementation) -> usize {
        let at = usize::from(implementation == Implementation::Fused);
        self.calls[at].load(Ordering::Relaxed)
    }

    /// Seconds of one call, over a burst.
    pub(super) fn burst(&self, implementation: Implementation) -> Result<f64, String> {
        let calls = self.calls(implementation);
        #[cfg(feature = "cube")]
        if let Some(recording) = self.recording(implementation) {
            // SAFETY: the inputs live as long as the workload.
            return Ok(unsafe { recording.time(self.device) }? / calls as f64);
        }
        Ok(self.time(calls, implementation)? / calls as f64)
    }

    /// Runs a burst, the recorded one where there is one, and returns what its last call left.
    fn last(&self, implementation: Implementation) -> Result<Last, String> {
        #[cfg(feature = "cube")]
        if let Some(recording) = self.recording(implementation) {
            self.burst(implementation)?;
            let left = recording.results.last().cloned();
            return left.map(Last::Left).ok_or_else(|| "nothing was recorded".into());
        }
        let calls = self.calls(implementation);
        self.measure(calls, implementation).map(|(.., last)| last)
    }

    /// Runs the burst that is timed once; returns the outputs of its last call, or the gradients of the
    /// float inputs.
    pub(super) fn results(
        &self,
        implementation: Implementation,
    ) -> Result<Vec<Tensor<1>>, String> {
        let last = self.last(implementation)?;
        let turn = self.calls(implementation) - 1;
        match last {
            Last::Left(Left::Results(results)) => Ok(results),
            Last::Left(Left::Kernels(kernels)) => {
                let plain = self.kernels(implementation);
                let (sets, cotangents) = plain.ok_or("there are no backward kernels")?;
                let call = Call { inputs: &sets[turn % sets.len()], attributes: &self.attributes };
                Ok(self.op.gradients(&call, cotangents, kernels))
            }
            Last::Gradients(gradients) => host::gradients(self.call(turn).inputs, &gradients),
        }
    }

    /// Checks these [`results`](Self::results).
    pub(super) fn check(
        &self,
        implementation: Implementation,
        rounding: Rounding,
        results: &[Tensor<1>],
    ) -> Result<(), String> {
        let turn = self.calls(implementation) - 1;
        let inputs: Vec<Input> = self.call(turn).inputs.iter().map(Input::inner).collect();
        let cotangents: Vec<Tensor<1>> =
            self.cotangents.iter().map(|cotangent| cotangent.clone().inner()).collect();
        let call = Call { inputs: &inputs, attributes: &self.attributes };
        self.op.spot(&Spot::new(self.op.spec(), call, &cotangents, results, rounding)?)
    }
}

/// Runs calls. Of what they leave all is kept if it must be seen until the end of a burst, else that of the last.
fn kept<T>(
    calls: usize,
    implementation: Implementation,
    mut call: impl FnMut(usize) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let mut kept = vec![];
    for turn in 0..calls {
        if !keeps(implementation) {
            // The next call takes its memory.
            kept.clear();
        }
        kept.push(call(turn)?);
    }
    Ok(kept)
}

/// What `work` returns with the seconds of what it queues, and the kernels that were launched until it was done.
fn timed<T>(
    device: &Device,
    work: impl FnOnce() -> Result<T, String> + Send,
) -> (Result<(T, f64), String>, u64)
where
    T: Send,
{
    launches::count(|| {
        let (outcome, time) = timer::time(device, work)?;
        outcome.map(|results| (results, time))
    })
}

/// Whether results must be seen until the end of a burst: Burn's fusion leaves out elementwise
/// operations that nobody can see any more. A kernel of ours always runs, and the launch count
/// shows it.
fn keeps(implementation: Implementation) -> bool {
    implementation != Implementation::Fused
}

#[cfg(feature = "cube")]
fn pull(y: Tensor<1>, dy: Tensor<1>) -> Tensor<1> {
    if kiln_ops::device::is_cube(&y.device()) {
        return super::pull::pull(y, dy);
    }
    weighted(y, dy)
}

#[cfg(not(feature = "cube"))]
fn pull(y: Tensor<1>, dy: Tensor<1>) -> Tensor<1> {
    weighted(y, dy)
}

fn weighted(y: Tensor<1>, dy: Tensor<1>) -> Tensor<1> {
    (y.cast(DType::F32) * dy.cast(DType::F32)).sum()
}

/// Normal numbers made on the device.
fn random(shape: &[usize], mean: f64, dtype: DType, gradient: bool, device: &Device) -> Input {
    let width = shape.last().copied().unwrap_or(1);
    let rows = shape.iter().product::<usize>() / width.max(1);
    let made = Tensor::<2>::random([rows, width], Distribution::Normal(mean, 1.0), (device, dtype));
    // Materialised now, not inside the first timed call.
    let _ = made.clone().slice([0..1, 0..1]).into_data();
    let leaf = if gradient { made.autodiff().require_grad() } else { made };
    Input::Float { leaf: leaf.clone(), rows: leaf, shape: shape.to_vec() }
}
