//! Several float tensors as one argument or one result of a backend's operation.
//!
//! `Vec` cannot be one: Burn's fusion takes tensors, tuples and extension types.

use super::Maybe;
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};

macro_rules! list {
    ($($field:ident)*) => {
        /// Up to [`MOST`] tensors; what is missing is missing at the end.
        #[derive(Clone, Debug, ExtensionType)]
        #[extension_type(fusion)]
        pub struct List<B: Backend> {
            $(
                #[extension_type]
                $field: Maybe<B>,
            )*
        }

        impl<B: Backend> List<B> {
            /// Those that there are.
            pub(crate) fn into_vec(self) -> Vec<FloatTensor<B>> {
                [$(self.$field),*].into_iter().filter_map(Maybe::option).collect()
            }
        }

        /// Tensors that fit into a [`List`].
        pub const MOST: usize = [$(stringify!($field)),*].len();

        /// # Panics
        ///
        /// If there are more than [`MOST`].
        impl<B: Backend> FromIterator<FloatTensor<B>> for List<B> {
            fn from_iter<T: IntoIterator<Item = FloatTensor<B>>>(tensors: T) -> Self {
                let mut tensors = tensors.into_iter();
                let list = Self { $($field: tensors.next().into()),* };
                assert!(tensors.next().is_none(), "more than {MOST} tensors in a list");
                list
            }
        }
    };
}

/// What `run` makes of each, in their order. It gets up to `most` at a time, either of those that `apart` holds of or of
/// the others.
pub(crate) fn in_lists<T, R>(
    all: Vec<T>,
    most: usize,
    apart: impl Fn(&T) -> bool,
    mut run: impl FnMut(Vec<T>) -> Vec<R>,
) -> Vec<R> {
    let mut made: Vec<Option<R>> = all.iter().map(|_| None).collect();
    let (with, without): (Vec<_>, Vec<_>) =
        all.into_iter().enumerate().partition(|(_, one)| apart(one));
    for list in [with, without] {
        let mut list = list.into_iter().peekable();
        while list.peek().is_some() {
            let (places, some): (Vec<usize>, Vec<T>) = list.by_ref().take(most).unzip();
            for (place, one) in places.into_iter().zip(run(some)) {
                made[place] = Some(one);
            }
        }
    }
    made.into_iter().map(|one| one.expect("one is made of each")).collect()
}

list! {
    t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 t10 t11 t12 t13 t14 t15
    t16 t17 t18 t19 t20 t21 t22 t23 t24 t25 t26 t27 t28 t29 t30 t31
}
