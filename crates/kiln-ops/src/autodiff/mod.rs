//! Several float outputs behind one backward; Burn's autodiff gives a node one.
//!
//! A hub node holds the parents. Each output is a leg: a node whose only parent is the hub and
//! whose backward leaves its gradient in a slot. The first leg to run wakes the hub with a dummy
//! gradient, and the hub runs after all legs because the tape goes by depth; it finds the slots of
//! the outputs that were used filled.

use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, NodeGuard, Ops, OpsKind, OpsPrep, Tracked},
};
use burn::backend::{Autodiff, AutodiffBackend, Backend, TensorMetadata, tensor::FloatTensor};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

/// The backward of an operation with `N` inputs and `K` outputs.
pub(crate) trait MultiBackward<B: Backend, const N: usize, const K: usize>:
    Send + Debug + 'static
{
    /// What the forward keeps.
    type State: Clone + Send + Debug + 'static;

    /// Registers the gradients of the parents; an output that nothing depends on has no gradient.
    fn backward(
        self,
        parents: [Option<NodeId>; N],
        state: Self::State,
        outputs: [Option<FloatTensor<B>>; K],
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    );
}

type Slots<B, const K: usize> = Arc<Mutex<[Option<FloatTensor<B>>; K]>>;

#[derive(Debug)]
pub(crate) struct Hub<T, const K: usize>(T);

impl<B: Backend, T: MultiBackward<B, N, K>, const N: usize, const K: usize> Backward<B, N>
    for Hub<T, K>
{
    type State = (T::State, Slots<B, K>);

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        grads.consume::<B>(&ops.node); // the dummy
        let (state, slots) = ops.state;
        let mut slots = slots.lock().unwrap_or_else(PoisonError::into_inner);
        let outputs = std::array::from_fn(|i| slots[i].take());
        drop(slots);
        let parents = ops.parents.map(|parent| parent.map(|node| node.id));
        self.0.backward(parents, state, outputs, grads, checkpointer);
    }
}

#[derive(Debug)]
struct Leg<const K: usize>;

impl<B: Backend, const K: usize> Backward<B, 1> for Leg<K> {
    type State = (usize, Slots<B, K>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (output, slots) = ops.state;
        let [hub] = ops.parents;
        let mut slots = slots.lock().unwrap_or_else(PoisonError::into_inner);
        let first = slots.iter().all(Option::is_none);
        slots[output] = Some(gradient.clone());
        drop(slots);
        if let (true, Some(hub)) = (first, hub) {
            grads.register::<B>(hub.id, gradient);
        }
    }
}

/// Preparation of the hub, on which inputs are checkpointed.
pub(crate) type HubPrep<B, C, T, const N: usize, const K: usize> =
    OpsPrep<Hub<T, K>, B, (<T as MultiBackward<B, N, K>>::State, Slots<B, K>), C, N, Tracked>;

/// Runs `forward` and ties its outputs to the inputs `nodes` through one backward.
///
/// `state` makes what the backward keeps, if any input needs a gradient.
pub(crate) fn outputs<B, C, T, const N: usize, const K: usize>(
    backward: T,
    nodes: [NodeGuard; N],
    state: impl FnOnce(&mut HubPrep<B, C, T, N, K>) -> T::State,
    forward: impl FnOnce() -> [FloatTensor<B>; K],
) -> [FloatTensor<Autodiff<B, C>>; K]
where
    B: Backend,
    C: CheckpointStrategy,
    T: MultiBackward<B, N, K>,
{
    match Hub(backward).prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let slots: Slots<B, K> = Arc::new(Mutex::new(std::array::from_fn(|_| None)));
            let state = state(&mut prep);
            let outputs = forward();
            let hub = prep.finish((state, slots.clone()), outputs[0].clone());
            let mut number = 0..;
            outputs.map(|output| {
                let state = (number.next().unwrap_or_default(), slots.clone());
                match Leg::<K>.prepare::<C>([hub.node()]).compute_bound().stateful() {
                    OpsKind::Tracked(prep) => prep.finish(state, output),
                    OpsKind::UnTracked(prep) => prep.finish(output),
                }
            })
        }
        OpsKind::UnTracked(_) => forward().map(<Autodiff<B, C> as AutodiffBackend>::from_inner),
    }
}

/// The last two dimensions swapped, as a view.
pub(crate) fn transposed<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let rank = tensor.shape().num_dims();
    B::float_swap_dims(tensor, rank - 2, rank - 1)
}
