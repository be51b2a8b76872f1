//! Rotary position embedding as a module that holds its table; it has no parameters.

use crate::expect;
use burn::config::Config;
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::{Device, Tensor};
use kiln_ops::prelude::{RopeOptions, RopeTable, rope, rope_qk, rope_qkv};

/// Configuration of [`Rope`].
#[derive(Config, Debug)]
pub struct RopeConfig {
    /// Number of positions.
    pub positions: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Frequencies and layout.
    #[config(default = "kiln_ops::rope::RopeOptions::default()")]
    pub options: RopeOptions,
}

/// Turns queries and keys by their position.
#[derive(Debug, Clone)]
pub struct Rope {
    config: RopeConfig,
    table: RopeTable,
    device: Device,
}

impl RopeConfig {
    /// The table of cosines and sines on `device`.
    ///
    /// # Panics
    ///
    /// With the message of [`kiln_ops::OpError`] if the width is odd or the base is not above 0.
    #[track_caller]
    pub fn init(&self, device: &Device) -> Rope {
        let table = expect(RopeTable::new(self.positions, self.head_dim, self.options, device));
        Rope { config: self.clone(), table, device: device.clone() }
    }
}

impl Rope {
    /// Turns `x`, `[B, H, T, head_dim]`, whose first position is `offset`.
    ///
    /// # Panics
    ///
    /// With the message of [`kiln_ops::OpError`] if the width does not fit or the positions end.
    #[track_caller]
    pub fn forward(&self, x: Tensor<4>, offset: usize) -> Tensor<4> {
        expect(rope(x, &self.table, offset))
    }

    /// Turns queries and keys, `[B, heads, T, head_dim]`, in one launch.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), and if batch, positions or element types differ.
    #[track_caller]
    pub fn forward_qk(&self, q: Tensor<4>, k: Tensor<4>, offset: usize) -> (Tensor<4>, Tensor<4>) {
        expect(rope_qk(q, k, &self.table, offset))
    }

    /// Turns queries and keys of a packed tensor, `[B, T, (heads + 2 · kv_heads) · head_dim]`.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn forward_qkv(
        &self,
        qkv: Tensor<3>,
        heads: usize,
        kv_heads: usize,
        offset: usize,
    ) -> Tensor<3> {
        expect(rope_qkv(qkv, heads, kv_heads, &self.table, offset))
    }

    /// Number of positions.
    pub fn positions(&self) -> usize {
        self.config.positions
    }
}

/// The table follows the module from device to device and is no parameter.
impl Module for Rope {
    fn collect_devices(&self, mut devices: Devices) -> Devices {
        if !devices.contains(&self.device) {
            devices.push(self.device.clone());
        }
        devices
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn to_device(self, device: &Device) -> Self {
        if *device == self.device { self } else { self.config.init(device) }
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        self
    }
}

impl ModuleDisplayDefault for Rope {
    fn content(&self, content: Content) -> Option<Content> {
        content
            .add("positions", &self.config.positions)
            .add("head_dim", &self.config.head_dim)
            .optional()
    }
}

impl ModuleDisplay for Rope {}
