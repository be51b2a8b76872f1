//! The learning rate of each step: linear warm-up, then constant, cosine or warm-up/stable/decay.

use super::{ScheduleConfig, ScheduleKind};
use std::f64::consts::PI;

impl ScheduleConfig {
    /// Learning rate of `step` (counted from 0) in a run of `steps`.
    ///
    /// The warm-up climbs from `highest / warmup` at step 0 to `highest` at step `warmup - 1`.
    /// Cosine and `wsd` reach `final_ratio * highest` at the last step, which is where a run that
    /// goes on past `steps` stays. A `wsd` decay that would begin inside the warm-up begins at
    /// its end.
    pub fn rate(&self, step: usize, steps: usize, highest: f64) -> f64 {
        if step < self.warmup {
            return highest * (step as f64 + 1.0) / self.warmup as f64;
        }
        let share = match self.kind {
            ScheduleKind::Constant => return highest,
            ScheduleKind::Cosine => 0.5 - 0.5 * (PI * self.fallen(step, steps, steps)).cos(),
            ScheduleKind::Wsd => {
                let decay = (self.decay_share * steps as f64).round() as usize;
                self.fallen(step, steps, decay)
            }
        };
        highest * (1.0 - share * (1.0 - self.final_ratio))
    }

    /// How much of a decay over the last `decay` steps is done: 0 at the last step that still has
    /// the highest rate, 1 at the last step of the run.
    fn fallen(&self, step: usize, steps: usize, decay: usize) -> f64 {
        let last = steps.saturating_sub(1);
        let start = last.saturating_sub(decay).max(self.warmup.saturating_sub(1));
        if step <= start {
            0.0
        } else if step >= last {
            if decay == 0 { 0.0 } else { 1.0 }
        } else {
            (step - start) as f64 / (last - start) as f64
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIGHEST: f64 = 3e-4;

    fn schedule(kind: ScheduleKind, warmup: usize) -> ScheduleConfig {
        ScheduleConfig { kind, warmup, final_ratio: 0.1, decay_share: 0.2 }
    }

    fn rates(config: &ScheduleConfig, steps: usize) -> Vec<f64> {
        (0..steps).map(|step| config.rate(step, steps, HIGHEST)).collect()
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * HIGHEST.max(b)
    }

    #[test]
    fn warm_up_is_linear_and_ends_at_the_highest_rate() {
        for kind in [ScheduleKind::Constant, ScheduleKind::Cosine, ScheduleKind::Wsd] {
            let rates = rates(&schedule(kind, 10), 100);
            for (step, rate) in rates.iter().enumerate().take(10) {
                assert!(close(*rate, HIGHEST * (step + 1) as f64 / 10.0), "{kind:?} {step} {rate}");
            }
        }
    }

    #[test]
    fn without_warm_up_the_first_step_has_the_highest_rate() {
        for kind in [ScheduleKind::Constant, ScheduleKind::Cosine, ScheduleKind::Wsd] {
            for steps in [1, 2, 50] {
                assert_eq!(schedule(kind, 0).rate(0, steps, HIGHEST), HIGHEST, "{kind:?} {steps}");
            }
        }
    }

    #[test]
    fn cosine_falls_to_the_final_ratio_at_the_last_step() {
        let rates = rates(&schedule(ScheduleKind::Cosine, 11), 111);
        assert!(rates[10..].windows(2).all(|pair| pair[1] < pair[0]));
        assert!(close(rates[110], 0.1 * HIGHEST), "{}", rates[110]);
        // Half way between the end of the warm-up (step 10) and the last step.
        assert!(close(rates[60], 0.55 * HIGHEST), "{}", rates[60]);
    }

    #[test]
    fn wsd_is_stable_then_falls_linearly_over_its_share() {
        let rates = rates(&schedule(ScheduleKind::Wsd, 10), 100);
        assert!(rates[9..=79].iter().all(|rate| *rate == HIGHEST));
        assert!(rates[79..].windows(2).all(|pair| pair[1] < pair[0]));
        assert!(close(rates[89], 0.55 * HIGHEST), "{}", rates[89]);
        assert!(close(rates[99], 0.1 * HIGHEST), "{}", rates[99]);
    }

    #[test]
    fn constant_stays() {
        let rates = rates(&schedule(ScheduleKind::Constant, 5), 40);
        assert!(rates[4..].iter().all(|rate| *rate == HIGHEST));
    }

    #[test]
    fn a_run_longer_than_planned_stays_at_the_final_rate() {
        for kind in [ScheduleKind::Cosine, ScheduleKind::Wsd] {
            assert!(close(schedule(kind, 10).rate(500, 100, HIGHEST), 0.1 * HIGHEST));
        }
    }

    #[test]
    fn extreme_shares_and_lengths_stay_within_bounds() {
        for kind in [ScheduleKind::Cosine, ScheduleKind::Wsd] {
            for decay_share in [0.0, 0.3, 1.0] {
                for (warmup, steps) in [(0, 1), (1, 1), (5, 5), (4, 5), (0, 2), (3, 10)] {
                    let config = ScheduleConfig { kind, warmup, final_ratio: 0.0, decay_share };
                    for (step, rate) in rates(&config, steps).iter().enumerate() {
                        assert!((0.0..=HIGHEST).contains(rate), "{config:?} {step} {rate}");
                    }
                }
            }
        }
        let no_decay = ScheduleConfig { decay_share: 0.0, ..schedule(ScheduleKind::Wsd, 0) };
        assert_eq!(no_decay.rate(99, 100, HIGHEST), HIGHEST);
        let all_decay = ScheduleConfig { decay_share: 1.0, ..schedule(ScheduleKind::Wsd, 10) };
        assert!(rates(&all_decay, 100)[9..].windows(2).all(|pair| pair[1] < pair[0]));
    }
}
