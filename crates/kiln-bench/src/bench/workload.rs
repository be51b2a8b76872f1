//! What is timed: one pass of an operator over rotating inputs.

use super::data::{Data, Maker, Part, parts};
use super::{Pass, launches, timer};
use crate::attributes::Attributes;
use crate::gate;
use crate::host::{self, Input};
use crate::operator::with_saved;
use crate::registry::{Call, Case, Operator};
use crate::spot::Spot;
use burn::tensor::{DType, Device, Gradients, Tensor};
use kiln_ops::oracle::Rounding;
use kiln_ops::policy::{self, Implementation};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Memory that the inputs rotate through: many times the largest caches.
const ROTATED: f64 = 1e9;
/// Most sets of inputs on CUDA, where those of the smallest shapes are still more than the L2 cache holds, and
/// elsewhere.
const SETS: [usize; 2] = [4096, 16];
/// Seconds of a burst: opening and closing the clock's window costs some 0.3 ms. Recorded calls are repeated to
/// fill it.
const BURST: f64 = 30e-3;
/// Most calls of a burst for its length; a burst that goes once through all sets may have more.
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
    /// Inputs, without autodiff.
    sets: Vec<Vec<Input>>,
    /// Cotangents, without autodiff.
    cotangents: Vec<Tensor<1>>,
    /// Inputs and what the forward keeps, where the operator's backward kernels can be called on them.
    kernels: Option<Vec<Vec<Input>>>,
    bytes: f64,
    /// Calls of a burst of the reference and of the kernel.
    calls: [AtomicUsize; 2],
    /// Their calls as the device recorded them, where it can.
    #[cfg(feature = "cube")]
    recordings: [std::sync::OnceLock<Option<Recorded>>; 2],
}

/// The calls of a burst as the device recorded them.
#[cfg(feature = "cube")]
struct Recorded {
    recording: timer::Recording,
    /// How many times they fill a burst.
    times: usize,
    /// What the last of them leaves.
    left: Left,
}

/// What a call left.
#[derive(Clone, Default)]
struct Left {
    outputs: Vec<Tensor<1>>,
    /// Of the float inputs.
    gradients: Vec<Tensor<2>>,
    /// What the backward kernels returned.
    kernels: Option<Vec<Tensor<2>>>,
}

/// What is checked of a call: outputs, gradients of the float inputs, or both, as the pass has them.
#[derive(Clone, Debug, Default)]
pub(super) struct Results {
    pub(super) outputs: Vec<Tensor<1>>,
    pub(super) gradients: Vec<Tensor<1>>,
}

/// What a single warm call told.
pub(super) struct Extra {
    pub(super) launches: Option<u64>,
    pub(super) peak_mib: Option<f64>,
}

/// A scalar whose backward is the pass, and the leaves that get the gradients.
pub(super) struct Graph {
    pub(super) root: Tensor<1>,
    pub(super) leaves: Vec<Input>,
    /// The outputs, where they are asked for.
    outputs: Vec<Tensor<1>>,
}

/// Results that must be seen until the end of a burst: Burn's fusion leaves out operations whose result nobody
/// can see any more.
#[derive(Default)]
struct Kept {
    tensors: Vec<Tensor<1>>,
    gradients: Vec<Gradients>,
    /// Of the last call, always.
    left: Left,
}

impl<'a> Workload<'a> {
    pub(super) fn new(
        op: &'a dyn Operator,
        case: &Case,
        dtype: DType,
        device: &'a Device,
        pass: Pass,
        bytes: f64,
        data: Option<&Data>,
    ) -> Result<Self, String> {
        let parts = parts(op, case)?;
        let (inputs, outputs) = parts.split_at(op.spec().inputs.len());
        let most = SETS[usize::from(!kiln_ops::device::is_cuda(device))];
        let count = ((ROTATED / bytes.max(1.0)).ceil() as usize).clamp(1, most);
        let mut maker = Maker::new(data, dtype, device, count);
        let mut sets: Vec<Vec<Input>> = vec![];
        for turn in 0..count {
            sets.push(inputs.iter().map(|part| maker.input(part, turn)).collect());
        }
        let outputs: &[Part] = if pass == Pass::Forward { &[] } else { outputs };
        let cotangents: Vec<_> = outputs.iter().map(|part| maker.cotangent(part)).collect();
        let attributes = case.attributes(op.spec())?;
        let mut kernels = None;
        if pass == Pass::Backward && kiln_ops::device::is_cube(device) {
            let inputs = |set: &Vec<Input>| with_saved(op, set.clone(), &attributes);
            let sets: Vec<Vec<_>> = sets.iter().map(inputs).collect();
            let call = Call { inputs: &sets[0], attributes: &attributes };
            if op.backward_kernels(&call, &cotangents).is_some() {
                kernels = Some(sets);
            }
        }
        // What is made lazily is made now, not inside the first timed call.
        device.sync().map_err(|e| format!("{e:?}"))?;
        Ok(Self {
            op,
            device,
            pass,
            attributes,
            sets,
            cotangents,
            kernels,
            bytes,
            calls: Default::default(),
            #[cfg(feature = "cube")]
            recordings: Default::default(),
        })
    }

    fn run(&self, inputs: &[Input], on: Implementation) -> Result<Vec<Tensor<1>>, String> {
        let call = Call { inputs, attributes: &self.attributes };
        let outputs = policy::force(on, || self.op.run(&call)).map_err(|e| e.to_string())?;
        Ok(outputs.into_iter().map(|output| output.flat).collect())
    }

    fn set(&self, turn: usize) -> &[Input] {
        &self.sets[turn % self.sets.len()]
    }

    /// What the backward kernels are timed on, if they can be called past autodiff.
    fn kernels(&self, implementation: Implementation) -> Option<&Vec<Vec<Input>>> {
        self.kernels.as_ref().filter(|_| implementation == Implementation::Fused)
    }

    /// The forward through autodiff, on leaves of its own; `seen` keeps its outputs.
    pub(super) fn graph(
        &self,
        turn: usize,
        implementation: Implementation,
        seen: bool,
    ) -> Result<Graph, String> {
        let leaves: Vec<Input> = self.set(turn).iter().map(Input::tracked).collect();
        let outputs = self.run(&leaves, implementation)?;
        let seen = if seen { outputs.clone() } else { vec![] };
        let pulls = outputs.into_iter().zip(&self.cotangents).map(|(y, dy)| match dy.dims() {
            // The cotangent of a loss is 1.
            [1] => y,
            _ => pull(y, dy.clone().autodiff()),
        });
        let root = pulls.reduce(|a, b| a.cast(DType::F32) + b.cast(DType::F32));
        Ok(Graph { root: root.ok_or("no output")?, leaves, outputs: seen })
    }

    /// The call of the first set, without autodiff.
    pub(super) fn call(&self) -> Call<'_> {
        Call { inputs: self.set(0), attributes: &self.attributes }
    }

    /// Whether the backward is walked through graphs that are made before.
    fn waits(&self, implementation: Implementation) -> bool {
        self.pass == Pass::Backward && self.kernels(implementation).is_none()
    }

    /// Whether results are kept until the end of a burst. A kernel of ours always runs, and the launch count
    /// shows it; what Burn does beside it under autodiff need not.
    fn keeps(&self, implementation: Implementation) -> bool {
        let kernels_alone = self.pass == Pass::Forward || self.kernels(implementation).is_some();
        implementation != Implementation::Fused || !kernels_alone
    }

    /// Makes `calls` calls.
    fn make(&self, calls: usize, implementation: Implementation) -> Result<Kept, String> {
        let mut kept = Kept::default();
        for turn in 0..calls {
            let last = turn + 1 == calls;
            match (self.pass, self.kernels(implementation)) {
                (Pass::Forward, _) => {
                    let outputs = self.run(self.set(turn), implementation)?;
                    if last {
                        kept.left.outputs = outputs.clone();
                    }
                    if self.keeps(implementation) {
                        kept.tensors.extend(outputs);
                    }
                }
                (_, Some(sets)) => {
                    let inputs = &sets[turn % sets.len()];
                    let call = Call { inputs, attributes: &self.attributes };
                    let gradients = self.op.backward_kernels(&call, &self.cotangents);
                    if last {
                        kept.left.kernels = gradients;
                    }
                }
                (_, None) => {
                    let graph = self.graph(turn, implementation, last)?;
                    let gradients = graph.root.backward();
                    if last {
                        kept.left.gradients = host::gradients(&graph.leaves, &gradients)?;
                        kept.left.outputs = graph.outputs.into_iter().map(Tensor::inner).collect();
                    }
                    kept.gradients.push(gradients);
                    kept.tensors.push(graph.root.inner());
                }
            }
        }
        Ok(kept)
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
    ) -> Result<(f64, u64, Left), String> {
        if !self.waits(implementation) {
            let (outcome, launches) = timed(self.device, || self.make(calls, implementation));
            let (kept, time) = outcome?;
            return Ok((time, launches / calls as u64, kept.left));
        }
        let graphs = (0..calls).map(|turn| self.graph(turn, implementation, false));
        let graphs = graphs.collect::<Result<Vec<_>, _>>()?;
        let leaves = graphs.last().map(|graph| graph.leaves.clone());
        let walk = |graph: Graph| graph.root.backward();
        let (outcome, launches) =
            timed(self.device, || Ok(graphs.into_iter().map(walk).collect::<Vec<_>>()));
        let (walked, time) = outcome?;
        let (leaves, gradients) = leaves.zip(walked.last()).ok_or("there was no call")?;
        let left = Left { gradients: host::gradients(&leaves, gradients)?, ..Left::default() };
        Ok((time, launches / calls as u64, left))
    }

    /// Compiles, counts launches and memory of one call, and settles the number of calls of a burst.
    pub(super) fn warm_up(&self, implementation: Implementation) -> Result<Extra, String> {
        for _ in 0..2 {
            self.time(1, implementation)?;
        }
        self.device.memory_cleanup();
        let before = self.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let allocated = launches::allocated();
        let (_, launches, _) = self.measure(1, implementation)?;
        let allocated = launches::allocated() - allocated;
        let after = self.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let grown = before.zip(after).map(|(before, after)| after.saturating_sub(before));
        let few = self.time(3, implementation)? / 3.0;
        // A burst that went through a part of the sets would find that part in the cache.
        let calls = ((BURST / few.max(1e-7)).ceil() as usize).min(CALLS).max(self.sets.len());
        let most = match self.keeps(implementation) {
            true => (KEPT / self.bytes.max(1.0)) as usize,
            false => calls,
        };
        // Graphs that wait for their backward make autodiff's bookkeeping slow.
        let most = if self.waits(implementation) { most.min(GRAPHS) } else { most };
        self.calls(implementation).store(calls.min(most).max(1), Ordering::Relaxed);
        Ok(Extra {
            launches: (launches > 0).then_some(launches),
            // What Kiln's kernels take is known; of Burn's the pool tells, if it did not have it before.
            peak_mib: grown.map(|grown| grown.max(allocated) as f64 / 1048576.0),
        })
    }

    /// The calls of a burst, recorded. Not where graphs wait: walking a graph uses it up and frees what it
    /// holds, which a replay would then read from memory that has become something else.
    #[cfg(feature = "cube")]
    fn record(&self, implementation: Implementation) -> Option<Recorded> {
        if self.waits(implementation) {
            return None;
        }
        let calls = self.calls(implementation).load(Ordering::Relaxed);
        let make = || self.make(calls, implementation);
        let (recording, kept) = timer::Recording::new(self.device, make)?;
        // What fails here has failed in the warm-up.
        let left = kept.ok()?.left;
        // SAFETY: the inputs live as long as the workload.
        let once = unsafe { recording.time(self.device, 1) }.ok()?;
        Some(Recorded { recording, times: (BURST / once.max(1e-6)).ceil() as usize, left })
    }

    /// The recorded calls of a burst; recorded where they are asked for first.
    #[cfg(feature = "cube")]
    fn recording(&self, implementation: Implementation) -> Option<&Recorded> {
        let at = usize::from(implementation == Implementation::Fused);
        self.recordings[at].get_or_init(|| self.record(implementation)).as_ref()
    }

    fn calls(&self, implementation: Implementation) -> &AtomicUsize {
        &self.calls[usize::from(implementation == Implementation::Fused)]
    }

    /// Seconds of one call, over a burst.
    pub(super) fn burst(&self, implementation: Implementation) -> Result<f64, String> {
        self.timed_burst(implementation).map(|(time, _)| time)
    }

    /// Seconds of one call, over a burst, and what its last call left.
    fn timed_burst(&self, implementation: Implementation) -> Result<(f64, Left), String> {
        let calls = self.calls(implementation).load(Ordering::Relaxed);
        #[cfg(feature = "cube")]
        if let Some(Recorded { recording, times, left }) = self.recording(implementation) {
            // SAFETY: the inputs live as long as the workload.
            let seconds = unsafe { recording.time(self.device, *times) }?;
            return Ok((seconds / (calls * times) as f64, left.clone()));
        }
        let (time, _, left) = self.measure(calls, implementation)?;
        Ok((time / calls as f64, left))
    }

    /// Makes one call under an audit: memory that a kernel does not write may hold the right answer of the call
    /// before.
    pub(super) fn audit(&self, implementation: Implementation) -> Result<(), String> {
        let (made, gate::Audited { errors, .. }) = gate::audited(self.device, false, || {
            let made = self.make(1, implementation)?;
            self.device.sync().map_err(|e| format!("{e:?}"))?;
            Ok::<_, String>(made)
        });
        made?;
        errors.into_iter().next().map_or(Ok(()), |(_, what)| Err(what))
    }

    /// Runs the burst that is timed, and returns what its last call left.
    pub(super) fn results(&self, implementation: Implementation) -> Result<Results, String> {
        let (_, Left { outputs, gradients, kernels }) = self.timed_burst(implementation)?;
        let gradients = match kernels.zip(self.kernels(implementation)) {
            Some((kernels, sets)) => {
                let inputs = &sets[self.last(implementation) % sets.len()];
                let call = Call { inputs, attributes: &self.attributes };
                self.op.gradients(&call, &self.cotangents, kernels)
            }
            None => gradients.into_iter().map(|gradient| gradient.flatten(0, 1)).collect(),
        };
        Ok(Results { outputs, gradients })
    }

    /// The last call of a burst.
    fn last(&self, implementation: Implementation) -> usize {
        self.calls(implementation).load(Ordering::Relaxed) - 1
    }

    /// Checks what the last call of a burst left.
    pub(super) fn check(
        &self,
        implementation: Implementation,
        rounding: Rounding,
        results: &Results,
    ) -> Result<(), String> {
        let Results { outputs, gradients } = results;
        let inputs = self.set(self.last(implementation));
        for (results, cotangents) in [(outputs, &[][..]), (gradients, &self.cotangents[..])] {
            if results.is_empty() {
                continue;
            }
            let call = Call { inputs, attributes: &self.attributes };
            self.op.spot(&Spot::new(self.op.spec(), call, cotangents, results, rounding)?)?;
        }
        match outputs.is_empty() && gradients.is_empty() {
            true => Err("not checked: it left nothing".into()),
            false => Ok(()),
        }
    }

    /// Whether bursts are recorded; known after the first.
    pub(super) fn recorded(&self, implementation: Implementation) -> bool {
        #[cfg(feature = "cube")]
        {
            let at = usize::from(implementation == Implementation::Fused);
            matches!(self.recordings[at].get(), Some(Some(_)))
        }
        #[cfg(not(feature = "cube"))]
        {
            let _ = implementation;
            false
        }
    }
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

#[cfg(feature = "cube")]
fn pull(y: Tensor<1>, dy: Tensor<1>) -> Tensor<1> {
    if kiln_ops::device::is_cube(&y.device()) {
        return super::pull::pull(y, dy);
    }
    host::weighted(y, dy)
}

#[cfg(not(feature = "cube"))]
fn pull(y: Tensor<1>, dy: Tensor<1>) -> Tensor<1> {
    host::weighted(y, dy)
}
