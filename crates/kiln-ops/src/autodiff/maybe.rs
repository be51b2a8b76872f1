//! A float tensor that may be missing, as an argument or a result of a backend's operation.
//!
//! `Option` cannot be one: Burn's fusion takes tensors, tuples and extension types.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Backend, Dispatch, ExtensionType, tensor::FloatTensor};
use burn::tensor::Tensor;

/// A tensor or none.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub enum Maybe<B: Backend> {
    /// There is one.
    Some(FloatTensor<B>),
    /// There is none.
    None,
}

/// What `#[fusion(meta = …)]` says of a [`Maybe`]: like `spec` if it is `wanted`.
pub(crate) fn maybe(wanted: bool, spec: &TensorSpec) -> MaybeMetadata {
    if wanted { MaybeMetadata::Some(spec.clone()) } else { MaybeMetadata::None }
}

impl<B: Backend> From<Option<FloatTensor<B>>> for Maybe<B> {
    fn from(option: Option<FloatTensor<B>>) -> Self {
        option.map_or(Self::None, Self::Some)
    }
}

impl<B: Backend> Maybe<B> {
    /// As std's type.
    pub fn option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Some(tensor) => Some(tensor),
            Self::None => None,
        }
    }

    /// The tensor, of which the caller knows that it is there.
    pub(crate) fn expect(self, what: &str) -> FloatTensor<B> {
        self.option().expect(what)
    }
}

impl Maybe<Dispatch> {
    /// The tensor, of which the caller knows that it is there.
    pub(crate) fn tensor<const D: usize>(self) -> Tensor<D> {
        Tensor::from_dispatch(self.expect("the result was asked for"))
    }
}
