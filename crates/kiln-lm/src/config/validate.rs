//! The range of every number in a configuration, and of those that depend on one another.

use super::{Config, ConfigError, MixerKind, MlpKind, ModelConfig, ResidualKind, TokenizerConfig};
use kiln_ops::mhc_post::MAX_STREAMS;
use std::fmt::{self, Display};

/// One value that a run cannot use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// `section.key`.
    pub key: &'static str,
    /// The value, as it would be written.
    pub value: String,
    /// What is allowed: the end of a sentence that begins with "must".
    pub allowed: String,
    /// Other keys on whose values it depends whether this one is allowed.
    pub also: &'static [&'static str],
    /// File and line, or override, that set the value, where known; or the override of one of the other keys.
    pub place: Option<String>,
}

impl Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        write!(f, "{} is {}, must {}", self.key, self.value, self.allowed)
    }
}

/// Largest size or count: tensors are indexed with 32-bit integers.
const LARGEST: usize = i32::MAX as usize;

#[derive(Default)]
struct Checks {
    violations: Vec<Violation>,
}

impl Checks {
    fn check(&mut self, ok: bool, key: &'static str, value: impl Display, allowed: impl Display) {
        self.check_with(ok, key, &[], value, allowed);
    }

    /// The same for a value that has to fit those of other keys.
    fn check_with(
        &mut self,
        ok: bool,
        key: &'static str,
        also: &'static [&'static str],
        value: impl Display,
        allowed: impl Display,
    ) {
        if !ok {
            let (value, allowed) = (value.to_string(), allowed.to_string());
            self.violations.push(Violation { key, value, allowed, also, place: None });
        }
    }

    /// A size of a tensor: from `least` to [`LARGEST`].
    fn size(&mut self, key: &'static str, value: usize, least: usize) {
        let allowed = format_args!("be from {least} to {LARGEST}").to_string();
        self.check((least..=LARGEST).contains(&value), key, value, allowed);
    }

    fn at_least_one(&mut self, key: &'static str, value: usize) {
        self.check(value >= 1, key, value, "be 1 or more");
    }

    /// `ok` never sees NaN or an infinity: those are refused everywhere.
    fn number(&mut self, key: &'static str, value: f64, allowed: &str, ok: fn(f64) -> bool) {
        self.check(value.is_finite() && ok(value), key, value, allowed);
    }
}

impl Config {
    /// Checks that every value is in its range and that they fit one another; the error names
    /// every violation.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut checks = Checks::default();
        self.check_data(&mut checks);
        self.check_model(&mut checks);
        self.check_optimizer(&mut checks);
        self.check_seeds(&mut checks);
        self.check_train(&mut checks);
        if checks.violations.is_empty() {
            Ok(())
        } else {
            Err(ConfigError::Invalid(checks.violations))
        }
    }

    /// What is said to no effect: keys for a part that the model has not got.
    pub fn unused(&self) -> Vec<String> {
        let model = &self.model;
        let (bk, mhc, kasmina) = (
            ("no mixer is \"bk\"", model.has(MixerKind::Bk)),
            ("model.residual is not \"mhc\"", model.residual == ResidualKind::Mhc),
            ("the model has no seeds (model.mlp = \"kasmina\" has)", model.mlp == MlpKind::Kasmina),
        );
        [
            ("model.bk_channels", model.bk_channels.is_some(), bk),
            ("model.streams", model.streams.is_some(), mhc),
            ("model.seeds", model.seeds.is_some(), kasmina),
            ("model.seed_mlps", model.seed_mlps.is_some(), kasmina),
            ("[seeds]", !self.seeds.is_default(), kasmina),
        ]
        .into_iter()
        .filter(|(_, said, (_, used))| *said && !used)
        .map(|(key, _, (why, _))| format!("{key} changes nothing: {why}"))
        .collect()
    }

    fn check_data(&self, to: &mut Checks) {
        let data = &self.data;
        to.check(!data.sources.is_empty(), "data.sources", "[]", "name at least one file");
        let blank = data.sources.iter().any(|source| source.trim().is_empty());
        to.check(!blank, "data.sources", format!("{:?}", data.sources), "hold no empty name");
        to.number("data.validation", data.validation, "be above 0 and below 1", |v| {
            v > 0.0 && v < 1.0
        });
        to.check(!data.cache.as_os_str().is_empty(), "data.cache", "\"\"", "name a folder");
        match &data.tokenizer {
            TokenizerConfig::Bpe(vocabulary) => {
                // A byte-level BPE starts from the 256 bytes.
                to.size("data.tokenizer.bpe", *vocabulary, 256);
            }
            TokenizerConfig::File(path) => {
                to.check(
                    !path.as_os_str().is_empty(),
                    "data.tokenizer.file",
                    "\"\"",
                    "name a file",
                );
            }
            TokenizerConfig::Byte | TokenizerConfig::Char => {}
        }
    }

    fn check_model(&self, to: &mut Checks) {
        let model = &self.model;
        to.size("model.layers", model.layers, 1);
        to.size("model.width", model.width, 1);
        to.size("model.mlp_width", model.mlp_width, 0);
        to.size("model.context", model.context, 1);
        let mixers = model.mixer.by_turns().len();
        to.check(mixers > 0, "model.mixer", "[]", "name at least one mixer");
        if let Some(channels) = model.bk_channels {
            // Each gives two numbers.
            let fits = (1..=LARGEST / 2).contains(&channels);
            let allowed = format_args!("be from 1 to {}", LARGEST / 2).to_string();
            to.check(fits, "model.bk_channels", channels, allowed);
        }
        if let Some(streams) = model.streams {
            let fits = (1..=MAX_STREAMS).contains(&streams);
            let allowed = format_args!("be from 1 to {MAX_STREAMS}").to_string();
            to.check(fits, "model.streams", streams, allowed);
        }
        if model.mlp == MlpKind::Kasmina {
            const ALSO: &[&str] = &["model.width", "model.mlp"];
            let (seeds, width) = (model.resolved_seeds(), model.width);
            let allowed = format_args!("be from 1 to model.width ({width})").to_string();
            to.check_with((1..=width).contains(&seeds), "model.seeds", ALSO, seeds, allowed);
            // A seed takes one in its life.
            let (mlps, also) = (model.resolved_seed_mlps(), &["model.seeds", "model.mlp"]);
            let allowed = format_args!("be from 1 to model.seeds ({seeds})").to_string();
            let fits = seeds == 0 || (1..=seeds).contains(&mlps);
            to.check_with(fits, "model.seed_mlps", also, mlps, allowed);
        }
        if model.has(MixerKind::Attention) {
            check_heads(model, to);
        }
        to.number("model.dropout", model.dropout, "be 0 or more and below 1", |v| {
            (0.0..1.0).contains(&v)
        });
        to.number("model.rope_base", model.rope_base, "be above 0 and finite", |v| v > 0.0);
        to.number("model.norm_eps", model.norm_eps, "be 0 or more and finite", |v| v >= 0.0);
    }

    fn check_optimizer(&self, to: &mut Checks) {
        let optimizer = &self.optimizer;
        let (positive, not_negative) = ("be above 0 and finite", "be 0 or more and finite");
        let share = "be 0 or more and below 1";
        to.number("optimizer.learning_rate", optimizer.learning_rate, positive, |v| v > 0.0);
        to.number("optimizer.beta1", optimizer.beta1, share, |v| (0.0..1.0).contains(&v));
        to.number("optimizer.beta2", optimizer.beta2, share, |v| (0.0..1.0).contains(&v));
        to.number("optimizer.momentum", optimizer.momentum, share, |v| (0.0..1.0).contains(&v));
        to.number("optimizer.eps", optimizer.eps, positive, |v| v > 0.0);
        to.number("optimizer.weight_decay", optimizer.weight_decay, not_negative, |v| v >= 0.0);
        to.number("optimizer.clip_norm", optimizer.clip_norm, not_negative, |v| v >= 0.0);
        for group in &optimizer.groups {
            let pattern = format!("{:?}", group.parameters);
            let named = !group.parameters.trim().is_empty();
            to.check(named, "optimizer.groups.parameters", pattern, "name parameters");
            let scale = group.learning_rate_scale;
            let key = "optimizer.groups.learning_rate_scale";
            to.number(key, scale, not_negative, |v| v >= 0.0);
            let key = "optimizer.groups.weight_decay";
            to.number(key, group.weight_decay.unwrap_or(0.0), not_negative, |v| v >= 0.0);
        }

        let schedule = &self.schedule;
        to.check_with(
            schedule.warmup <= self.train.steps,
            "schedule.warmup",
            &["train.steps"],
            schedule.warmup,
            format_args!("be at most train.steps ({})", self.train.steps),
        );
        let ratio = "be from 0 to 1";
        to.number("schedule.final_ratio", schedule.final_ratio, ratio, |v| {
            (0.0..=1.0).contains(&v)
        });
        to.number("schedule.decay_share", schedule.decay_share, ratio, |v| {
            (0.0..=1.0).contains(&v)
        });
    }

    fn check_seeds(&self, to: &mut Checks) {
        let seeds = &self.seeds;
        to.at_least_one("seeds.epoch_steps", seeds.epoch_steps);
        to.at_least_one("seeds.every", seeds.every);
        to.at_least_one("seeds.ramp", seeds.ramp);
        to.at_least_one("seeds.patience", seeds.patience);
        to.at_least_one("seeds.eval_batches", seeds.eval_batches);
        let most = f64::from(seeds.reconstruction_loss);
        to.number("seeds.reconstruction_loss", most, "be 0 or more and finite", |v| v >= 0.0);
        for (key, value) in [
            ("seeds.culled_below", seeds.culled_below),
            ("seeds.total_improvement", seeds.total_improvement),
        ] {
            to.number(key, f64::from(value), "be finite", |_| true);
        }
        for (key, value) in
            [("seeds.stability", seeds.stability), ("seeds.final_stability", seeds.final_stability)]
        {
            to.number(key, f64::from(value), "be from 0 to 1", |v| (0.0..=1.0).contains(&v));
        }
    }

    fn check_train(&self, to: &mut Checks) {
        let train = &self.train;
        to.at_least_one("train.steps", train.steps);
        to.size("train.batch_size", train.batch_size, 1);
        to.size("train.accumulation", train.accumulation, 1);
        to.at_least_one("train.log_every", train.log_every);
        to.at_least_one("train.keep", train.keep);
        to.check(!train.out.as_os_str().is_empty(), "train.out", "\"\"", "name a folder");

        let sample = &self.sample;
        to.number("sample.temperature", sample.temperature, "be 0 or more and finite", |v| {
            v >= 0.0
        });
        to.number("sample.top_p", sample.top_p, "be above 0 and at most 1", |v| {
            v > 0.0 && v <= 1.0
        });
    }
}

/// What attention asks for; without a block of it these keys may be anything.
fn check_heads(model: &ModelConfig, to: &mut Checks) {
    const ALSO: &[&str] = &["model.heads", "model.mixer"];
    to.size("model.heads", model.heads, 1);
    to.size("model.kv_heads", model.kv_heads, 0);
    if model.heads >= 1 && model.width >= 1 {
        let heads = model.heads;
        if model.width.is_multiple_of(heads) {
            to.check_with(
                model.head_dim().is_multiple_of(2),
                "model.width",
                ALSO,
                model.width,
                format_args!(
                    "give an even width per head for RoPE, not {} / {heads} = {}",
                    model.width,
                    model.head_dim()
                ),
            );
        } else {
            let allowed = format_args!("be a multiple of model.heads ({heads})").to_string();
            to.check_with(false, "model.width", ALSO, model.width, allowed);
        }
        to.check_with(
            heads.is_multiple_of(model.resolved_kv_heads()),
            "model.kv_heads",
            ALSO,
            model.kv_heads,
            format_args!("divide model.heads ({heads}), or be 0 for as many"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    const MINIMAL: &str = "[data]\nsources = [\"a.txt\"]\n";

    fn violations(overrides: &[&str]) -> Vec<Violation> {
        let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
        match parse(MINIMAL, "x.toml", &overrides) {
            Ok(_) => Vec::new(),
            Err(ConfigError::Invalid(violations)) => violations,
            Err(other) => panic!("{overrides:?}: {other}"),
        }
    }

    #[test]
    fn each_number_out_of_its_range_is_named() {
        let refused = [
            "data.sources=[]",
            "data.sources=[\"a\", \" \"]",
            "data.validation=0",
            "data.validation=1.0",
            "data.validation=nan",
            "data.cache=''",
            "data.tokenizer.bpe=255",
            "data.tokenizer.file=''",
            "model.layers=0",
            "model.width=0",
            "model.heads=0",
            "model.kv_heads=3",
            "model.kv_heads=8",
            "model.mlp_width=4294967296",
            "model.context=0",
            "model.mixer=[]",
            "model.bk_channels=0",
            "model.bk_channels=1073741824",
            "model.streams=0",
            "model.streams=9",
            "model.dropout=1.0",
            "model.dropout=-0.1",
            "model.rope_base=0",
            "model.norm_eps=-1e-5",
            "optimizer.learning_rate=0",
            "optimizer.learning_rate=inf",
            "optimizer.learning_rate=nan",
            "optimizer.beta1=1",
            "optimizer.beta2=-0.1",
            "optimizer.momentum=1",
            "optimizer.eps=0.0",
            "optimizer.weight_decay=-1",
            "optimizer.clip_norm=nan",
            "optimizer.groups=[{ parameters = ' ' }]",
            "optimizer.groups=[{ parameters = 'a', learning_rate_scale = -1 }]",
            "optimizer.groups=[{ parameters = 'a' }, { parameters = 'b', weight_decay = nan }]",
            "schedule.warmup=501",
            "schedule.final_ratio=1.1",
            "schedule.decay_share=-0.1",
            "train.batch_size=0",
            "train.accumulation=0",
            "train.log_every=0",
            "train.keep=0",
            "train.out=''",
            "sample.temperature=-1",
            "sample.top_p=0",
            "sample.top_p=1.01",
        ];
        for set in refused {
            let found = violations(&[set]);
            assert_eq!(found.len(), 1, "{set}: {found:?}");
            let key = set.split('=').next().unwrap_or_default();
            // Of a group the key inside it is named too.
            assert!(found[0].key.starts_with(key), "{set}: {found:?}");
        }
    }

    #[test]
    fn the_ends_of_the_ranges_are_allowed() {
        let allowed = [
            "data.tokenizer.bpe=256",
            "model.kv_heads=1",
            "model.kv_heads=4",
            "model.dropout=0",
            "model.norm_eps=0",
            "model.mixer=['bk', 'attention', 'attention', 'bk', 'bk']",
            "model.bk_channels=1",
            "model.streams=1",
            "model.streams=8",
            "optimizer.beta1=0",
            "optimizer.clip_norm=0",
            "optimizer.weight_decay=0",
            "optimizer.groups=[{ parameters = '*', learning_rate_scale = 0, weight_decay = 0 }]",
            "schedule.warmup=500",
            "schedule.warmup=0",
            "schedule.final_ratio=0",
            "schedule.decay_share=1",
            "sample.temperature=0",
            "sample.top_p=1",
            "sample.tokens=0",
        ];
        for set in allowed {
            assert_eq!(violations(&[set]), [], "{set}");
        }
    }

    #[test]
    fn what_only_attention_needs_is_asked_for_only_where_a_block_has_it() {
        let heads = ["model.width=9", "model.heads=4", "model.kv_heads=3"];
        for (mixer, found) in [
            ("'bk'", 0),
            ("['bk', 'attention']", 2),
            // The fifth block of four.
            ("['bk', 'bk', 'bk', 'bk', 'attention']", 0),
        ] {
            let mixer = format!("model.mixer={mixer}");
            let all = violations(&[&heads[..], &[&mixer]].concat());
            assert_eq!(all.len(), found, "{mixer}: {all:?}");
        }
        let zero = violations(&["model.bk_channels=0"]);
        assert_eq!(
            zero[0].to_string(),
            "--set model.bk_channels=0: model.bk_channels is 0, must be from 1 to 1073741823"
        );
    }

    #[test]
    fn keys_of_parts_that_a_model_has_not_got_are_named() {
        let unused = |overrides: &[&str]| {
            let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
            parse(MINIMAL, "x.toml", &overrides).expect("valid").unused()
        };
        assert_eq!(unused(&[]), [""; 0]);
        for (key, part) in [
            ("model.bk_channels=3", "model.mixer=['attention', 'bk']"),
            ("model.streams=3", "model.residual=mhc"),
            ("model.seeds=2", "model.mlp=kasmina"),
            ("model.seed_mlps=1", "model.mlp=kasmina"),
            ("seeds.first=3", "model.mlp=kasmina"),
        ] {
            let [line] = &unused(&[key])[..] else { panic!("{key}") };
            let name = if key.starts_with("seeds") { "[seeds]" } else { &key[..key.len() - 2] };
            assert!(line.starts_with(&format!("{name} changes nothing: ")), "{line}");
            assert_eq!(unused(&[key, part]), [""; 0], "{key}");
        }
    }

    #[test]
    fn shapes_that_do_not_fit_say_which_number_they_miss() {
        let found = violations(&["model.width=100", "model.heads=3"]);
        assert_eq!(found.len(), 1);
        assert_eq!(
            found[0].to_string(),
            "--set model.width=100: model.width is 100, must be a multiple of model.heads (3)"
        );
        let found = violations(&["model.width=12", "model.heads=4"]);
        assert!(found[0].allowed.contains("even width per head"), "{found:?}");
        // steps = 0 also leaves the warm-up too long.
        let keys: Vec<_> = violations(&["train.steps=0"]).iter().map(|v| v.key).collect();
        assert_eq!(keys, ["schedule.warmup", "train.steps"]);
    }
}
