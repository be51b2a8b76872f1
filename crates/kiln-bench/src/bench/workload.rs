//! What is timed: one pass of an operator over rotating inputs.

use super::{Pass, launches, timer};
use crate::attributes::Attributes;
use crate::host::{HostTensor, Input};
use crate::registry::{Call, Case, Holds, Operator};
use burn::tensor::{DType, Device, Distribution, Tensor};
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
    recordings: [std::sync::OnceLock<Option<timer::Recording>>; 2],
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
            let with_saved = |set: &Vec<Input>| -> Vec<Input> {
                let inputs: Vec<_> = set.iter().map(Input::inner).collect();
                let saved = op.saved(&Call { inputs: &inputs, attributes: &attributes });
                inputs.into_iter().chain(saved.into_iter().map(Input::of)).collect()
            };
            let sets: Vec<Vec<_>> = sets.iter().map(with_saved).collect();
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

    /// Seconds of `calls` calls.
    fn time(&self, calls: usize, implementation: Implementation) -> Result<f64, String> {
        self.measure(calls, implementation).map(|(time, _)| time)
    }

    /// Seconds of `calls` calls, and the kernels that each of them launched.
    fn measure(&self, calls: usize, implementation: Implementation) -> Result<(f64, u64), String> {
        let (outcome, launches) = match self.pass {
            Pass::Forward => timed(self.device, || {
                let mut kept = vec![];
                for turn in 0..calls {
                    let outputs = self.forward(turn, implementation)?;
                    if keeps(implementation) {
                        kept.push(outputs);
                    }
                }
                Ok(kept)
            }),
            Pass::Backward if let Some((sets, cotangents)) = self.kernels(implementation) => {
                timed(self.device, || {
                    for turn in 0..calls {
                        let inputs = &sets[turn % sets.len()];
                        let call = Call { inputs, attributes: &self.attributes };
                        let _ = self.op.backward_kernels(&call, cotangents);
                    }
                    Ok(())
                })
            }
            Pass::Backward => {
                let graphs = (0..calls).map(|turn| self.graph(turn, implementation));
                let graphs = graphs.collect::<Result<Vec<_>, _>>()?;
                timed(self.device, || {
                    let mut kept = vec![];
                    for graph in graphs {
                        let gradients = graph.backward();
                        if keeps(implementation) {
                            kept.push(gradients);
                        }
                    }
                    Ok(kept)
                })
            }
        };
        Ok((outcome?, launches / calls as u64))
    }

    /// Compiles, counts launches and memory of one call, and settles the number of calls of a burst.
    pub(super) fn warm_up(&self, implementation: Implementation) -> Result<Extra, String> {
        for _ in 0..2 {
            self.time(1, implementation)?;
        }
        self.device.memory_cleanup();
        let before = self.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let (_, launches) = self.measure(1, implementation)?;
        let after = self.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let few = self.time(3, implementation)? / 3.0;
        let calls = (BURST / few.max(1e-7)).ceil() as usize;
        // Graphs that wait for their backward make autodiff's bookkeeping slow.
        let graphs = self.pass == Pass::Backward && self.kernels(implementation).is_none();
        let most = match keeps(implementation) {
            true => (KEPT / self.bytes.max(1.0)) as usize,
            false => CALLS,
        };
        let most = if graphs { most.min(GRAPHS) } else { most };
        self.calls(implementation).store(calls.min(most).clamp(1, CALLS), Ordering::Relaxed);
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
    fn record(&self, calls: usize, implementation: Implementation) -> Option<timer::Recording> {
        let kernels = self.kernels(implementation);
        if self.pass == Pass::Backward && kernels.is_none() {
            return None;
        }
        timer::Recording::new(self.device, || {
            let mut kept = vec![];
            for turn in 0..calls {
                match kernels {
                    Some((sets, cotangents)) => {
                        let inputs = &sets[turn % sets.len()];
                        let call = Call { inputs, attributes: &self.attributes };
                        let _ = self.op.backward_kernels(&call, cotangents);
                    }
                    None => {
                        let outputs = self.forward(turn, implementation);
                        if keeps(implementation) {
                            kept.push(outputs);
                        }
                    }
                }
            }
        })
    }

    fn calls(&self, implementation: Implementation) -> &AtomicUsize {
        &self.calls[usize::from(implementation == Implementation::Fused)]
    }

    /// Seconds of one call, over a burst.
    pub(super) fn burst(&self, implementation: Implementation) -> Result<f64, String> {
        let calls = self.calls(implementation).load(Ordering::Relaxed);
        #[cfg(feature = "cube")]
        {
            let at = usize::from(implementation == Implementation::Fused);
            let recording = self.recordings[at].get_or_init(|| self.record(calls, implementation));
            if let Some(recording) = recording {
                // SAFETY: the inputs live as long as the workload.
                return Ok(unsafe { recording.time(self.device) }? / calls as f64);
            }
        }
        Ok(self.time(calls, implementation)? / calls as f64)
    }
}

/// Seconds of what `work` queues, and the kernels that were launched until it was done.
fn timed<T>(
    device: &Device,
    work: impl FnOnce() -> Result<T, String> + Send,
) -> (Result<f64, String>, u64)
where
    T: Send,
{
    launches::count(|| {
        let (outcome, time) = timer::time(device, work)?;
        outcome.map(|_| time)
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
