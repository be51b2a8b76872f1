//! What the gate's layouts are on a device: cut rows reach a kernel at a distance that is not their
//! width, with all columns in their place.

#![cfg(feature = "cube")]

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;
use kiln_bench::gate;
use kiln_bench::host::{HostTensor, Input, Layout, download};
use std::sync::Mutex;

/// Distance of the rows of the last tensor that a kernel was handed.
static SEEN: Mutex<usize> = Mutex::new(0);

#[backend_extension(Cube, Fusion)]
trait ProbeOps: Backend {
    #[fusion(dtype = x, shape = x)]
    fn probe(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl ProbeOps for CubeBackend {
    fn probe(x: FloatTensor<Self>) -> FloatTensor<Self> {
        *SEEN.lock().unwrap() = x.meta.strides()[0];
        x
    }
}

#[test]
fn a_kernel_sees_the_distance_of_cut_rows() {
    let Some(opened) = kiln_test::device(kiln_ops::device::open) else { return };
    let device = opened.device;
    if !kiln_ops::device::is_cube(&device) {
        return kiln_test::skip("kernels", opened.name);
    }
    for dtype in gate::dtypes(&device) {
        for width in [1, 7, 48] {
            for layout in [Layout::Allocated, Layout::Cut, Layout::OddCut] {
                let host = HostTensor::new([3, width], (0..3 * width).map(|i| i as f64).collect());
                let Input::Float { leaf, rows, .. } =
                    Input::float(&host, dtype, layout, false, &device)
                else {
                    panic!("a float input")
                };
                let found = <Dispatch as ProbeOps>::probe(rows.into_dispatch());
                let found = download(&Tensor::<2>::from_dispatch(found)).unwrap();
                assert_eq!(found, host.values, "{dtype:?} {width} {layout:?}");
                let (seen, wide) = (*SEEN.lock().unwrap(), leaf.dims()[1]);
                match layout {
                    // At least that of the wider tensor, whose rows CUDA may pitch.
                    Layout::Cut => assert!(seen >= wide && wide > width, "{dtype:?} {seen} {wide}"),
                    Layout::OddCut => {
                        assert!(wide == width + 6 && seen != wide, "{dtype:?} {seen}")
                    }
                    Layout::Allocated => assert_eq!(wide, width),
                }
            }
        }
    }
}
