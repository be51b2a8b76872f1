//! How long the kernels take, also by other tiles.

use super::super::plan::{Pass, Plan, Tile};
use super::super::rows::Rows;
use super::super::{backward, forward, forward_by, keys_by, planned, queries_by};
use super::{Case, Random, device, four, stored, tensor};
use crate::attention::problem::{Backward, Mask, Problem};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

/// The tiles to be timed beside those that are taken.
const TRIED: [(Pass, [usize; 5]); 24] = {
    use Pass::{Forward, Keys, Queries};
    [
        (Forward, [2, 4, 1, 64, 2]),
        (Forward, [2, 4, 1, 64, 1]),
        (Forward, [2, 4, 1, 128, 1]),
        (Forward, [2, 4, 1, 128, 2]),
        (Forward, [2, 4, 1, 32, 2]),
        (Forward, [1, 4, 1, 64, 2]),
        (Forward, [1, 8, 1, 64, 2]),
        (Forward, [2, 8, 1, 64, 2]),
        (Queries, [2, 4, 1, 32, 2]),
        (Queries, [2, 4, 1, 64, 2]),
        (Queries, [2, 4, 1, 64, 1]),
        (Queries, [1, 4, 1, 64, 2]),
        (Queries, [1, 8, 1, 64, 2]),
        (Queries, [2, 8, 1, 32, 2]),
        (Queries, [2, 4, 1, 32, 1]),
        (Keys, [2, 4, 1, 32, 2]),
        (Keys, [2, 8, 1, 32, 2]),
        (Keys, [2, 4, 1, 64, 2]),
        (Keys, [1, 4, 1, 64, 2]),
        (Keys, [1, 8, 1, 64, 2]),
        (Keys, [1, 4, 1, 32, 2]),
        (Keys, [1, 8, 1, 32, 2]),
        (Keys, [2, 8, 2, 32, 2]),
        (Keys, [2, 8, 2, 64, 2]),
    ]
};

/// Seconds of one of 20 launches, the least of five bursts.
fn seconds(like: &CubeTensor, run: impl Fn()) -> f64 {
    let sync = || cubecl::future::block_on(like.client.sync()).expect("launched");
    run();
    sync();
    let burst = |_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let start = std::time::Instant::now();
        (0..20).for_each(|_| run());
        sync();
        start.elapsed().as_secs_f64() / 20.0
    };
    (0..5).map(burst).fold(f64::INFINITY, f64::min)
}

/// `KILN_TIME=all` times other tiles too.
#[test]
#[ignore = "a time and no test"]
fn timing() {
    let wanted = std::env::var("KILN_TIME").unwrap_or_default();
    let Some(like) = device() else { return };
    for (name, [b, h, kv, t, d]) in [
        ("b4 h16 s4096", [4, 16, 16, 4096, 64]),
        ("b4 h16 s4096", [4, 16, 16, 4096, 128]),
        ("b16 h16 s1024", [16, 16, 16, 1024, 128]),
        ("b32 h12 s1024", [32, 12, 12, 1024, 64]),
        ("b1 h16 s16384", [1, 16, 16, 16384, 128]),
        ("b4 h8 s4096", [4, 8, 8, 4096, 256]),
    ] {
        let case = Case::new(name, [b, h, kv, t, t, d]);
        let mut random = Random(3);
        let some: Vec<f32> = (0..1 << 18).map(|_| random.next()).collect();
        let bytes = stored(DType::BF16, &some);
        let fill = |count: usize| bytes.iter().copied().cycle().take(2 * count).collect();
        let inputs = four(&like, &case, fill);
        let outputs = four(&like, &case, |count| vec![0; 2 * count]);
        let [q, k, v, dy] = inputs.each_ref().map(|held| held.view.clone());
        let mask = Mask { causal: true, window: None, documents: false };
        let (sizes, scale) = (case.sizes, case.scale);
        let problem = Problem { q, k, v, sizes, mask, scale, softcap: None, documents: None };
        let zeros = || tensor(&like, &[b, h, t], DType::F32, &vec![0; b * h * t * 4]);
        let (lse, delta) = (zeros(), zeros());
        let [dq, dk, dv, o] = outputs.each_ref().map(|held| &held.view);
        let with = Backward { dy: &dy, lse: &lse, delta: &delta, dq, dk, dv, wanted: [true; 3] };
        forward(&problem, o, Some(&lse));
        // One product, of the half that is seen.
        let product = (b * h * t * t * d) as f64;
        let tera = |products: f64, seconds: f64| products * product / seconds / 1e12;
        let fore = seconds(&like, || forward(&problem, o, Some(&lse)));
        let back = seconds(&like, || backward(&problem, &with));
        let planned = |pass| planned(pass, &problem);
        let of_queries = seconds(&like, || queries_by(planned(Pass::Queries), &problem, &with));
        let of_keys = seconds(&like, || keys_by(planned(Pass::Keys), &problem, &with));
        eprintln!(
            "{name} d{d}: forward {:.0}, backward {:.0} TFLOP/s ({:.3} ms; its own count: queries {:.0}, keys {:.0})",
            tera(2.0, fore),
            tera(5.0, back),
            back * 1e3,
            tera(3.0, of_queries),
            tera(4.0, of_keys),
        );
        if wanted != "all" {
            continue;
        }
        for (pass, [fragments, warps, sharing, block, stages]) in TRIED {
            let taken = planned(pass);
            let tile = Tile {
                fragments,
                warps: warps as u32,
                sharing: sharing as u32,
                block: block as u32,
                stages: stages as u32,
            };
            let rows = Rows { units: tile.units(), ..taken.rows };
            let plan = Plan { tile, rows, ..taken };
            let memory = like.client.properties().hardware.max_shared_memory_size;
            if plan.bytes() > memory || !(rows.padded as usize / sharing).is_multiple_of(16) {
                continue;
            }
            let (products, time) = match pass {
                Pass::Forward => {
                    (2.0, seconds(&like, || forward_by(plan, &problem, o, Some(&lse))))
                }
                Pass::Queries => (3.0, seconds(&like, || queries_by(plan, &problem, &with))),
                Pass::Keys => (4.0, seconds(&like, || keys_by(plan, &problem, &with))),
            };
            let mark = if tile == taken.tile { " (taken)" } else { "" };
            eprintln!(
                "    {pass:?} {fragments}x16 rows, {warps} warps, {sharing} share, block {block}, \
                 {stages} stages: {:.0}{mark}",
                tera(products, time)
            );
        }
    }
}
