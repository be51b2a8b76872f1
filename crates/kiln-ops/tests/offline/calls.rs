//! What is called: every operator, in the element types and shapes that choose its kernels.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use kiln_ops::add_rms_norm::backend::{AddRmsNormGradOps, AddRmsNormOps};
use kiln_ops::matmul::backend::{MatmulOps, Scaled};
use kiln_ops::rms_norm::backend::{RmsNormGradOps, RmsNormOps};
use kiln_ops::tile::{Family, force};
use kiln_ops::tril_matmul::backend::{Triangular, TrilMatmulOps};

/// A call by its name in the table.
pub struct Call {
    pub name: String,
    pub run: Box<dyn FnOnce()>,
}

fn tensor<const D: usize>(client: &Client, shape: [usize; D], dtype: DType) -> CubeTensor {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    let device = cubecl::Device::Cuda(Default::default());
    CubeTensor::new_contiguous(
        client.clone(),
        device,
        Shape::from(shape),
        client.empty(bytes),
        dtype,
    )
}

fn transposed(mut tensor: CubeTensor) -> CubeTensor {
    tensor.meta.swap(0, 1);
    tensor
}

const DTYPES: [(DType, &str); 3] =
    [(DType::F32, "f32"), (DType::BF16, "bf16"), (DType::F16, "f16")];
const EPS: f64 = 1e-5;

/// All calls.
pub fn all(client: &Client) -> Vec<Call> {
    let mut calls = vec![];
    for (dtype, name) in DTYPES {
        norms(client, dtype, name, &mut calls);
        products(client, dtype, name, &mut calls);
    }
    calls
}

fn norms(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    // Narrow, several rows a cube; one cube a row; beyond the registers; ragged and odd.
    for [rows, width] in
        [[4096, 128], [4096, 768], [4096, 4096], [64, 65_536], [64, 1000], [64, 33]]
    {
        let x = || tensor(client, [rows, width], dtype);
        let weight = || tensor(client, [width], dtype);
        let size = format!("{name} {rows}x{width}");
        let mut call = |op: &str, run: Box<dyn FnOnce()>| {
            calls.push(Call { name: format!("{op} {size}"), run });
        };
        let (a, w) = (x(), weight());
        call("rms_norm", Box::new(|| drop(CubeBackend::rms_norm(a, w, EPS))));
        let (a, b, w) = (x(), x(), weight());
        call("rms_norm.grad", Box::new(|| drop(CubeBackend::rms_norm_backward(a, b, w, EPS))));
        let (a, b, w) = (x(), x(), weight());
        call("rms_norm.grad.x", Box::new(|| drop(CubeBackend::rms_norm_backward_x(a, b, w, EPS))));
        let (a, b, w) = (x(), x(), weight());
        call(
            "rms_norm.grad.weight",
            Box::new(|| drop(CubeBackend::rms_norm_backward_weight(a, b, w, EPS))),
        );
        let (a, b, w) = (x(), x(), weight());
        call("add_rms_norm", Box::new(|| drop(CubeBackend::add_rms_norm(a, b, w, EPS))));
        let (a, b, c, w) = (x(), x(), x(), weight());
        call(
            "add_rms_norm.grad",
            Box::new(|| drop(CubeBackend::add_rms_norm_backward(a, b, c, w, EPS))),
        );
    }
}

fn products(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    // Large tiles; few tiles and long sums; odd sizes.
    for [m, k, n] in [[8192, 4096, 8192], [8192, 768, 768], [256, 8192, 256], [65, 33, 31]] {
        for (order, a_turned, b_turned) in
            [("nn", false, false), ("nt", false, true), ("tn", true, false), ("tt", true, true)]
        {
            for family in [Family::Wgmma, Family::Units] {
                let make = |rows, cols, turned| {
                    if turned {
                        transposed(tensor(client, [cols, rows], dtype))
                    } else {
                        tensor(client, [rows, cols], dtype)
                    }
                };
                let (a, b) = (make(m, k, a_turned), make(k, n, b_turned));
                let scaled = force(family, || Scaled::new(1.0, 0.0, dtype));
                calls.push(Call {
                    name: format!("matmul {name} {order} {m}x{k}x{n}"),
                    run: Box::new(move || drop(CubeBackend::kiln_matmul(a, b, scaled))),
                });
            }
        }
    }
    // Triangles: the product and both gradients.
    for family in [Family::Wgmma, Family::Units] {
        let lower = force(family, Triangular::lower);
        for (which, triangular, a_turned, b_turned) in [
            ("", lower, false, false),
            (".grad.a", lower.grad_a(), false, true),
            (".grad.b", lower.grad_b(), true, false),
        ] {
            let make = |turned| {
                let tensor = tensor(client, [1024, 1024], dtype);
                if turned { transposed(tensor) } else { tensor }
            };
            let (a, b) = (make(a_turned), make(b_turned));
            calls.push(Call {
                name: format!("tril_matmul{which} {name}"),
                run: Box::new(move || drop(CubeBackend::tril_matmul(a, b, triangular))),
            });
        }
    }
    // The epilogues: scaled and added to, in f32.
    for family in [Family::Wgmma, Family::Units] {
        let (a, b) = (tensor(client, [512, 512], dtype), tensor(client, [512, 512], dtype));
        let c = tensor(client, [512, 512], DType::F32);
        let scaled = force(family, || Scaled::new(0.5, 2.0, DType::F32));
        calls.push(Call {
            name: format!("matmul_add {name} f32"),
            run: Box::new(move || drop(CubeBackend::kiln_matmul_add(a, b, c, scaled))),
        });
    }
}
