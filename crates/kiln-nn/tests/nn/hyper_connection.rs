//! Hyper-connections on the CPU: what they begin as, gradients, element types, messages.

use burn::module::{Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Device, Distribution, Tensor};
use kiln_nn::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn random<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex())
}

fn close<const D: usize>(a: Tensor<D>, b: Tensor<D>, tolerance: f32) {
    let error: f32 = (a - b).abs().max().into_scalar();
    assert!(error <= tolerance, "{error}");
}

fn message(f: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("a panic");
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).expect("a message")
}

/// With streams that are equal and weights that no token changes it is x + F(x), through several layers and the head.
#[test]
fn it_begins_as_the_plain_residual_connection() {
    let device = Device::flex();
    for (n, sinkhorn) in [(1, 20), (2, 1), (4, 20), (8, 10), (4, 0)] {
        let config = HyperConnectionConfig::new(12).with_streams(n).with_sinkhorn(sinkhorn);
        let connection = config.with_alpha(0.0).init(&device);
        let head = HyperHeadConfig::new(12).with_streams(n).with_alpha(0.0).init(&device);
        let layer = |x: Tensor<3>| x.mul_scalar(0.5).tanh();
        let x = random([2, 3, 12]);
        let mut of = streams(x.clone(), n);
        let mut plain = x;
        for _ in 0..3 {
            of = connection.forward(of, layer);
            plain = plain.clone() + layer(plain);
        }
        assert_eq!(of.dims(), [2, 3, n, 12]);
        // One stream: sigmoid(8) for 1.
        close(head.forward(of), plain, if n == 1 { 2e-2 } else { 2e-3 });
    }
}

/// What a module holds may have any element type: α and bias too are taken in f32.
#[test]
fn parameters_of_16_bits() {
    let device = Device::flex();
    let mut connection =
        HyperConnectionConfig::new(12).with_streams(3).with_alpha(0.5).init(&device);
    let mut head = HyperHeadConfig::new(12).with_streams(3).with_alpha(0.5).init(&device);
    let x = random([2, 5, 3, 12]);
    let pass = |connection: &HyperConnection, head: &HyperHead| {
        head.forward(connection.forward(x.clone(), |x| x.mul_scalar(0.5).tanh()))
    };
    let expected = pass(&connection, &head);
    fn rounded<const D: usize>(of: &mut Param<Tensor<D>>) {
        *of = Param::from_tensor(of.val().cast(DType::BF16));
    }
    for of in [&mut connection.phi, &mut head.phi] {
        rounded(of);
    }
    for of in [&mut connection.alpha, &mut connection.bias, &mut head.alpha, &mut head.bias] {
        rounded(of);
    }
    close(pass(&connection, &head), expected, 3e-2);
}

/// The streams between two layers in one operation are those of the two by themselves.
#[test]
fn streams_go_from_one_connection_to_the_next() {
    let device = Device::flex();
    let connection = HyperConnectionConfig::new(12).with_streams(3).with_alpha(1.0);
    let [first, second] = [connection.init(&device), connection.init(&device)];
    let layer = |x: Tensor<3>| x.mul_scalar(0.5).tanh();
    let x = random([2, 5, 3, 12]);
    let expected = first.forward(x.clone(), layer);
    let after = second.read(expected.clone());
    let MhcPre { x, h_in, h_post, h_res } = first.read(x);
    let next = second.read_after(MhcPost { x, f: layer(h_in), h_post, h_res });
    close(next.x, expected, 1e-6);
    close(next.h_in, after.h_in, 1e-6);
    close(next.h_post, after.h_post, 1e-6);
    close(next.h_res, after.h_res, 1e-6);
}

/// The head by its formula, and the same with what precedes it in one operation.
#[test]
fn the_head_weights_streams_by_the_token() {
    let device = Device::flex();
    let connection = HyperConnectionConfig::new(12).with_streams(3).with_alpha(1.0).init(&device);
    let mut head = HyperHeadConfig::new(12).with_streams(3).with_alpha(1.0).init(&device);
    head.phi = Param::from_tensor(random([3, 36]));
    head.bias = Param::from_tensor(random([3]));
    let x = random([2, 5, 3, 12]);

    let flat: Tensor<3> = x.clone().reshape([2, 5, 36]);
    let r = flat.clone().square().mean_dim(2).add_scalar(1e-6).sqrt().recip();
    let y = flat.matmul(head.phi.val().transpose().unsqueeze::<3>()) * r;
    let weights = sigmoid(y + head.bias.val().unsqueeze::<3>()).add_scalar(1e-6);
    let expected = (x.clone() * weights.unsqueeze_dim::<4>(3)).sum_dim(2).reshape([2, 5, 12]);
    close(head.forward(x.clone()), expected, 1e-5);

    let MhcPre { x, h_in, h_post, h_res } = connection.read(x);
    let last = connection.forward(x.clone(), |x| x.mul_scalar(0.5));
    let after = MhcPost { x, f: h_in.mul_scalar(0.5), h_post, h_res };
    close(head.forward_after(after), head.forward(last), 1e-6);
}

#[test]
fn every_parameter_has_a_gradient() {
    let device = Device::flex().autodiff();
    let connection = HyperConnectionConfig::new(8).with_streams(3).with_alpha(1.0).init(&device);
    let head = HyperHeadConfig::new(8).with_streams(3).init(&device);
    assert_eq!(connection.num_params(), 15 * 24 + 3 + 15);
    assert_eq!(head.num_params(), 3 * 24 + 1 + 3);
    let x = random([2, 4, 3, 8]).autodiff();
    let y = head.forward(connection.forward(x, |x| x.square()));
    let grads = y.square().sum().backward();
    let size = |grad: Tensor<1>| -> f32 { grad.abs().max().into_scalar() };
    for (name, size) in [
        ("phi", size(connection.phi.val().grad(&grads).unwrap().flatten(0, 1))),
        ("alpha", size(connection.alpha.val().grad(&grads).unwrap())),
        ("bias", size(connection.bias.val().grad(&grads).unwrap())),
        ("head.phi", size(head.phi.val().grad(&grads).unwrap().flatten(0, 1))),
        ("head.alpha", size(head.alpha.val().grad(&grads).unwrap())),
        ("head.bias", size(head.bias.val().grad(&grads).unwrap())),
    ] {
        assert!(size > 0.0 && size.is_finite(), "{name}: {size}");
    }
}

/// The weights of a stream of bf16 are those of the same numbers in f32.
#[test]
fn streams_of_16_bits_have_weights_of_f32() {
    let device = Device::flex();
    let connection = HyperConnectionConfig::new(16).with_alpha(1.0).init(&device);
    let head = HyperHeadConfig::new(16).init(&device);
    let x = random([1, 5, 4, 16]).cast(DType::BF16);
    let (half, full) = (connection.read(x.clone()), connection.read(x.clone().cast(DType::F32)));
    assert_eq!((half.h_in.dtype(), half.h_res.dtype()), (DType::BF16, DType::F32));
    close(half.h_res, full.h_res, 0.0);
    let y = connection.forward(x.clone(), |x| x);
    assert_eq!(y.dtype(), DType::BF16);
    assert_eq!(head.forward(x).dtype(), DType::BF16);
}

#[test]
fn wrong_sizes_are_named() {
    let device = Device::flex();
    let connection = HyperConnectionConfig::new(8).init(&device);
    let head = HyperHeadConfig::new(8).init(&device);
    let config = |streams, sinkhorn| {
        let config = HyperConnectionConfig::new(8).with_streams(streams).with_sinkhorn(sinkhorn);
        drop(config.init(&Device::flex()));
    };
    for (found, expected) in [
        (
            message(|| drop(connection.forward(random([1, 2, 3, 8]), |x| x))),
            "hyper_connection: `x` has shape [1, 2, 3, 8], expected [B, S, 4, 8]",
        ),
        (
            message(|| drop(head.forward(random([1, 2, 4, 7])))),
            "hyper_head: `x` has shape [1, 2, 4, 7], expected [B, S, 4, 8]",
        ),
        (
            message(|| {
                let (x, f) = (random([1, 2, 3, 8]), random([1, 2, 8]));
                let (h_post, h_res) = (random([1, 2, 3]), random([1, 2, 3, 3]));
                drop(head.forward_after(MhcPost { x, f, h_post, h_res }));
            }),
            "hyper_head: `x` has shape [1, 2, 3, 8], expected [B, S, 4, 8]",
        ),
        (message(|| config(9, 1)), "hyper_connection: streams = 9, expected 1 to 8"),
        (message(|| config(0, 1)), "hyper_connection: streams = 0, expected 1 to 8"),
        (message(|| config(4, 33)), "hyper_connection: sinkhorn = 33, expected 0 to 32"),
        (
            message(|| drop(connection.forward(random([1, 2, 4, 8]), |x| x.narrow(2, 0, 4)))),
            "mhc_post: `f` has shape [1, 2, 4], expected [1, 2, 8]",
        ),
    ] {
        assert_eq!(found, expected);
    }
}
