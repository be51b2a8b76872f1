//! How kernels run: their plans are heard, and device and sizes may be taken for others.

use crate::registry::FAMILIES;
#[cfg(feature = "cube")]
use kiln_ops::launch::{
    limits::{self, Limits},
    plans::{THIN, listen},
};
use std::collections::BTreeSet;

/// What device and sizes are taken for by those who plan.
#[derive(Debug, Clone, Default)]
pub(super) struct Taken {
    /// Two multiprocessors and hardly any memory.
    pub(super) few: bool,
    /// Sizes, and those that plans reckon with instead. Chunks are of 128 rows then.
    pub(super) sizes: Vec<[usize; 2]>,
}

impl std::fmt::Display for Taken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.few {
            f.write_str(", two multiprocessors")?;
        }
        self.sizes.iter().try_for_each(|[small, large]| write!(f, ", {small} planned as {large}"))
    }
}

/// Runs `work` with that; also the plans of the kernels that ran.
pub(super) fn heard<T>(taken: &Taken, work: impl FnOnce() -> T) -> (T, BTreeSet<String>) {
    #[cfg(feature = "cube")]
    {
        let Taken { few, sizes } = taken.clone();
        let chunk_bytes = (few || !sizes.is_empty()).then_some(1);
        let limits = Limits { multiprocessors: few.then_some(2), chunk_bytes, sizes };
        limits::limited(limits, || listen(work))
    }
    #[cfg(not(feature = "cube"))]
    {
        let _ = taken;
        (work(), BTreeSet::new())
    }
}

/// Runs `work`; also the plans of the kernels that ran.
pub(crate) fn plans<T>(work: impl FnOnce() -> T) -> (T, BTreeSet<String>) {
    heard(&Taken::default(), work)
}

/// The kernel of a plan and its family, if it is of one.
pub(super) fn family_of(plan: &str) -> Option<(&str, &'static str)> {
    let (kernel, _) = plan.split_once(": ")?;
    let families = [
        ("on wgmma", "wgmma"),
        ("on mma.sync, by TMA", "mma_tma"),
        ("on mma.sync", "mma"),
        ("on plain units", "simt"),
    ];
    let of = families.into_iter().find(|(name, _)| kernel.ends_with(name))?;
    Some((kernel, of.1))
}

/// What is wrong if kernels of these families `ran` where `asked` was asked for: a faster one, since what a family cannot take
/// runs on slower ones, or, if `some` have to, none of it: of all kernels, or of those that do the same thing, forward or
/// backward.
pub(super) fn on_another_family(asked: &str, ran: &[(&str, &str)], some: bool) -> Option<String> {
    let place = |family: &str| FAMILIES.iter().position(|name| *name == family);
    if let Some((kernel, of)) = ran.iter().find(|(_, family)| place(family) < place(asked)) {
        return Some(format!("`{kernel}` ran, of {of} and not {asked}"));
    }
    let done: BTreeSet<&str> = ran.iter().map(|(kernel, _)| does(kernel)).collect();
    let fast: BTreeSet<&str> =
        ran.iter().filter(|(_, of)| *of == asked).map(|(kernel, _)| does(kernel)).collect();
    match done.difference(&fast).next() {
        _ if !some => None,
        Some(slow) => Some(format!("no `{slow}` ran on {asked}")),
        None => done.is_empty().then(|| format!("no product ran on {asked}")),
    }
}

/// What a kernel does: `attention.grad` of `attention.grad of keys on mma.sync`.
fn does(kernel: &str) -> &str {
    let end = [" of ", " on "].iter().filter_map(|word| kernel.find(word)).min();
    &kernel[..end.unwrap_or(kernel.len())]
}

/// Whether a product with a thin side is among them, on kernels of its own.
pub(super) fn thin(plans: &BTreeSet<String>) -> bool {
    #[cfg(feature = "cube")]
    return plans.iter().any(|plan| plan.starts_with(THIN));
    #[cfg(not(feature = "cube"))]
    {
        let _ = plans;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::{family_of, on_another_family};

    #[test]
    fn families_that_were_not_asked_for() {
        let (wgmma, mma) = (("a on wgmma", "wgmma"), ("a on mma.sync", "mma"));
        let (simt, few) = (("a on plain units", "simt"), ("a of few on plain units", "simt"));
        let (grad, slow_grad) = (("a.grad on wgmma", "wgmma"), ("a.grad of b on mma.sync", "mma"));
        for (asked, ran, some, wrong) in [
            ("wgmma", &[wgmma, simt][..], true, None),
            ("wgmma", &[mma, simt], true, Some("no `a` ran on wgmma")),
            ("wgmma", &[wgmma, few, grad, slow_grad], true, None),
            ("wgmma", &[wgmma, slow_grad], true, Some("no `a.grad` ran on wgmma")),
            ("wgmma", &[wgmma, slow_grad], false, None),
            ("wgmma", &[mma, simt], false, None),
            ("mma", &[wgmma, mma], true, Some("`a on wgmma` ran, of wgmma and not mma")),
            ("mma", &[mma, simt], true, None),
            ("simt", &[], true, Some("no product ran on simt")),
            ("simt", &[], false, None),
        ] {
            let found = on_another_family(asked, ran, some);
            assert_eq!(found.as_deref(), wrong, "{asked} of {ran:?}");
        }
    }

    #[test]
    fn families_of_plans() {
        for (plan, expected) in [
            ("product on wgmma: (1, 2); in parts", Some("wgmma")),
            ("product on mma.sync, by TMA: (1, 2)", Some("mma_tma")),
            ("product on mma.sync: (1, 2)", Some("mma")),
            ("attention.grad of keys on mma.sync: 3", Some("mma")),
            ("attention.grad of keys on plain units: 3", Some("simt")),
            ("kasmina_mlp on mma: 3", None),
            ("rope: on wgmma", None),
        ] {
            assert_eq!(family_of(plan).map(|(_, family)| family), expected, "{plan}");
        }
    }
}
