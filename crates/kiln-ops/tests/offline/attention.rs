//! Calls of attention: every family, with the widths and options that choose its kernels.

use crate::calls::{Call, tensor};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use cubecl::client::Client;
use kiln_ops::attention::AttentionOptions;
use kiln_ops::attention::backend::{
    Attention, AttentionGradOps, AttentionOps, Backward, Bounds, Heads, Settings,
};
use kiln_ops::attention::cache::backend::{Cached, CachedAttentionOps};
use kiln_ops::tile::{Family, force};

/// B, H, Hkv and T = S of all of them.
const SIZES: [usize; 4] = [2, 8, 4, 2048];

/// Widths by element type and family.
fn widths(dtype: DType, family: Family) -> &'static [usize] {
    match (dtype, family) {
        (DType::F32, Family::Simt) => &[33, 64, 128, 256],
        (_, Family::Simt) => &[64],
        (DType::BF16, Family::Wgmma) => &[64, 80, 96, 128],
        (DType::F16, Family::Wgmma) => &[64, 128],
        (DType::BF16, Family::Mma) => &[64, 128, 256],
        (DType::F16, Family::Mma) => &[64],
        _ => &[],
    }
}

/// Plain ones at every width; the other options at one.
pub fn calls(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    let plain = AttentionOptions::default();
    let all = AttentionOptions { causal: false, ..plain };
    let cut = AttentionOptions { window: Some(256), softcap: Some(30.0), ..plain };
    let hopper = client.properties().features.cube_cluster;
    for family in Family::ALL.into_iter().filter(|family| *family != Family::Wgmma || hopper) {
        let widths = widths(dtype, family);
        let mut of = |width, options, documents, packed, word: &str| {
            let call = force(family, || call(client, dtype, width, options, documents, packed));
            let name = format!("{family} {name} {width}{word}");
            let (forward, backward) = (call.clone(), gradients(client, dtype, width, call));
            calls.push(Call {
                name: format!("attention {name}"),
                run: Box::new(move || drop(CubeBackend::attend(forward, true))),
            });
            calls.push(Call {
                name: format!("attention.grad {name}"),
                run: Box::new(move || drop(CubeBackend::attend_backward(backward))),
            });
        };
        for width in widths {
            of(*width, plain, false, false, "");
        }
        if !widths.is_empty() && (family != Family::Simt || dtype == DType::F32) {
            of(64, all, false, false, " all");
            of(64, cut, false, true, " window softcap packed");
            of(64, plain, true, false, " documents");
        }
        if family == Family::Wgmma && dtype == DType::BF16 {
            of(128, all, false, false, " all");
            of(128, cut, false, true, " window softcap packed");
            of(128, AttentionOptions { softcap: None, ..cut }, true, false, " window documents");
        }
    }
}

/// Few queries over many keys: B, H, Hkv, T, D.
const FEW: [[usize; 5]; 18] = [
    [1, 12, 12, 1, 64],
    [1, 32, 8, 1, 64],
    [1, 16, 1, 2, 64],
    [1, 32, 8, 1, 128],
    [1, 8, 1, 1, 128],
    [1, 16, 2, 2, 128],
    [1, 24, 1, 1, 128],
    [1, 32, 1, 1, 64],
    [1, 32, 1, 1, 128],
    [1, 64, 1, 1, 192],
    [1, 20, 1, 1, 80],
    [1, 64, 1, 1, 256],
    // So many that mma.sync has them on Hopper too.
    [20, 16, 1, 1, 192],
    [1, 8, 2, 4, 96],
    [20, 8, 1, 1, 256],
    [1, 4, 2, 3, 33],
    // Enough that a cube takes several tiles.
    [140, 32, 1, 1, 128],
    // Enough of them that a cube sees all keys.
    [2048, 4, 2, 1, 128],
];

/// Those of decoding, and of a cache.
pub fn few(client: &Client, dtype: DType, name: &str, calls: &mut Vec<Call>) {
    let plain = AttentionOptions::default();
    let cut = AttentionOptions { window: Some(256), softcap: Some(30.0), ..plain };
    for (i, [batch, heads, kv_heads, queries, width]) in FEW.into_iter().enumerate() {
        let capped = AttentionOptions { softcap: Some(30.0), ..plain };
        for (options, word) in [(plain, ""), (cut, " window softcap"), (capped, " softcap")] {
            let wanted = match word {
                "" => true,
                " softcap" => heads / kv_heads > 16 && queries == 1,
                _ => i == 0 || queries == 2,
            };
            if !wanted {
                continue;
            }
            let of = |heads, rows| tensor(client, [batch, heads, rows, width], dtype);
            let of = Heads::Separate(of(heads, queries), of(kv_heads, 4096), of(kv_heads, 4096));
            let settings = Settings::new([heads, kv_heads], options);
            let call = Attention { of, bounds: Bounds::None, settings };
            let group = heads / kv_heads * queries;
            calls.push(Call {
                name: format!("attention few {name} {batch}x{group} {width}{word}"),
                run: Box::new(move || drop(CubeBackend::attend(call, false))),
            });
        }
    }
    let qkv = tensor(client, [4, 1, 16 * 64], dtype);
    let held = || tensor(client, [4, 4, 2048, 64], dtype);
    let (k, v) = (held(), held());
    let call = Cached { before: 1000, settings: Settings::new([8, 4], plain) };
    calls.push(Call {
        name: format!("attention few {name} cached"),
        run: Box::new(move || drop(CubeBackend::attend_cached(qkv, k, v, call))),
    });
}

fn call(
    client: &Client,
    dtype: DType,
    width: usize,
    options: AttentionOptions,
    documents: bool,
    packed: bool,
) -> Attention<CubeBackend> {
    let [batch, heads, kv_heads, length] = SIZES;
    let batch = if documents { 1 } else { batch };
    let of = match packed {
        true => {
            let all = (heads + 2 * kv_heads) * width;
            Heads::Packed(tensor(client, [batch, length, all], dtype))
        }
        false => {
            let of = |heads| tensor(client, [batch, heads, length, width], dtype);
            Heads::Separate(of(heads), of(kv_heads), of(kv_heads))
        }
    };
    let bounds = match documents {
        true => Bounds::Documents(tensor(client, [2, length], DType::U32)),
        false => Bounds::None,
    };
    Attention { of, bounds, settings: Settings::new([heads, kv_heads], options) }
}

fn gradients(
    client: &Client,
    dtype: DType,
    width: usize,
    call: Attention<CubeBackend>,
) -> Backward<CubeBackend> {
    let [_, heads, _, length] = SIZES;
    let batch = if matches!(call.bounds, Bounds::None) { SIZES[0] } else { 1 };
    let y = || match call.of {
        Heads::Packed(_) => tensor(client, [batch, length, heads * width], dtype),
        Heads::Separate(..) => tensor(client, [batch, heads, length, width], dtype),
    };
    let (dy, y) = (y(), y());
    let lse = tensor(client, [batch, heads, length], DType::F32);
    Backward { dy, call, y, lse, wanted: [true; 3] }
}
