//! Calls of the Kasmina layer.

use crate::calls::{Call, tensor};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use cubecl::client::Client;
use kiln_ops::kasmina::backend::{self as kasmina, KasminaGradOps, KasminaOps, KasminaSeedOps};
use kiln_ops::kasmina_mlp::backend::{self as kasmina_mlp, KasminaMlpGradOps, KasminaMlpOps};
use kiln_ops::kasmina_mlp::mlp_rows;

/// Forward and backward of the Kasmina layer in f32, and in bf16 with MLPs.
pub fn chunks_of(client: &Client) -> Vec<Call> {
    let mut calls = vec![];
    chunks(client, DType::F32, "f32", &mut calls);
    mlps(client, DType::BF16, "bf16", &mut calls);
    calls
}

/// Chunks of one feature and of many, in vectors and one by one, with blueprints in the element type and in f32.
pub fn chunks(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for ([rows, features, seeds], table) in
        [([65_536, 4096, 256], dtype), ([64, 1024, 1000], DType::F32), ([129, 257, 1], dtype)]
    {
        let of = |ints: DType| {
            let ints = || tensor(client, [seeds], ints);
            kasmina::Blueprints {
                rows: tensor(client, [10, features], table),
                alpha: tensor(client, [seeds], table),
                lifecycle: ints(),
                blueprint_id: ints(),
                blend: ints(),
            }
        };
        let x = || tensor(client, [rows, features], dtype);
        let name = format!("{name} {rows}x{features} in {seeds}");
        let (given, forward) = (x(), of(DType::I32));
        calls.push(Call {
            name: format!("kasmina {name}"),
            run: Box::new(move || drop(CubeBackend::kasmina(given, forward))),
        });
        let int = |of: DType| tensor(client, [seeds], of);
        let state = kasmina::State {
            alpha: tensor(client, [seeds], table),
            lifecycle: int(DType::I32),
            blueprint_id: int(DType::I32),
            blend: int(DType::I32),
        };
        let (codes, alphas) = (tensor(client, [3, 5], DType::I32), tensor(client, [3], DType::F32));
        calls.push(Call {
            name: format!("kasmina.change {name}"),
            run: Box::new(move || drop(CubeBackend::kasmina_change(state, codes, alphas))),
        });
        for wanted in [[true; 3], [true, false, false]] {
            let of = kasmina::Backward { dy: x(), x: x(), of: of(DType::I32), wanted };
            let which = if wanted[1] { "" } else { " of x" };
            calls.push(Call {
                name: format!("kasmina.grad{which} {name}"),
                run: Box::new(move || drop(CubeBackend::kasmina_backward(of))),
            });
        }
    }
}

/// Chunks with MLPs: of 32 and 64 features, and of such that are read one by one.
pub fn mlps(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for [rows, features, seeds] in
        [[65_536usize, 4096, 128], [65_536, 4096, 64], [64, 1000, 300], [129, 257, 5]]
    {
        let width = features.div_ceil(seeds);
        let of = || {
            let ints = || tensor(client, [seeds], DType::I32);
            kasmina::Blueprints {
                rows: tensor(client, [10, features], dtype),
                alpha: tensor(client, [seeds], dtype),
                lifecycle: ints(),
                blueprint_id: ints(),
                blend: ints(),
            }
        };
        let x = || tensor(client, [rows, features], dtype);
        let mlps = || tensor(client, [10, mlp_rows(width), width], dtype);
        let name = format!("{name} {rows}x{features} in {seeds}");
        let (given, blueprints, table) = (x(), of(), mlps());
        calls.push(Call {
            name: format!("kasmina_mlp {name}"),
            run: Box::new(move || drop(CubeBackend::kasmina_mlp(given, blueprints, table))),
        });
        for wanted in [[true; 4], [true, false, false, false]] {
            let of = kasmina_mlp::Backward { dy: x(), x: x(), of: of(), mlps: mlps(), wanted };
            let which = if wanted[1] { "" } else { " of x" };
            calls.push(Call {
                name: format!("kasmina_mlp.grad{which} {name}"),
                run: Box::new(move || drop(CubeBackend::kasmina_mlp_backward(of))),
            });
        }
    }
}
