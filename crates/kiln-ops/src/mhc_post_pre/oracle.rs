//! What follows a layer and what precedes the next, in float64.

use crate::mhc_post::oracle as post;
use crate::mhc_pre::MhcPreOptions;
use crate::mhc_pre::oracle as pre;
use crate::oracle::{Number, Path};

/// What goes into a call, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, N> {
    /// `[T, n, D]`.
    pub x: &'a [N],
    /// `[T, D]`.
    pub f: &'a [N],
    /// `[T, n]`.
    pub h_post: &'a [N],
    /// `[T, n, n]`.
    pub h_res: &'a [N],
    /// `[n² + 2n, n·D]`.
    pub phi: &'a [N],
    /// `[3]`.
    pub alpha: &'a [N],
    /// `[n² + 2n]`.
    pub bias: &'a [N],
    /// `[n, D]`, or nothing: 1.
    pub gamma: &'a [N],
}

impl<'a, N: Number> Inputs<'a, N> {
    /// The streams after the layer.
    pub fn streams(&self, n: usize) -> Vec<N> {
        post::forward(self.x, self.f, self.h_post, self.h_res, n)
    }

    /// What precedes the next layer, of these streams.
    pub fn next(&self, x: &'a [N]) -> pre::Inputs<'a, N> {
        let Self { phi, alpha, bias, gamma, .. } = *self;
        pre::Inputs { x, phi, alpha, bias, gamma }
    }
}

/// The streams, and h_in, h_post and h_res of the next layer.
pub fn forward<N: Number>(of: Inputs<'_, N>, n: usize, options: MhcPreOptions) -> [Vec<N>; 4] {
    let y = of.streams(n);
    let [h_in, h_post, h_res] = pre::forward(of.next(&y), n, options);
    [y, h_in, h_post, h_res]
}

/// The gradients of x, f, h_post, h_res, φ, α, bias and γ from the cotangents.
pub fn backward<N: Number>(
    of: Inputs<'_, N>,
    n: usize,
    options: MhcPreOptions,
    [dy, dh_in, dh_post, dh_res]: [&[N]; 4],
) -> [Vec<N>; 8] {
    let y = of.streams(n);
    let next = of.next(&y);
    let back = pre::tokens_backward(next, n, options, [dh_in, dh_post, dh_res]);
    let dy = of_streams(next, n, &back, dh_in, dy);
    let [dx, df, dpost, dres] = post::backward(of.x, of.f, of.h_post, of.h_res, n, &dy);
    let [dphi, dalpha, dbias, dgamma] = pre::over_tokens(next, n, &back);
    [dx, df, dpost, dres, dphi, dalpha, dbias, dgamma]
}

/// The gradient of the streams: what the next layer gives them and their own cotangent, which Burn adds after it has
/// rounded the first.
pub fn of_streams<N: Number>(
    next: pre::Inputs<'_, N>,
    n: usize,
    back: &pre::Tokens<N>,
    dh_in: &[N],
    dy: &[N],
) -> Vec<N> {
    let path = next.bias[0].path();
    let through = pre::all_of_x(next, n, back, dh_in).into_iter().map(|through| match path {
        Path::Fused => through,
        Path::Reference => through.stored(),
    });
    through.zip(dy).map(|(through, dy)| (through + *dy).stored()).collect()
}
