//! Calls of the Kasmina layer.

use crate::calls::{Call, tensor};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use cubecl::client::Client;
use kiln_ops::kasmina::backend::{self as kasmina, KasminaGradOps, KasminaOps, KasminaSeedOps};

/// Forward and backward of the Kasmina layer in f32.
pub fn chunks_of(client: &Client) -> Vec<Call> {
    let mut calls = vec![];
    chunks(client, DType::F32, "f32", &mut calls);
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
