//! What is called: every operator, in the element types and shapes that choose its kernels.

use crate::ops::{Matrices, Moebius, scanned};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::zspace::metadata::Metadata;
use kiln_ops::add_rms_norm::backend::AddRmsNormOps;
use kiln_ops::autodiff::Maybe;
use kiln_ops::bk::BkMode;
use kiln_ops::bk::backend::{self as bk, BkGradOps, BkOps};
use kiln_ops::cross_entropy::CrossEntropyOptions;
use kiln_ops::cross_entropy::backend::{
    self as cross_entropy, CrossEntropyGradOps, CrossEntropyOps,
};
use kiln_ops::embedding::backend::{self as embedding, EmbeddingGradOps, EmbeddingOps};
use kiln_ops::matmul::backend::{MatmulOps, Scaled};
use kiln_ops::matmul::{F32Precision, MatmulOptions};
use kiln_ops::reduce::{Combine, Sums};
use kiln_ops::rms_norm::backend::{self as rms_norm, RmsNormGradOps, RmsNormOps};
use kiln_ops::rope::RopeLayout;
use kiln_ops::rope::backend::{RopeOps, Rotation};
use kiln_ops::scan::ScanRequest;
use kiln_ops::swiglu::backend::{self as swiglu, SwiGluGradOps, SwiGluOps};
use kiln_ops::swiglu_mlp::backend::{self as swiglu_mlp, Mlp, SwiGluMlpGradOps, SwiGluMlpOps};
use kiln_ops::tile::{Family, force};
use kiln_ops::tril_matmul::backend::{Triangular, TrilMatmulOps};

/// A call by its name in the table.
pub struct Call {
    pub name: String,
    pub run: Box<dyn FnOnce()>,
}

pub fn tensor<const D: usize>(client: &Client, shape: [usize; D], dtype: DType) -> CubeTensor {
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
        crate::hyper::before_a_layer(client, dtype, name, &mut calls);
        pointwise(client, dtype, name, &mut calls);
        crate::hyper::after_a_layer(client, dtype, name, &mut calls);
        crate::hyper::between_layers(client, dtype, name, &mut calls);
        losses(client, dtype, name, &mut calls);
        crate::attention::calls(client, dtype, name, &mut calls);
        crate::attention::few(client, dtype, name, &mut calls);
        products(client, dtype, name, &mut calls);
    }
    scans(client, &mut calls);
    resolvents(client, &mut calls);
    for (dtype, name) in DTYPES {
        crate::optimizer::steps(client, dtype, name, &mut calls);
        crate::optimizer::muon(client, dtype, name, &mut calls);
        crate::optimizer::many_steps(client, dtype, name, &mut calls);
        tables(client, dtype, name, &mut calls);
        crate::seeds::chunks(client, dtype, name, &mut calls);
        crate::seeds::mlps(client, dtype, name, &mut calls);
    }
    calls
}

/// Rows that share a cube, one cube each, and many blocks.
fn resolvents(client: &Client, calls: &mut Vec<Call>) {
    for [rows, length] in [[512, 64], [16, 4096], [64, 131_072]] {
        for (mode, max_abs, word) in
            [(BkMode::Full, None, "full"), (BkMode::Causal, Some(1.0), "causal capped")]
        {
            let of = |shape: [usize; 2]| tensor(client, shape, DType::F32);
            let couplings = || of([rows, length - 1]);
            let (a, b, c, z) = (of([rows, length]), couplings(), couplings(), of([1, 2]));
            let name = |pass: &str| format!("bk{pass} f32 {rows}x{length} {word}");
            let [own_a, own_b, own_c, own_z] = [&a, &b, &c, &z].map(Clone::clone);
            let forward = move || {
                let op = "bk";
                let of = bk::Forward { op, a: own_a, b: own_b, c: own_c, z: own_z, mode, max_abs };
                drop(CubeBackend::bk(of, true));
            };
            calls.push(Call { name: name(""), run: Box::new(forward) });
            let dg = tensor(client, [rows, length, 2], DType::F32);
            let records = tensor(client, [rows, length.div_ceil(8), 8], DType::F32);
            let wanted = [true; 4];
            let backward = move || {
                let op = "bk";
                let of = bk::Backward { op, dg, a, b, c, z, records, mode, max_abs, wanted };
                drop(CubeBackend::bk_backward(of));
            };
            calls.push(Call { name: name(".grad"), run: Box::new(backward) });
        }
    }
}

/// Narrow sequences that share a cube, one cube each, and many blocks.
fn scans(client: &Client, calls: &mut Vec<Call>) {
    fn call<C: Combine>(client: &Client, name: &str, calls: &mut Vec<Call>) {
        let many = 1 << 20;
        for (sequences, length, blocks) in
            [(4096, 64, None), (512, 4096, None), (1, many, None), (1, many, Some(64))]
        {
            for (reverse, exclusive) in [(false, false), (true, true)] {
                let x = tensor(client, [sequences * length * C::REGISTERS], DType::F32);
                let op = "scan";
                let request = ScanRequest { op, sequences, length, reverse, exclusive, blocks };
                let word = if reverse { "reverse exclusive" } else { "forward inclusive" };
                let word = if blocks.is_some() { format!("{word} blocks") } else { word.into() };
                calls.push(Call {
                    name: format!("scan of {name} {word} {sequences}x{length}"),
                    run: Box::new(move || drop(scanned::<C>(&x, request))),
                });
            }
        }
    }
    call::<Sums<1>>(client, "sums", calls);
    call::<Matrices>(client, "matrices", calls);
    call::<Moebius>(client, "moebius", calls);
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
        call("add_rms_norm", Box::new(|| drop(CubeBackend::add_rms_norm(a, b, w, EPS))));
        for (name, sum, wanted) in [
            ("rms_norm.grad", false, [true, true]),
            ("rms_norm.grad.x", false, [true, false]),
            ("rms_norm.grad.weight", false, [false, true]),
            ("add_rms_norm.grad", true, [true, true]),
        ] {
            let dsum = Maybe::from(sum.then(x));
            let (op, dy, x, weight) = ("rms_norm", x(), x(), weight());
            let of = rms_norm::Backward { op, dy, dsum, x, weight, eps: EPS, wanted };
            call(name, Box::new(|| drop(CubeBackend::rms_norm_backward(of))));
        }
    }
}

fn pointwise(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for [rows, width] in [[4096, 8192], [64, 33]] {
        let x = || tensor(client, [rows, width], dtype);
        let size = format!("{name} {rows}x{width}");
        let mut call = |op: &str, run: Box<dyn FnOnce()>| {
            calls.push(Call { name: format!("{op} {size}"), run });
        };
        let (gate, up) = (x(), x());
        call("swiglu", Box::new(|| drop(CubeBackend::swiglu(gate, up))));
        for (name, wanted) in [
            ("swiglu.grad", [true, true]),
            ("swiglu.grad.gate", [true, false]),
            ("swiglu.grad.up", [false, true]),
        ] {
            let of = swiglu::Backward { op: "swiglu", dy: x(), gate: x(), up: x(), wanted };
            call(name, Box::new(|| drop(CubeBackend::swiglu_backward(of))));
        }
    }
    for (layout, word) in [(RopeLayout::Half, "half"), (RopeLayout::Interleaved, "interleaved")] {
        for width in [128, 6] {
            let x = || tensor(client, [8, 12, 1024, width], dtype);
            let table = || tensor(client, [1024, width / 2], DType::F32);
            let by = || {
                let (cos, sin) = (table(), table());
                Rotation { cos, sin, layout, offset: 0, inverse: false }
            };
            let (a, turn) = (x(), by());
            calls.push(Call {
                name: format!("rope {name} {word} {width}"),
                run: Box::new(move || drop(CubeBackend::rope(a, turn))),
            });
            let (qkv, turn) = (tensor(client, [8, 1024, 16 * width], dtype), by());
            calls.push(Call {
                name: format!("rope_qkv {name} {word} {width}"),
                run: Box::new(move || drop(CubeBackend::rope_packed(qkv, 14, turn))),
            });
            // Others hold it: it is copied on the way.
            let (qkv, turn) = (tensor(client, [8, 1024, 16 * width], dtype), by());
            let held = [qkv.clone(), qkv.clone()];
            calls.push(Call {
                name: format!("rope_qkv {name} {word} {width} copied"),
                run: Box::new(move || {
                    drop(CubeBackend::rope_packed(qkv, 14, turn));
                    drop(held);
                }),
            });
            let (q, k, turn) = (x(), x(), by());
            calls.push(Call {
                name: format!("rope_qk {name} {word} {width}"),
                run: Box::new(move || drop(CubeBackend::rope_qk(q, k, turn))),
            });
        }
    }
}

fn losses(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    let plain = CrossEntropyOptions::default();
    let all = CrossEntropyOptions { label_smoothing: 0.1, z_loss: 1e-4, ..plain };
    // Of the second ones rows begin at multiples of 16 bytes.
    for [rows, classes, pitch] in
        [[4096, 50_304, 50_304], [4096, 50_257, 50_264], [4096, 50_257, 50_257], [64, 100, 100]]
    {
        for (options, word) in [(plain, ""), (all, " smoothed")] {
            let op = "cross_entropy";
            let logits = || {
                let mut logits = tensor(client, [rows, pitch], dtype);
                *logits.meta = Metadata::new(Shape::from([rows, classes]), vec![pitch, 1]);
                logits
            };
            let word = if pitch == classes { word.into() } else { format!("{word} of {pitch}") };
            let f32 = |size| tensor(client, [size], DType::F32);
            let targets = || tensor(client, [rows], DType::I32);
            let name = format!("{name} {rows}x{classes}{word}");
            let of = cross_entropy::Forward { op, logits: logits(), targets: targets(), options };
            calls.push(Call {
                name: format!("cross_entropy {name}"),
                run: Box::new(move || drop(CubeBackend::cross_entropy(of, true))),
            });
            let (dloss, lse, scale) = (f32(1), f32(rows), f32(1));
            let (logits, targets) = (logits(), targets());
            let of = cross_entropy::Backward { op, dloss, logits, targets, lse, scale, options };
            calls.push(Call {
                name: format!("cross_entropy.grad {name}"),
                run: Box::new(move || drop(CubeBackend::cross_entropy_backward(of))),
            });
        }
    }
}

/// A table that f32 rows are taken of, with its gradient from rows of the element type; one part and several.
fn tables(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for ([rows, width], ints) in [([50_304, 768], DType::I32), ([1000, 4099], DType::I64)] {
        let name = format!("{name} {rows}x{width}");
        let (weight, tokens) =
            (tensor(client, [rows, width], DType::F32), tensor(client, [32_768], ints));
        let named = tokens.clone();
        calls.push(Call {
            name: format!("embedding {name}"),
            run: Box::new(move || drop(CubeBackend::kiln_embedding(weight, named, dtype))),
        });
        let (op, dy) = ("embedding", tensor(client, [32_768, width], dtype));
        let onto = Maybe::Some(tensor(client, [rows, width], dtype));
        let more =
            embedding::Backward { op, dy: dy.clone(), tokens: tokens.clone(), rows, dtype, onto };
        calls.push(Call {
            name: format!("tied embedding.grad {name}"),
            run: Box::new(move || drop(CubeBackend::kiln_embedding_backward(more))),
        });
        let of = embedding::Backward { op, dy, tokens, rows, dtype: DType::F32, onto: Maybe::None };
        calls.push(Call {
            name: format!("embedding.grad {name}"),
            run: Box::new(move || drop(CubeBackend::kiln_embedding_backward(of))),
        });
    }
}

fn products(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    // Large tiles; few tiles and long sums, by cubes in pairs and in parts; odd sizes.
    let sizes =
        [[8192, 4096, 8192], [8192, 768, 768], [2048, 8192, 768], [256, 8192, 256], [65, 33, 31]];
    for [m, k, n] in sizes {
        for (order, a_turned, b_turned) in
            [("nn", false, false), ("nt", false, true), ("tn", true, false), ("tt", true, true)]
        {
            for family in Family::ALL {
                let make = |rows, cols, turned| {
                    if turned {
                        transposed(tensor(client, [cols, rows], dtype))
                    } else {
                        tensor(client, [rows, cols], dtype)
                    }
                };
                let (a, b) = (make(m, k, a_turned), make(k, n, b_turned));
                let scaled = force(family, || Scaled::new(MatmulOptions::default(), dtype));
                calls.push(Call {
                    name: format!("matmul {name} {order} {m}x{k}x{n}"),
                    run: Box::new(move || {
                        drop(CubeBackend::kiln_matmul(a, b, Maybe::None, scaled))
                    }),
                });
            }
        }
    }
    thin(client, dtype, name, calls);
    triangles(client, dtype, name, calls);
    sums(client, dtype, name, calls);
    // f32 as sums of bf16.
    if dtype == DType::F32 {
        let options = MatmulOptions { precision: F32Precision::High, ..MatmulOptions::default() };
        for (order, turned) in [("nn", false), ("tt", true)] {
            let make = || {
                let tensor = tensor(client, [512, 512], dtype);
                if turned { transposed(tensor) } else { tensor }
            };
            let (a, b, scaled) = (make(), make(), Scaled::new(options, dtype));
            calls.push(Call {
                name: format!("matmul high {order}"),
                run: Box::new(move || drop(CubeBackend::kiln_matmul(a, b, Maybe::None, scaled))),
            });
        }
    }
    pairs(client, dtype, name, calls);
}

/// Triangles: the product and both gradients.
fn triangles(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for family in Family::ALL {
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
}

/// What is added at the end of a product, and what is known of the sum.
fn sums(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    // The epilogues: scaled and added to, in f32.
    for family in Family::ALL {
        let (a, b) = (tensor(client, [512, 512], dtype), tensor(client, [512, 512], dtype));
        let c = tensor(client, [512, 512], DType::F32);
        let options = MatmulOptions {
            alpha: 0.5,
            beta: 2.0,
            dtype: Some(DType::F32),
            ..MatmulOptions::default()
        };
        let scaled = force(family, || Scaled::new(options, dtype));
        calls.push(Call {
            name: format!("matmul_add {name} f32"),
            run: Box::new(move || drop(CubeBackend::kiln_matmul(a, b, Maybe::Some(c), scaled))),
        });
    }
    // C as the operands, in their place in the ring.
    for [m, k, n] in [[8192, 1024, 2048], [512, 1024, 520]] {
        let [a, b, c] = [[m, k], [k, n], [m, n]].map(|shape| tensor(client, shape, dtype));
        let options = MatmulOptions { beta: 2.0, ..MatmulOptions::default() };
        let scaled = Scaled::new(options, dtype);
        calls.push(Call {
            name: format!("matmul_add {name} {m}x{n}"),
            run: Box::new(move || drop(CubeBackend::kiln_matmul(a, b, Maybe::Some(c), scaled))),
        });
    }
    // Symmetric: wide tiles, and small ones that cubes share, with C.
    for (rows, depth) in [(8192, 1024), (512, 4096)] {
        let options = MatmulOptions { symmetric: true, ..MatmulOptions::default() };
        let scaled = Scaled::new(options, dtype);
        let (a, c) = (tensor(client, [rows, depth], dtype), tensor(client, [rows, rows], dtype));
        let at = transposed(a.clone());
        calls.push(Call {
            name: format!("matmul symmetric {name} {rows}x{depth}"),
            run: Box::new(move || drop(CubeBackend::kiln_matmul(a, at, Maybe::Some(c), scaled))),
        });
    }
}

/// Pairs of products, with wide and with narrow tiles.
fn pairs(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for [rows, width, inner] in [[8192, 768, 2048], [64, 128, 384]] {
        for (order, turned) in [("n", false), ("t", true)] {
            let x = || tensor(client, [rows, width], dtype);
            let product = || tensor(client, [rows, inner], dtype);
            let weight = || match turned {
                true => transposed(tensor(client, [inner, width], dtype)),
                false => tensor(client, [width, inner], dtype),
            };
            let down = || tensor(client, [inner, width], dtype);
            let name = format!("{name} {order} {rows}x{width}x{inner}");
            let mlp = || Mlp::new([x(), weight(), weight(), down()], None);
            for (kept, keep) in [("", false), (" kept", true)] {
                let of = mlp();
                calls.push(Call {
                    name: format!("swiglu_mlp{kept} {name}"),
                    run: Box::new(move || drop(CubeBackend::swiglu_mlp(of, keep))),
                });
            }
            let (dy, mlp, gate, up) = (x(), mlp(), product(), product());
            let of = swiglu_mlp::Backward { dy, mlp, gate, up, wanted: [true; 4] };
            calls.push(Call {
                name: format!("swiglu_mlp.grad {name}"),
                run: Box::new(move || drop(CubeBackend::swiglu_mlp_backward(of))),
            });
        }
    }
}

/// One thin side: decoding, and a weight of few columns with its gradient.
fn thin(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for ([m, k, n], order, a_turned, b_turned) in [
        ([8, 8192, 8192], "nn", false, false),
        ([8, 8192, 8192], "nt", false, true),
        ([64, 8192, 8192], "nn", false, false),
        ([64, 8192, 8192], "nt", false, true),
        ([16_384, 8192, 24], "nn", false, false),
        ([16_384, 8192, 80], "nn", false, false),
        ([8192, 16_384, 24], "tn", true, false),
    ] {
        let make = |rows, cols, turned| match turned {
            true => transposed(tensor(client, [cols, rows], dtype)),
            false => tensor(client, [rows, cols], dtype),
        };
        let (a, b) = (make(m, k, a_turned), make(k, n, b_turned));
        let scaled = Scaled::new(MatmulOptions::default(), dtype);
        calls.push(Call {
            name: format!("thin {name} {order} {m}x{k}x{n}"),
            run: Box::new(move || drop(CubeBackend::kiln_matmul(a, b, Maybe::None, scaled))),
        });
    }
    // Added to, in f32; and lines that are not aligned.
    for [m, k, n] in [[2048, 1000, 24], [64, 8192, 8192]] {
        let (a, b) = (tensor(client, [m, k], dtype), tensor(client, [k, n], dtype));
        let c = tensor(client, [m, n], DType::F32);
        let f32 = Some(DType::F32);
        let options = MatmulOptions { alpha: 0.5, dtype: f32, ..MatmulOptions::default() };
        let scaled = Scaled::new(options, dtype);
        calls.push(Call {
            name: format!("thin add {name} {m}x{k}x{n}"),
            run: Box::new(move || drop(CubeBackend::kiln_matmul(a, b, Maybe::Some(c), scaled))),
        });
    }
    let (a, b) = (tensor(client, [2048, 1001], dtype), tensor(client, [1001, 5], dtype));
    let scaled = Scaled::new(MatmulOptions::default(), dtype);
    calls.push(Call {
        name: format!("thin odd {name}"),
        run: Box::new(move || drop(CubeBackend::kiln_matmul(a, b, Maybe::None, scaled))),
    });
}
