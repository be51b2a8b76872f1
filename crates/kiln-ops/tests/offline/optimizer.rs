//! What is called of the steps of an optimizer.

use crate::calls::{Call, tensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::zspace::metadata::Metadata;
use kiln_ops::adamw::AdamWOptions;
use kiln_ops::adamw::backend::{self as adamw, AdamWOps};
use kiln_ops::autodiff::{List, MOST, Maybe};
use kiln_ops::muon::MuonOptions;
use kiln_ops::muon::backend::{self as muon, MuonOps};
use kiln_ops::newton_schulz::backend::NewtonSchulzOps;
use kiln_ops::sum_squares::backend::SumSquaresOps;

fn list(tensors: Vec<CubeTensor>) -> List<CubeBackend> {
    tensors.into_iter().collect()
}

/// As many parameters as one launch takes.
pub fn many_steps(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    let many = |dtype: DType| {
        let of = (0..MOST).map(|k| tensor(client, [k + 1, 768], dtype));
        list(of.collect())
    };
    let (of, sums) = (many(dtype), tensor(client, [1024], DType::F32));
    calls.push(Call {
        name: format!("sum_squares {name} of many"),
        run: Box::new(move || {
            drop(CubeBackend::sum_squares(of, sums, (0..MOST).collect()));
        }),
    });
    let copies = if dtype == DType::F32 { list(vec![]) } else { many(dtype) };
    let of = adamw::Steps {
        values: many(DType::F32),
        grads: many(dtype),
        firsts: many(DType::F32),
        seconds: many(DType::F32),
        copies,
        scale: Maybe::Some(tensor(client, [1], DType::F32)),
        options: AdamWOptions::default(),
    };
    calls.push(Call {
        name: format!("adamw {name} of many"),
        run: Box::new(move || drop(CubeBackend::adamw(of))),
    });
}

/// An optimizer's step: rows without gaps, and gradients with some.
pub fn steps(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for [rows, width, pitch] in [[50_304, 768, 768], [96, 257, 264]] {
        let grad = || {
            let mut grad = tensor(client, [rows, pitch], dtype);
            *grad.meta = Metadata::new(Shape::from([rows, width]), vec![pitch, 1]);
            grad
        };
        let name = format!("{name} {rows}x{width}");
        let (of, sums) = (grad(), tensor(client, [1024], DType::F32));
        calls.push(Call {
            name: format!("sum_squares {name}"),
            run: Box::new(move || drop(CubeBackend::sum_squares(list(vec![of]), sums, vec![0]))),
        });
        let f32 = || tensor(client, [rows, width], DType::F32);
        let of = adamw::Steps {
            values: list(vec![f32()]),
            grads: list(vec![grad()]),
            firsts: list(vec![f32()]),
            seconds: list(vec![f32()]),
            copies: list(vec![]),
            scale: Maybe::Some(tensor(client, [1], DType::F32)),
            options: AdamWOptions::default(),
        };
        calls.push(Call {
            name: format!("adamw {name}"),
            run: Box::new(move || drop(CubeBackend::adamw(of))),
        });
    }
}

/// Muon: many weights, of several matrices side by side; and its iteration.
pub fn muon(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    let many = |dtype: DType| {
        let of = (0..MOST).map(|_| tensor(client, [256, 384], dtype));
        list(of.collect())
    };
    let (values, grads, momenta) = (many(DType::F32), many(dtype), many(DType::F32));
    let scale = Maybe::Some(tensor(client, [1], DType::F32));
    let options = MuonOptions { columns: vec![256, 128], dtype, ..MuonOptions::default() };
    let copies = if dtype == DType::F32 { list(vec![]) } else { many(dtype) };
    let of = muon::Steps { values, grads, momenta, copies, scale, options, family: None };
    calls.push(Call {
        name: format!("muon {name}"),
        run: Box::new(move || drop(CubeBackend::muon(of))),
    });
    // The norms of matrices, whose products are those above.
    let g = tensor(client, [2, 256, 512], dtype);
    calls.push(Call {
        name: format!("newton_schulz {name}"),
        run: Box::new(move || drop(CubeBackend::newton_schulz(g, Default::default(), None))),
    });
}
