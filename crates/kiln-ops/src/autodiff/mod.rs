//! Operations with hand-written gradients: one frame for all of them.
//!
//! The forward of an operation runs on the inner backend and returns its outputs together with its
//! backward, a closure that holds what it needs of the forward. Inputs that it reads again are named:
//! they are checkpointed, so that gradient checkpointing goes on working.
//!
//! Burn's autodiff gives a node one output. With several, a hub node holds the parents, and each
//! output is a leg: a node whose only parent is the hub and whose backward leaves its gradient in a
//! slot. The first leg to run wakes the hub with a dummy gradient, and the hub runs after all legs
//! because the tape goes by depth; it finds the slots of the outputs that were used filled.

mod list;
mod maybe;

#[cfg(all(test, feature = "flex"))]
mod tests;

pub(crate) use list::in_lists;
pub use list::{List, ListMetadata, MOST};
pub(crate) use maybe::maybe;
pub use maybe::{Maybe, MaybeMetadata};

use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Autodiff, AutodiffBackend, Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use std::fmt::{Debug, Formatter};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A backward: from the cotangents `Y` and the `K` inputs that were kept to the gradients of all `N`
/// inputs. One that is needed and not given is zero, one that is not needed is dropped.
pub(crate) trait Grad<B: Backend, Y, const N: usize, const K: usize>:
    FnOnce(Y, [FloatTensor<B>; K]) -> [Maybe<B>; N] + Clone + Send + 'static
{
}

impl<B: Backend, Y, F, const N: usize, const K: usize> Grad<B, Y, N, K> for F where
    F: FnOnce(Y, [FloatTensor<B>; K]) -> [Maybe<B>; N] + Clone + Send + 'static
{
}

/// Makes operations of the graph, under a strategy of checkpointing.
pub(crate) struct Graph<C>(PhantomData<C>);

impl<C: CheckpointStrategy> Graph<C> {
    /// The output of an operation on `inputs` whose backward reads those of them that are `kept`.
    ///
    /// `forward` takes the inputs, and for each whether somebody needs its gradient; it returns the
    /// output and the backward.
    pub(crate) fn output<B: Backend, G, const N: usize, const K: usize>(
        inputs: [FloatTensor<Autodiff<B, C>>; N],
        kept: [usize; K],
        forward: impl FnOnce([FloatTensor<B>; N], [bool; N]) -> (FloatTensor<B>, G),
    ) -> FloatTensor<Autodiff<B, C>>
    where
        G: Grad<B, FloatTensor<B>, N, K>,
    {
        let [y] = Self::outputs(inputs, kept, |inputs, wanted| {
            let (y, grad) = forward(inputs, wanted);
            let grad = |[dy]: [Maybe<B>; 1], kept: [FloatTensor<B>; K]| {
                grad(dy.expect("a node with one output runs on its gradient"), kept)
            };
            ([y], grad)
        });
        y
    }

    /// As [`output`](Self::output) with `M` outputs; one that nothing depends on has no cotangent.
    pub(crate) fn outputs<B: Backend, G, const M: usize, const N: usize, const K: usize>(
        inputs: [FloatTensor<Autodiff<B, C>>; N],
        kept: [usize; K],
        forward: impl FnOnce([FloatTensor<B>; N], [bool; N]) -> ([FloatTensor<B>; M], G),
    ) -> [FloatTensor<Autodiff<B, C>>; M]
    where
        G: Grad<B, [Maybe<B>; M], N, K>,
    {
        let nodes = inputs.each_ref().map(|input| input.node());
        let wanted = inputs.each_ref().map(|input| input.is_tracked());
        let like = inputs.each_ref().map(|input| (input.shape(), input.dtype()));
        match Node::<Of<G>, M, K>(PhantomData).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let kept = kept.map(|i| prep.checkpoint(&inputs[i]));
                let (outputs, grad) = forward(inputs.map(|input| input.into_primitive()), wanted);
                let slots: Option<Slots<B, M>> = (M > 1).then(Slots::default);
                let state = State { kept, like, slots: slots.clone(), grad };
                let node = prep.finish(state, outputs[0].clone());
                let Some(slots) = slots else { return outputs.map(|_| node.clone()) };
                let mut number = 0..;
                outputs.map(|output| {
                    let state = (number.next().unwrap_or_default(), slots.clone());
                    match Leg::<M>.prepare::<C>([node.node()]).compute_bound().stateful() {
                        OpsKind::Tracked(prep) => prep.finish(state, output),
                        OpsKind::UnTracked(prep) => prep.finish(output),
                    }
                })
            }
            OpsKind::UnTracked(_) => {
                let (outputs, _) = forward(inputs.map(|input| input.into_primitive()), wanted);
                outputs.map(<Autodiff<B, C> as AutodiffBackend>::from_inner)
            }
        }
    }
}

/// Cotangents that the legs leave for the hub.
struct Slots<B: Backend, const M: usize>(Arc<Mutex<[Maybe<B>; M]>>);

impl<B: Backend, const M: usize> Default for Slots<B, M> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new([const { Maybe::None }; M])))
    }
}

impl<B: Backend, const M: usize> Clone for Slots<B, M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Backend, const M: usize> Debug for Slots<B, M> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("Slots")
    }
}

impl<B: Backend, const M: usize> Slots<B, M> {
    fn lock(&self) -> MutexGuard<'_, [Maybe<B>; M]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a node keeps.
#[derive(Clone)]
struct State<B: Backend, G, const M: usize, const N: usize, const K: usize> {
    kept: [NodeId; K],
    /// Shapes and element types of the inputs.
    like: [(Shape, DType); N],
    /// Where the cotangents are if there are several.
    slots: Option<Slots<B, M>>,
    grad: G,
}

impl<B: Backend, G, const M: usize, const N: usize, const K: usize> Debug for State<B, G, M, N, K> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("kept", &self.kept).finish_non_exhaustive()
    }
}

/// Stands for a closure in the type of a node, which is made before the forward returns its backward.
type Of<G> = PhantomData<fn() -> G>;

/// The node of an operation.
#[derive(Debug)]
struct Node<G, const M: usize, const K: usize>(G);

impl<B: Backend, G, const M: usize, const N: usize, const K: usize> Backward<B, N>
    for Node<Of<G>, M, K>
where
    G: Grad<B, [Maybe<B>; M], N, K>,
{
    type State = State<B, G, M, N, K>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let device = dy.device();
        let State { kept, like, slots, grad } = ops.state;
        // Nobody else may hold a cotangent here: a kernel may take its memory.
        let cotangents = match slots {
            Some(slots) => {
                drop(dy); // the dummy
                std::mem::replace(&mut *slots.lock(), [const { Maybe::None }; M])
            }
            None => {
                let mut dy = Some(dy);
                std::array::from_fn(|_| dy.take().into())
            }
        };
        let kept = kept.map(|node| checkpointer.retrieve_node_output(node));
        let gradients = grad(cotangents, kept);
        for ((parent, gradient), (shape, dtype)) in ops.parents.into_iter().zip(gradients).zip(like)
        {
            let Some(parent) = parent else { continue };
            // The tape goes on through every parent that needs a gradient, if only with zeros.
            let zeros = || B::float_zeros(shape, &device, dtype.into());
            grads.register::<B>(parent.id, gradient.option().unwrap_or_else(zeros));
        }
    }
}

/// One of several outputs.
#[derive(Debug)]
struct Leg<const M: usize>;

impl<B: Backend, const M: usize> Backward<B, 1> for Leg<M> {
    type State = (usize, Slots<B, M>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (output, slots) = ops.state;
        let [hub] = ops.parents;
        let mut slots = slots.lock();
        let first = slots.iter().all(|slot| matches!(slot, Maybe::None));
        slots[output] = Maybe::Some(gradient.clone());
        drop(slots);
        if let (true, Some(hub)) = (first, hub) {
            grads.register::<B>(hub.id, gradient);
        }
    }
}

/// The last two dimensions swapped, as a view.
pub(crate) fn transposed<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let rank = tensor.shape().num_dims();
    B::float_swap_dims(tensor, rank - 2, rank - 1)
}
