//! What the parameters of the model are called: in checkpoints, in the seeds of their first values, and in
//! `[[optimizer.groups]]`.
//!
//! A name outlives the fields of the code: where a field holds one of several kinds of layers, its path in
//! the module says `mixer.Attention`, and the name says `attention`.

use kiln_optim::Names;

/// Part of a path, and what it is called.
const NAMES: [(&str, &str); 6] = [
    ("mixer.Attention", "attention"),
    ("mixer.Bk", "bk"),
    // Named when attention was the only mixer.
    ("mixer_norm", "attention_norm"),
    ("mlp.SwiGlu", "mlp"),
    // Under the name that it has without seeds.
    ("mlp.Kasmina.base", "mlp"),
    ("mlp.Kasmina.seeds", "mlp.seeds"),
];

/// The name of the parameter at a path in the model.
pub(crate) fn name(path: &str) -> String {
    let mut name = format!(".{path}.");
    for (part, called) in NAMES {
        name = name.replace(&format!(".{part}."), &format!(".{called}."));
    }
    name.trim_matches('.').to_string()
}

/// Names on a walk over the model or a part of it.
pub(crate) fn names() -> Names {
    Names::new(name)
}

#[cfg(test)]
mod tests {
    use super::name;

    #[test]
    fn whole_parts_of_a_path_are_named() {
        for (path, expected) in [
            ("blocks.0.mixer.Attention.w_qkv.weight", "blocks.0.attention.w_qkv.weight"),
            ("blocks.0.mixer.Bk.w_in.weight", "blocks.0.bk.w_in.weight"),
            ("blocks.11.mixer_norm.weight", "blocks.11.attention_norm.weight"),
            ("blocks.1.mlp.SwiGlu.w_down", "blocks.1.mlp.w_down"),
            ("blocks.1.mlp.Kasmina.base.w_down", "blocks.1.mlp.w_down"),
            ("blocks.1.mlp.Kasmina.seeds.mlps", "blocks.1.mlp.seeds.mlps"),
            ("blocks.1.mlp_norm.weight", "blocks.1.mlp_norm.weight"),
            ("embedding.weight", "embedding.weight"),
            ("remixer.Attentions", "remixer.Attentions"),
        ] {
            assert_eq!(name(path), expected);
        }
    }
}
