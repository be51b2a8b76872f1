//! Seeds on a device, apart from what a layer makes of them: changes, and seeds that are none.

use crate::common::devices;
use kiln_ops::prelude::*;

/// Seeds in every state and blend.
fn garden(count: usize) -> Vec<Seed> {
    let one = |i: usize| Seed {
        state: SeedState::ALL[i % SeedState::ALL.len()],
        blueprint: Some(i % 3),
        blend: Blend::ALL[i % Blend::ALL.len()],
        alpha: i as f32 / 128.0,
    };
    (0..count).map(one).collect()
}

/// Fields change alone and together, later changes win, and others that hold the seeds do not see it.
#[test]
fn changes() {
    for device in devices() {
        for autodiff in [false, true] {
            let mut expected = garden(70);
            let before = Seeds::new(&expected, &device).unwrap();
            let mut seeds = if autodiff {
                Seeds {
                    alpha: before.alpha.clone().autodiff(),
                    lifecycle: before.lifecycle.clone().autodiff(),
                    blueprint_id: before.blueprint_id.clone().autodiff(),
                    blend: before.blend.clone().autodiff(),
                }
            } else {
                before.clone()
            };
            let of = |seed| SeedChange { seed, ..SeedChange::default() };
            seeds
                .change(&[
                    SeedChange { state: Some(SeedState::Culled), ..of(0) },
                    SeedChange { blueprint: Some(Some(2)), ..of(69) },
                    SeedChange { blend: Some(Blend::Mixed), alpha: Some(0.125), ..of(33) },
                    SeedChange { alpha: Some(1.0), ..of(7) },
                    SeedChange { alpha: Some(0.75), blueprint: Some(None), ..of(7) },
                    SeedChange { state: Some(SeedState::Dormant), ..of(7) },
                ])
                .unwrap();
            assert_eq!(before.read().unwrap(), expected, "{device:?}");
            expected[0].state = SeedState::Culled;
            expected[69].blueprint = Some(2);
            (expected[33].blend, expected[33].alpha) = (Blend::Mixed, 0.125);
            expected[7] =
                Seed { state: SeedState::Dormant, blueprint: None, alpha: 0.75, ..expected[7] };
            assert_eq!(seeds.alpha.is_autodiff(), autodiff);
            assert_eq!(seeds.read().unwrap(), expected, "{device:?}");
            // Nobody else holds them any more: they change where they are.
            drop(before);
            seeds.change(&[SeedChange { alpha: Some(0.25), ..of(69) }]).unwrap();
            seeds.change(&[]).unwrap();
            expected[69].alpha = 0.25;
            assert_eq!(seeds.read().unwrap(), expected, "{device:?}");
        }
    }
}

#[test]
fn what_is_refused() {
    for device in devices() {
        let says = |found: String, what: &str| assert_eq!(found, format!("kasmina: {what}"));
        let change = |change| {
            Seeds::new(&[Seed::default(); 2], &device)
                .unwrap()
                .change(&[change])
                .unwrap_err()
                .to_string()
        };
        let of = SeedChange::default();
        says(change(SeedChange { seed: 2, ..of }), "`seed` of seed 2 is 2, expected 0 to 1");
        says(
            change(SeedChange { alpha: Some(-0.5), ..of }),
            "`alpha` of seed 0 is -0.5, expected 0 to 1",
        );
        let grafting = Seed { state: SeedState::Grafting, ..Seed::default() };
        assert!(Seeds::new(&[grafting], &device).is_err());
    }
}
