//! The ladder of tril_matmul: honest rungs pass, cheats are convicted in both orders.

#![cfg(feature = "cube")]

use burn::tensor::{DType, Device};
use kiln_bench::ladder::{self, Ladder};
use kiln_ops::device;

const N: usize = 256;

fn device() -> Option<Device> {
    let opened = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device))?;
    Some(opened.device)
}

fn climb(device: &Device, dtype: DType, n: usize) -> Result<Ladder, String> {
    ladder::climb(device, dtype, n, "test".into(), &mut |_| {})
}

#[test]
fn honest_rungs_pass_and_cheats_are_convicted_in_both_orders() {
    let Some(device) = device() else { return };
    // Burn's f32 product on CUDA is one in TF32: an answer worth stealing needs bf16 there.
    let cuda = device::is_cuda(&device);
    let (dtype, most) = if cuda { (DType::BF16, 5e-3) } else { (DType::F32, 1e-5) };
    let ladder = climb(&device, dtype, N).unwrap();
    println!("{}", ladder::table(&ladder, false));
    assert!(ladder.as_expected());
    let (cheats, honest): (Vec<_>, Vec<_>) = ladder.steps.iter().partition(|step| step.cheats);
    assert!(honest.len() >= 3 && cheats.len() == 2);
    for step in honest {
        assert!(step.passes() && step.unwritten == 0, "{step:?}");
        assert!(step.error.is_some_and(|error| error < most) && step.us > 0.0, "{step:?}");
    }
    for step in &cheats {
        assert!(!step.right_first && !step.right_after_reference, "{step:?}");
    }
    let [first_row, zeros] = cheats[..] else { panic!("two cheats") };
    assert_eq!(first_row.unwritten, N * N - N);
    assert_eq!(first_row.first_unwritten, Some([1, 0]));
    assert_eq!(first_row.last_unwritten, Some([N - 1, N - 1]));
    // The theft: a test that runs the reference first on the same numbers believes it.
    assert!(first_row.right_on_stale_answers, "{first_row:?}");
    // It writes all of its output, so only its numbers give it away.
    assert_eq!((zeros.unwritten, zeros.right_on_stale_answers), (0, false));
    let table = ladder::table(&ladder, true);
    assert!(
        table.contains("65280, [1, 0] to [255, 255]") && table.contains("worthless"),
        "{table}"
    );
}

#[test]
fn what_cannot_be_climbed_is_said_in_one_line() {
    #[cfg(feature = "flex")]
    {
        let error = climb(&Device::flex(), DType::F32, 8).unwrap_err();
        assert!(error.contains("not cpu"), "{error}");
    }
    let Some(device) = device() else { return };
    for n in [0, 1, 1 << 20] {
        let error = climb(&device, DType::F32, n).unwrap_err();
        assert_eq!(error, format!("size is {n}, must be from 2 to 32768"));
    }
}
