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
/// runs on slower ones, or, if `some` have to, none of it.
pub(super) fn on_another_family(asked: &str, ran: &[(&str, &str)], some: bool) -> Option<String> {
    let place = |family: &str| FAMILIES.iter().position(|name| *name == family);
    match ran.iter().find(|(_, family)| place(family) < place(asked)) {
        Some((kernel, of)) => Some(format!("`{kernel}` ran, of {of} and not {asked}")),
        None => (some && ran.iter().all(|(_, family)| *family != asked))
            .then(|| format!("no product ran on {asked}")),
    }
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
        let (wgmma, mma, simt) = (("a", "wgmma"), ("b", "mma"), ("c", "simt"));
        for (asked, ran, some, wrong) in [
            ("wgmma", &[wgmma, simt][..], true, None),
            ("wgmma", &[mma, simt], true, Some("no product ran on wgmma")),
            ("wgmma", &[mma, simt], false, None),
            ("mma", &[wgmma, mma], true, Some("`a` ran, of wgmma and not mma")),
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
            ("attention dk, dv on plain units: 3", Some("simt")),
            ("kasmina_mlp on mma: 3", None),
            ("rope: on wgmma", None),
        ] {
            assert_eq!(family_of(plan).map(|(_, family)| family), expected, "{plan}");
        }
    }
}
