//! A fingerprint of a tensor, made on the device: reading a tensor a thousand times would take longer than making it.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Int, Shape, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;
use kiln_ops::launch;

/// Words of a fingerprint: each is of every so manieth element.
const WORDS: usize = 1 << 14;

#[backend_extension(Cube, Fusion)]
trait FingerprintOps: Backend {
    #[fusion(meta = |_: &TensorSpec| TensorSpec::new(Shape::new([WORDS]), DType::U32))]
    fn fingerprint(x: FloatTensor<Self>) -> IntTensor<Self>;
}

/// FNV-1a over the bits of numbers in f32, which holds all of f16 and bf16.
#[cube(launch_unchecked)]
fn fingerprint_kernel<E: Float>(
    x: &[E],
    out: &mut [u32],
    elements: usize,
    #[comptime] words: usize,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < words {
        let mut hash = 0x811C_9DC5u32;
        let mut i = ABSOLUTE_POS;
        while i < elements {
            hash = (hash ^ u32::reinterpret(f32::cast_from(x[i]))) * 0x0100_0193u32;
            i += words;
        }
        out[ABSOLUTE_POS] = hash;
    }
}

impl FingerprintOps for CubeBackend {
    fn fingerprint(x: FloatTensor<Self>) -> IntTensor<Self> {
        let x: CubeTensor = into_contiguous(x);
        let shape = Shape::new([WORDS]);
        let out = launch::output(&x, "stress", "fingerprint", shape, DType::U32);
        let (client, elements) = (x.client.clone(), x.meta.shape().num_elements());
        let dtype = dtype_to_elem_type(x.dtype);
        // SAFETY: indices are checked.
        unsafe {
            fingerprint_kernel::launch_unchecked(
                &client,
                launch::grid(&client, WORDS / 256),
                CubeDim::new_1d(256),
                x.into_buffer_arg(),
                out.clone().into_buffer_arg(),
                elements,
                WORDS,
                dtype,
            );
        }
        out
    }
}

/// The fingerprint of a tensor on a device with kernels.
pub(super) fn of(tensor: Tensor<1>) -> Result<Vec<u8>, String> {
    if tensor.dims() == [0] {
        return Ok(vec![]);
    }
    let out = <Dispatch as FingerprintOps>::fingerprint(tensor.into_dispatch());
    let data = Tensor::<1, Int>::from_dispatch(out).try_to_data();
    let data = data.map_err(|e| crate::host::one_line(&format!("{e:?}")))?;
    Ok(data.as_bytes().to_vec())
}
