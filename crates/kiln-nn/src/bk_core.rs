//! A layer that mixes positions by the resolvent of chains: each token sets one site of each chain, and what comes back
//! is the diagonal of (T − zI)⁻¹, G.
//!
//! v = clamp(x · w_in, ±limit), a channel of which is a chain: T has a = −2 + v on its diagonal and 1 beside it,
//! z = i·damping. y = (Re G, Im G) · w_out. With α_t = a_t − z a causal layer has G_t = 1/(α_t − G_{t−1}): the last G is
//! all it has to remember.
//!
//! T is symmetric and Im z = damping > 0, so that |G| ≤ 1/damping. What a site knows of those before it fades with the
//! distance, the faster the larger `damping` is.
//!
//! Source: the BK-Core of Project-ResNet-BK, which has one chain, limits of ±3 and a damping of 1, and takes the whole
//! chain, what comes after a token included.

use crate::{BkState, Linear, LinearConfig, check_size, expect};
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay};
use burn::nn::Initializer;
use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_ops::prelude::{BkMode, BkOptions, bk};

/// Configuration of [`BkCore`].
#[derive(Config, Debug)]
pub struct BkCoreConfig {
    /// Width of input and output.
    pub width: usize,
    /// Number of chains.
    pub channels: usize,
    /// Whether a position knows itself and those before it alone, as a model of language must; otherwise all.
    #[config(default = true)]
    pub causal: bool,
    /// A limit on v, above 0 and at most 10⁶.
    #[config(default = 3.0)]
    pub limit: f64,
    /// Im z, from 10⁻⁶ to 10⁶.
    #[config(default = 1.0)]
    pub damping: f64,
    /// A limit m on |G|, above 0: G · min(1, m/|G|). It does nothing from 1/`damping` on.
    pub max_abs: Option<f64>,
    /// Start values of the matrices.
    #[config(default = "crate::default_initializer()")]
    pub initializer: Initializer,
}

/// The resolvent of chains over `[B, T, width]`.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct BkCore {
    /// To the chains, `[width, channels]`.
    pub w_in: Linear,
    /// Back to the residual stream, `[2 · channels, width]`; its rows are Re G and Im G of the first chain, then of the
    /// second.
    pub w_out: Linear,
    causal: bool,
    limit: f64,
    damping: f64,
    max_abs: Option<f64>,
}

impl BkCoreConfig {
    /// A layer with start values.
    ///
    /// # Panics
    ///
    /// If `width` or `channels` is 0, or `limit`, `damping` or `max_abs` is out of range.
    #[track_caller]
    pub fn init(&self, device: &Device) -> BkCore {
        let Self { width, channels, limit, damping, .. } = *self;
        check_size("bk_core", "width", width);
        check_size("bk_core", "channels", channels);
        let fits = limit > 0.0 && limit <= 1e6;
        assert!(fits, "bk_core: limit = {limit}, expected above 0 and at most 1e6");
        // Within these the squares of G and of its inverse are within f32.
        let fits = (1e-6..=1e6).contains(&damping);
        assert!(fits, "bk_core: damping = {damping}, expected from 1e-6 to 1e6");
        if let Some(most) = self.max_abs {
            let fits = most > 0.0 && most <= f64::from(f32::MAX);
            assert!(fits, "bk_core: max_abs = {most}, expected a number above 0, within f32");
        }
        let linear = |d_input, d_output| {
            let config = LinearConfig::new(d_input, d_output);
            config.with_initializer(self.initializer.clone()).init(device)
        };
        BkCore {
            w_in: linear(width, channels),
            w_out: linear(2 * channels, width),
            causal: self.causal,
            limit,
            damping,
            max_abs: self.max_abs,
        }
    }
}

impl BkCore {
    /// Number of chains.
    pub fn channels(&self) -> usize {
        let [_, channels] = self.w_in.weight.shape().dims();
        channels
    }

    /// The layer for all positions of `x`, `[B, T, width]`, in its element type; the chains are f32.
    ///
    /// # Panics
    ///
    /// If `x` has another width, or no elements.
    #[track_caller]
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = x.dtype();
        let g = self.resolvent(self.diagonal(x), self.max_abs);
        self.project(g, dtype)
    }

    /// The same for positions that follow those in `state`, to which they are added. The first call takes its positions
    /// in parallel, later ones go one by one. For generation: no gradient flows through it.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward); if the layer is not causal; and if what is in the state is of another batch, number
    /// of chains or device.
    #[track_caller]
    pub fn forward_cached(&self, x: Tensor<3>, state: &mut BkState) -> Tensor<3> {
        assert!(self.causal, "bk_core: a layer that is not causal has no state");
        let (dtype, tracked) = (x.dtype(), x.is_autodiff());
        let a = self.diagonal(x).inner();
        let [batch, length, channels] = a.dims();
        let held = state.of(batch, channels, &a.device());
        let g = match (held, length) {
            // G before the first site is 0.
            (None, 1) => {
                let zeros = Tensor::zeros_like(&a).reshape([batch, channels]);
                self.steps(a, [zeros.clone(), zeros])
            }
            // The limit is not for what the next sites go on from.
            (None, _) => self.resolvent(a, None),
            (Some(last), _) => self.steps(a, last),
        };
        let last = g.clone().narrow(1, length - 1, 1);
        let part = |i| last.clone().narrow(3, i, 1).reshape([batch, channels]);
        state.put([part(0), part(1)], length);
        let g = self.limited(g);
        self.project(if tracked { g.autodiff() } else { g }, dtype)
    }

    /// a, `[B, T, channels]` in f32.
    #[track_caller]
    fn diagonal(&self, x: Tensor<3>) -> Tensor<3> {
        let ([batch, length, found], [width, _]) = (x.dims(), self.w_in.weight.shape().dims());
        let fits = found == width && batch * length > 0;
        assert!(
            fits,
            "bk_core: `x` has shape {:?}, expected [B, T, {width}] with B and T at least 1",
            [batch, length, found]
        );
        self.w_in.forward(x).cast(DType::F32).clamp(-self.limit, self.limit) - 2.0
    }

    /// G of whole chains, `[B, T, channels, 2]`.
    #[track_caller]
    fn resolvent(&self, a: Tensor<3>, max_abs: Option<f64>) -> Tensor<4> {
        let [batch, length, channels] = a.dims();
        let options = (&a.device(), DType::F32);
        let a = a.swap_dims(1, 2).reshape([batch * channels, length]);
        let ones = Tensor::<2>::ones([1, length - 1], options);
        let z = TensorData::new(vec![0.0, self.damping as f32], [1, 2]);
        let mode = if self.causal { BkMode::Causal } else { BkMode::Full };
        let z = Tensor::from_data(z, options);
        let g = expect(bk(a, ones.clone(), ones, z, BkOptions { mode, max_abs }));
        g.reshape([batch, channels, length, 2]).swap_dims(1, 2)
    }

    /// The same for sites behind one whose G is (re, im), `[B, channels]` each.
    fn steps(&self, a: Tensor<3>, last: [Tensor<2>; 2]) -> Tensor<4> {
        let [batch, length, channels] = a.dims();
        let [mut re, mut im] = last;
        let site = |t| a.clone().narrow(1, t, 1).reshape([batch, channels]);
        let all = (0..length).map(|t| {
            // The pivot δ = α − G of the site before it, and its inverse.
            let pivot = [site(t) - re.clone(), -im.clone() - self.damping];
            let [x, y] = pivot.clone();
            let square = x.clone() * x + y.clone() * y;
            let [x, y] = pivot;
            (re, im) = (x / square.clone(), -y / square);
            Tensor::stack::<3>(vec![re.clone(), im.clone()], 2)
        });
        Tensor::stack(all.collect(), 1)
    }

    /// G · min(1, max_abs/|G|).
    fn limited(&self, g: Tensor<4>) -> Tensor<4> {
        let Some(most) = self.max_abs else { return g };
        let size = (g.clone() * g.clone()).sum_dim(3).sqrt();
        let factor = size.clamp_min(f32::MIN_POSITIVE).recip().mul_scalar(most).clamp_max(1.0);
        g * factor
    }

    /// From G, `[B, T, channels, 2]`, to `[B, T, width]`.
    #[track_caller]
    fn project(&self, g: Tensor<4>, dtype: DType) -> Tensor<3> {
        let [batch, length, channels, _] = g.dims();
        self.w_out.forward(g.reshape([batch, length, 2 * channels]).cast(dtype))
    }
}

impl ModuleDisplay for BkCore {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [width, channels] = self.w_in.weight.shape().dims();
        let content = content.add("width", &width).add("channels", &channels);
        content.add("causal", &self.causal).add("damping", &self.damping).optional()
    }
}
