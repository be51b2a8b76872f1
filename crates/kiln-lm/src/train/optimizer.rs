//! The optimizer that a configuration describes: which settings each parameter has.

use super::TrainError;
use crate::config::{GroupConfig, ModelConfig, OptimizerConfig, OptimizerKind};
use crate::names::{name, names};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use kiln_optim::Names;
use kiln_optim::prelude::*;

/// The optimizer for this model. Its decay spares norms, biases and embeddings, and
/// `[[optimizer.groups]]` make exceptions.
///
/// # Errors
///
/// [`TrainError::NoSuchParameters`] if a group holds no parameter.
pub(super) fn optimizer<M: Module>(
    config: &OptimizerConfig,
    of: &ModelConfig,
    model: &M,
) -> Result<Optimizer, TrainError> {
    let parameters = parameters(model);
    for GroupConfig { parameters: pattern, .. } in &config.groups {
        if !parameters.iter().any(|parameter| matches(pattern, &parameter.name)) {
            let pattern = pattern.clone();
            let names = parameters.into_iter().map(|parameter| parameter.name).collect();
            return Err(TrainError::NoSuchParameters { pattern, names });
        }
    }
    let default = rule(config, OptimizerKind::AdamW, config.weight_decay, vec![]);
    let mut groups: Vec<(Settings, Vec<ParamId>)> = Vec::new();
    for parameter in parameters {
        let settings = settings(config, of, &parameter);
        match groups.iter_mut().find(|(of, _)| *of == settings) {
            Some((_, ids)) => ids.push(parameter.id),
            None => groups.push((settings, vec![parameter.id])),
        }
    }
    let optimizer = Optimizer::new(default).with_names(name);
    Ok(groups.into_iter().fold(optimizer, |optimizer, (settings, ids)| {
        optimizer.with_group(ParamGroup::from_ids(ids), settings)
    }))
}

/// `columns` are those of the matrices that a weight has side by side.
fn rule(
    config: &OptimizerConfig,
    kind: OptimizerKind,
    weight_decay: f64,
    columns: Vec<usize>,
) -> Rule {
    let adamw = AdamWConfig::new()
        .with_beta1(config.beta1)
        .with_beta2(config.beta2)
        .with_eps(config.eps)
        .with_weight_decay(weight_decay);
    match kind {
        OptimizerKind::AdamW => adamw.into(),
        OptimizerKind::Muon => MuonConfig::new()
            .with_momentum(config.momentum)
            .with_weight_decay(weight_decay)
            .with_columns(columns)
            // One learning rate serves both.
            .with_learning_rate_scale(LearningRateScale::MatchRmsAdamW)
            .with_adamw(adamw)
            .into(),
    }
}

fn settings(config: &OptimizerConfig, of: &ModelConfig, parameter: &Parameter) -> Settings {
    let name = &parameter.name;
    // Seeds too: a frozen one has no gradient, and decay would move it all the same.
    let of_seeds = matches("*.seeds.*", name);
    let spared = parameter.rank < 2 || of_seeds || matches("embedding.*", name);
    let weight_decay = if spared { 0.0 } else { config.weight_decay };
    // The small projections that weigh streams are none of a hidden layer.
    let small = of_seeds || matches("*.phi", name);
    let hidden = parameter.rank >= 2 && matches("blocks.*", name) && !small;
    let kind = if hidden { config.kind } else { OptimizerKind::AdamW };
    let columns = match matches("*.w_qkv.weight", name) {
        true => [of.heads, of.resolved_kv_heads(), of.resolved_kv_heads()]
            .map(|heads| heads * (of.width / of.heads))
            .into(),
        false => vec![],
    };
    let holds = |group: &&GroupConfig| matches(&group.parameters, name);
    match config.groups.iter().rev().find(holds) {
        Some(group) => {
            let kind = group.kind.unwrap_or(kind);
            let weight_decay = group.weight_decay.unwrap_or(weight_decay);
            Settings::from(rule(config, kind, weight_decay, columns))
                .with_learning_rate_scale(group.learning_rate_scale)
        }
        None => rule(config, kind, weight_decay, columns).into(),
    }
}

pub(super) struct Parameter {
    pub(super) id: ParamId,
    pub(super) name: String,
    rank: usize,
}

/// Those of a model, in its order.
pub(super) fn parameters<M: Module>(model: &M) -> Vec<Parameter> {
    struct Collect {
        names: Names,
        found: Vec<Parameter>,
    }
    impl ModuleVisitor for Collect {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.names.enter(name);
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.names.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.found.push(Parameter { id: param.id, name: self.names.name(), rank: D });
        }
    }
    let mut collect = Collect { names: names(), found: vec![] };
    model.visit(&mut collect);
    collect.found
}

/// Whether a name is of a pattern in which `*` stands for any characters, also none.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        // The earliest place leaves most for the parts that follow.
        match name.find(part) {
            Some(at) => name = &name[at + part.len()..],
            None => return false,
        }
    }
    name.ends_with(last)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::config::ModelConfig;
    use crate::model::Transformer;
    use crate::tensors::record;
    use burn::tensor::Device;
    use std::collections::BTreeMap;

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, name, expected) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("*", "", true),
            ("a.*", "a.b.c", true),
            ("a.*", "b.a.c", false),
            ("*.mlp.*", "blocks.0.mlp.w_up", true),
            ("*.mlp.*", "blocks.0.mlp", false),
            ("a*b*b", "aab", false),
            ("a*b*b", "abb", true),
            ("a*a", "a", false),
            ("*norm*weight", "blocks.0.mlp_norm.weight", true),
            ("*ab", "aab", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    fn of() -> ModelConfig {
        let config = ModelConfig { layers: 2, width: 16, heads: 2, ..Default::default() };
        ModelConfig { tied_embeddings: false, ..config }
    }

    fn model() -> Transformer {
        of().init(30, 1, &Device::flex().autodiff())
    }

    /// Every parameter after a step against gradients of 0, as a multiple of what it was.
    fn shrunk(config: &OptimizerConfig) -> BTreeMap<String, f64> {
        struct Zeros(GradientsParams);
        impl ModuleVisitor for Zeros {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.register(param.id, param.val().inner().zeros_like());
            }
        }
        let model = model();
        let before: BTreeMap<_, _> = record(&model).into_iter().collect();
        let mut zeros = Zeros(GradientsParams::new());
        model.visit(&mut zeros);
        let mut optimizer = optimizer(config, &of(), &model).unwrap();
        let after = record(&optimizer.step(model, zeros.0, 0.5));
        let ratio = |(name, data): (String, burn::tensor::TensorData)| {
            let before: Vec<f64> = before[&name].iter::<f64>().collect();
            let after: Vec<f64> = data.iter::<f64>().collect();
            let ratio = after[0] / before[0];
            let all = before.iter().zip(&after).all(|(b, a)| (a - b * ratio).abs() < 1e-6);
            assert!(all, "{name}");
            (name, (ratio * 1e4).round() / 1e4)
        };
        after.into_iter().map(ratio).collect()
    }

    #[test]
    fn decay_spares_embedding_and_norms_and_nothing_else() {
        let config = OptimizerConfig { weight_decay: 0.1, ..Default::default() };
        let shrunk = shrunk(&config);
        assert_eq!(shrunk.len(), 1 + 2 * 7 + 2);
        for (name, ratio) in shrunk {
            let spared = name == "embedding.weight" || name.ends_with("norm.weight");
            assert_eq!(ratio, if spared { 1.0 } else { 0.95 }, "{name}");
        }
    }

    #[test]
    fn groups_make_exceptions_and_the_last_counts() {
        let group = |parameters: &str, learning_rate_scale, weight_decay| GroupConfig {
            parameters: parameters.into(),
            kind: None,
            learning_rate_scale,
            weight_decay,
        };
        let config = OptimizerConfig {
            weight_decay: 0.1,
            groups: vec![
                group("blocks.*", 0.5, None),
                group("embedding.*", 1.0, Some(0.2)),
                group("*.attention.*", 2.0, Some(0.0)),
                group("blocks.1.attention.*", 2.0, None),
            ],
            ..Default::default()
        };
        let shrunk = shrunk(&config);
        for (name, expected) in [
            ("embedding.weight", 0.9),
            ("blocks.0.mlp.w_up", 0.975),
            // Nothing was said of its decay.
            ("blocks.0.mlp_norm.weight", 1.0),
            ("blocks.0.attention.w_qkv.weight", 1.0),
            ("blocks.1.attention.w_qkv.weight", 0.9),
            ("head.weight", 0.95),
            ("norm.weight", 1.0),
        ] {
            assert_eq!(shrunk[name], expected, "{name}");
        }
    }

    #[test]
    fn muon_moves_the_matrices_of_blocks_and_decays_as_adamw_does() {
        let config =
            OptimizerConfig { kind: OptimizerKind::Muon, weight_decay: 0.1, ..Default::default() };
        let model = model();
        let names: Vec<String> = parameters(&model).into_iter().map(|of| of.name).collect();
        let kind = |name: &str, rank| {
            let parameter = Parameter { id: ParamId::new(), name: name.into(), rank };
            let model = ModelConfig { kv_heads: 1, ..of() };
            settings(&config, &model, &parameter).rule
        };
        for name in &names {
            let rank = if name.contains("norm") { 1 } else { 2 };
            let hidden = rank == 2 && name.starts_with("blocks.");
            assert_eq!(matches!(kind(name, rank), Rule::Muon(_)), hidden, "{name}");
        }
        assert!(matches!(kind("blocks.0.mixer_connection.phi", 2), Rule::AdamW(_)));
        // Queries, keys and values are matrices of their own.
        match kind("blocks.0.attention.w_qkv.weight", 2) {
            Rule::Muon(muon) => assert_eq!(muon.columns, [16, 8, 8]),
            rule => panic!("{rule:?}"),
        }
        let wide = ModelConfig { kv_heads: 1, ..of() };
        let record = record(&wide.init(30, 1, &Device::flex().autodiff()));
        let qkv = record.iter().find(|(name, _)| name == "blocks.0.attention.w_qkv.weight");
        assert_eq!(qkv.expect("it is there").1.shape().as_slice(), [16, 32]);
        for (name, ratio) in shrunk(&config) {
            let spared = name == "embedding.weight" || name.ends_with("norm.weight");
            assert_eq!(ratio, if spared { 1.0 } else { 0.95 }, "{name}");
        }
    }

    #[test]
    fn a_group_of_nothing_is_named() {
        let group = GroupConfig {
            parameters: "blocks.*.mpl.*".into(),
            kind: None,
            learning_rate_scale: 1.0,
            weight_decay: None,
        };
        let config = OptimizerConfig { groups: vec![group], ..Default::default() };
        let line = optimizer(&config, &of(), &model()).err().unwrap().to_string();
        assert!(
            line.starts_with("optimizer.groups: `blocks.*.mpl.*` is no parameter of"),
            "{line}"
        );
        assert!(line.contains("blocks.0.mlp.w_up") && line.contains("embedding.weight"), "{line}");
    }
}
