//! Calls of hyper-connections: what precedes a layer, what follows it, and both between two.

use crate::calls::{Call, tensor};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use cubecl::client::Client;
use kiln_ops::autodiff::Maybe;
use kiln_ops::mhc_post::backend::{self as mhc_post, MhcPostGradOps, MhcPostOps};
use kiln_ops::mhc_post_pre::backend::{self as mhc_post_pre, MhcPostPreGradOps, MhcPostPreOps};
use kiln_ops::mhc_pre::MhcPreOptions;
use kiln_ops::mhc_pre::backend::{self as mhc_pre, MhcPreGradOps, MhcPreOps};

/// Four streams, narrow and wide, and eight.
pub fn after_a_layer(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for [s, n, d] in [[4096, 4, 768], [512, 4, 7168], [512, 8, 1024]] {
        let x = || tensor(client, [8, s, n, d], dtype);
        let f = || tensor(client, [8, s, d], dtype);
        let h = || {
            let (post, res) = ([8, s, n], [8, s, n, n]);
            (tensor(client, post, DType::F32), tensor(client, res, DType::F32))
        };
        let size = format!("{name} {}x{n}x{d}", 8 * s);
        let mut call = |op: &str, run: Box<dyn FnOnce()>| {
            calls.push(Call { name: format!("{op} {size}"), run });
        };
        let (op, (h_post, h_res)) = ("mhc_post", h());
        let of = mhc_post::Forward { op, x: x(), f: f(), h_post, h_res };
        call(op, Box::new(|| drop(CubeBackend::mhc_post(of))));
        let (wanted, (h_post, h_res)) = ([true; 4], h());
        let of = mhc_post::Backward { op, dy: x(), x: x(), f: f(), h_post, h_res, wanted };
        call("mhc_post.grad", Box::new(|| drop(CubeBackend::mhc_post_backward(of))));
    }
}

/// `[B, S, n, D]` and repeats: four streams with Sinkhorn, other numbers of them, and eight, ragged, without.
const HYPER: [([usize; 4], usize); 8] = [
    ([1, 4096, 4, 768], 20),
    ([1, 4096, 4, 2560], 20),
    ([1, 4096, 4, 7168], 20),
    ([1, 4096, 1, 768], 20),
    ([1, 4096, 2, 768], 20),
    ([1, 4096, 3, 768], 20),
    ([1, 4096, 5, 768], 20),
    ([1, 512, 8, 257], 0),
];

pub fn before_a_layer(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for ([b, s, n, d], sinkhorn) in HYPER {
        let (tokens, rows) = (b * s, n * (n + 2));
        let f32 = |shape: [usize; 2]| tensor(client, shape, DType::F32);
        let row = |size: usize| tensor(client, [size], DType::F32);
        let options = MhcPreOptions { sinkhorn, ..MhcPreOptions::default() };
        let forward = || mhc_pre::Forward {
            op: "mhc_pre",
            x: tensor(client, [b, s, n, d], dtype),
            phi: f32([rows, n * d]),
            alpha: row(3),
            bias: row(rows),
            options,
            family: None,
        };
        let mut call = |op: &str, run: Box<dyn FnOnce()>| {
            calls.push(Call { name: format!("{op} {name} {b}x{s}x{n}x{d}"), run });
        };
        let of = forward();
        call("mhc_pre", Box::new(|| drop(CubeBackend::mhc_pre(of, true))));
        let of = mhc_pre::Backward {
            of: forward(),
            dh_in: Maybe::Some(tensor(client, [b, s, d], dtype)),
            dh_post: Maybe::Some(tensor(client, [b, s, n], DType::F32)),
            dh_res: Maybe::Some(tensor(client, [b, s, n, n], DType::F32)),
            mix: f32([tokens, rows]),
            norm: row(tokens),
            also: Maybe::None,
            wanted: [true; 4],
        };
        call("mhc_pre.grad", Box::new(|| drop(CubeBackend::mhc_pre_backward(of))));
    }
}

/// Kernels that the operators of both sides have too stand under their names: these calls come later.
pub fn between_layers(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    for ([b, s, n, d], sinkhorn) in HYPER {
        let (tokens, rows) = (b * s, n * (n + 2));
        let f32 = |shape: [usize; 2]| tensor(client, shape, DType::F32);
        let row = |size: usize| tensor(client, [size], DType::F32);
        let options = MhcPreOptions { sinkhorn, ..MhcPreOptions::default() };
        let mut call = |op: &str, run: Box<dyn FnOnce()>| {
            calls.push(Call { name: format!("{op} {name} {b}x{s}x{n}x{d}"), run });
        };
        let x = || tensor(client, [b, s, n, d], dtype);
        let between = || mhc_post_pre::Forward {
            post: mhc_post::Forward {
                op: "mhc_post_pre",
                x: x(),
                f: tensor(client, [b, s, d], dtype),
                h_post: tensor(client, [b, s, n], DType::F32),
                h_res: tensor(client, [b, s, n, n], DType::F32),
            },
            phi: f32([rows, n * d]),
            alpha: row(3),
            bias: row(rows),
            options,
            family: None,
        };
        let of = between();
        call("mhc_post_pre", Box::new(|| drop(CubeBackend::mhc_post_pre(of, true))));
        let backward = |wanted: [bool; 7]| mhc_post_pre::Backward {
            of: between(),
            y: x(),
            dy: Maybe::Some(x()),
            dh_in: Maybe::Some(tensor(client, [b, s, d], dtype)),
            dh_post: Maybe::Some(tensor(client, [b, s, n], DType::F32)),
            dh_res: Maybe::Some(tensor(client, [b, s, n, n], DType::F32)),
            mix: f32([tokens, rows]),
            norm: row(tokens),
            wanted,
        };
        let of = backward([true; 7]);
        call("mhc_post_pre.grad", Box::new(|| drop(CubeBackend::mhc_post_pre_backward(of))));
        // mhc_post's gradients by themselves.
        let of = backward([true, false, true, true, true, true, true]);
        call("mhc_post_pre.some", Box::new(|| drop(CubeBackend::mhc_post_pre_backward(of))));
        // Before the head of a model, which reads h_in alone.
        let none = || Maybe::None;
        let of = mhc_post_pre::Backward {
            dy: none(),
            dh_post: none(),
            dh_res: none(),
            ..backward([true; 7])
        };
        call("mhc_post_pre.head", Box::new(|| drop(CubeBackend::mhc_post_pre_backward(of))));
    }
}
