//! What the gate's layouts are on a device: cut rows reach a kernel at a distance that is not their
//! width, with all columns in their place, and poison stands before what it reads.

#![cfg(feature = "cube")]

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{Int, Tensor};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use kiln_bench::gate;
use kiln_bench::host::{HostTensor, Input, Layout, download};
use kiln_ops::device;
use std::sync::Mutex;

/// Distance of the rows of the last tensor that a kernel was handed, and the byte of its buffer where it begins.
static SEEN: Mutex<[usize; 2]> = Mutex::new([0; 2]);

#[backend_extension(Cube, Fusion)]
trait ProbeOps: Backend {
    #[fusion(dtype = x, shape = x)]
    fn probe(x: FloatTensor<Self>) -> FloatTensor<Self>;
    #[fusion(dtype = x, shape = x)]
    fn probe_integers(x: IntTensor<Self>) -> IntTensor<Self>;
}

fn seen(x: CubeTensor) -> CubeTensor {
    let begin = x.handle.offset_start.unwrap_or(0) as usize;
    *SEEN.lock().unwrap() = [x.meta.strides()[0], begin];
    x
}

impl ProbeOps for CubeBackend {
    fn probe(x: FloatTensor<Self>) -> FloatTensor<Self> {
        seen(x)
    }

    fn probe_integers(x: IntTensor<Self>) -> IntTensor<Self> {
        seen(x)
    }
}

#[test]
fn a_kernel_sees_what_stands_around_its_inputs() {
    let opened = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device));
    let Some(device) = opened.map(|opened| opened.device) else { return };
    for dtype in gate::dtypes(&device) {
        for width in [1, 7, 48, 1023, 2049] {
            for layout in [Layout::Allocated, Layout::Cut, Layout::OddCut] {
                let host = HostTensor::new([3, width], (0..3 * width).map(|i| i as f64).collect());
                let host = host.rounded(dtype);
                let Input::Float { leaf, rows, .. } =
                    Input::float(&host, dtype, layout, false, &device)
                else {
                    panic!("a float input")
                };
                let found = <Dispatch as ProbeOps>::probe(rows.into_dispatch());
                let found = download(&Tensor::<2>::from_dispatch(found)).unwrap();
                assert_eq!(found, host.values, "{dtype:?} {width} {layout:?}");
                let ([seen, begin], [rows, wide]) = (*SEEN.lock().unwrap(), leaf.dims());
                match layout {
                    // At least that of the wider tensor, whose rows CUDA may pitch.
                    Layout::Cut => assert!(seen >= wide && wide > width, "{dtype:?} {seen} {wide}"),
                    Layout::OddCut => {
                        assert!(wide == width + 6 && seen != wide, "{dtype:?} {seen}")
                    }
                    Layout::Allocated => assert_eq!(wide, width),
                }
                // A copy begins at the beginning of its memory.
                let poison = layout != Layout::OddCut && (rows > 3 || wide > width);
                assert_eq!(begin > 0, poison, "{dtype:?} {width} {layout:?} begins at {begin}");
                // Wider ones of odd width would need too many rows of it.
                let some = layout != Layout::Allocated || width > 1023 || rows > 3;
                assert!(some, "{dtype:?} {width}: no poison");
            }
        }
    }
    let host = HostTensor::new([5], (0..5).map(f64::from).collect());
    let Input::Int { flat, .. } = Input::int(&host, false, &device) else { panic!("integers") };
    let found = <Dispatch as ProbeOps>::probe_integers(flat.into_dispatch());
    let found = Tensor::<1, Int>::from_dispatch(found).into_data();
    assert_eq!(found.iter::<i64>().collect::<Vec<_>>(), host.integers());
    assert!(SEEN.lock().unwrap()[1] > 0, "no poison before integers");
}
