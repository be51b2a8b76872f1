//! The streams after a layer in float64.

use crate::oracle::Number;

/// y of `[T, n, D]`, for tokens of `n` streams.
pub fn forward<N: Number>(x: &[N], f: &[N], h_post: &[N], h_res: &[N], n: usize) -> Vec<N> {
    let tokens = Tokens::new(x, f, h_post, h_res, n);
    let mut y = Vec::with_capacity(x.len());
    for token in 0..tokens.count {
        for o in 0..n {
            y.extend((0..tokens.d).map(|d| {
                let mixed = (0..n).map(|i| tokens.res(token, o, i) * tokens.x(token, i, d));
                let layer = tokens.post(token, o) * tokens.f(token, d);
                N::sum(mixed.chain([layer])).stored()
            }));
        }
    }
    y
}

/// dx, df, dh_post and dh_res from the cotangent of y.
pub fn backward<N: Number>(
    x: &[N],
    f: &[N],
    h_post: &[N],
    h_res: &[N],
    n: usize,
    dy: &[N],
) -> [Vec<N>; 4] {
    let tokens = Tokens::new(x, f, h_post, h_res, n);
    let d = tokens.d;
    let dy = |token: usize, o: usize, at: usize| dy[(token * n + o) * d + at];
    let [mut dx, mut df, mut dpost, mut dres] = [const { vec![] }; 4];
    for token in 0..tokens.count {
        for i in 0..n {
            dx.extend((0..d).map(|at| {
                N::sum((0..n).map(|o| tokens.res(token, o, i) * dy(token, o, at))).stored()
            }));
        }
        df.extend(
            (0..d).map(|at| {
                N::sum((0..n).map(|o| tokens.post(token, o) * dy(token, o, at))).stored()
            }),
        );
        for o in 0..n {
            dpost.push(N::sum((0..d).map(|at| tokens.f(token, at) * dy(token, o, at))));
            for i in 0..n {
                dres.push(N::sum((0..d).map(|at| tokens.x(token, i, at) * dy(token, o, at))));
            }
        }
    }
    [dx, df, dpost, dres]
}

struct Tokens<'a, N> {
    inputs: [&'a [N]; 4],
    n: usize,
    d: usize,
    count: usize,
}

impl<'a, N: Number> Tokens<'a, N> {
    fn new(x: &'a [N], f: &'a [N], h_post: &'a [N], h_res: &'a [N], n: usize) -> Self {
        let count = h_post.len() / n;
        Self { inputs: [x, f, h_post, h_res], n, d: f.len() / count.max(1), count }
    }

    fn x(&self, token: usize, i: usize, at: usize) -> N {
        self.inputs[0][(token * self.n + i) * self.d + at]
    }

    fn f(&self, token: usize, at: usize) -> N {
        self.inputs[1][token * self.d + at]
    }

    fn post(&self, token: usize, o: usize) -> N {
        self.inputs[2][token * self.n + o]
    }

    fn res(&self, token: usize, o: usize, i: usize) -> N {
        self.inputs[3][(token * self.n + o) * self.n + i]
    }
}
