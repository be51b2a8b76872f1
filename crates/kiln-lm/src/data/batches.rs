//! Windows of tokens for training (shuffled, resumable) and for evaluation (fixed).

use super::dataset::check_window;
use super::error::DataError;
use super::rank::Rank;
use super::shard::TokenShard;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// Windows side by side: row `i` has its tokens at `i * context`, and as targets the same tokens
/// shifted by one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Tokens the model sees, `[batch, context]`.
    pub inputs: Vec<i32>,
    /// Token after each of them, `[batch, context]`.
    pub targets: Vec<i32>,
    /// Number of windows.
    pub batch: usize,
    /// Tokens of a window.
    pub context: usize,
}

impl Batch {
    /// Each start is followed by at least `context + 1` tokens.
    fn of(shard: &TokenShard, starts: impl Iterator<Item = usize>, context: usize) -> Self {
        let mut batch = Self { inputs: Vec::new(), targets: Vec::new(), batch: 0, context };
        for start in starts {
            let tokens = |from| shard.tokens(from, context).map(|t| t as i32);
            batch.inputs.extend(tokens(start));
            batch.targets.extend(tokens(start + 1));
            batch.batch += 1;
        }
        batch
    }
}

/// Where a [`BatchSampler`] is: all that is needed to continue with the same batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// Seed of all epochs.
    pub seed: u64,
    /// Passes over the split completed.
    pub epoch: u64,
    /// Windows drawn in the current pass.
    pub position: u64,
}

/// Draws the windows of a split in random order, each once an epoch.
///
/// Windows of `context + 1` tokens overlap in one token, so that each token is a target once. Every
/// epoch shifts them by another offset, so that a model does not always see the same beginnings.
///
/// Of several ranks each has a sampler of the same seed, which goes through the same order and reads only
/// what its rank takes: the windows of a step are the same however many ranks share them, and so is the
/// state after it.
#[derive(Debug, Clone)]
pub struct BatchSampler {
    shard: TokenShard,
    state: SamplerState,
    order: Option<EpochOrder>,
    rank: Rank,
}

impl BatchSampler {
    /// Starts with the first epoch.
    pub fn new(shard: TokenShard, seed: u64) -> Self {
        let (epoch, position) = (0, 0);
        let state = SamplerState { seed, epoch, position };
        Self::from_state(shard, state)
    }

    /// Continues where [`BatchSampler::state`] was taken, given the same shard and context.
    pub fn from_state(shard: TokenShard, state: SamplerState) -> Self {
        Self { shard, state, order: None, rank: Rank::ONLY }
    }

    /// The same for one of several ranks.
    pub fn for_rank(self, rank: Rank) -> Self {
        Self { rank, ..self }
    }

    /// The rank whose share it reads.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Where the sampler is.
    pub fn state(&self) -> SamplerState {
        self.state
    }

    /// Micro-batch number `micro` of a step, which must be asked for one after the other from 0 on: its
    /// windows if it is this rank's, and `None`, with nothing read, if it is another's.
    ///
    /// # Errors
    ///
    /// As [`next_batch`](Self::next_batch).
    pub fn micro_batch(
        &mut self,
        micro: usize,
        batch_size: usize,
        context: usize,
    ) -> Result<Option<Batch>, DataError> {
        let starts = self.draw(batch_size, context)?;
        let own = self.rank.takes(micro);
        Ok(own.then(|| Batch::of(&self.shard, starts.into_iter(), context)))
    }

    /// The next `batch_size` windows, if need be from two epochs, whatever the rank.
    ///
    /// # Errors
    ///
    /// [`DataError::TooShort`] if the shard has no window of this context.
    pub fn next_batch(&mut self, batch_size: usize, context: usize) -> Result<Batch, DataError> {
        let starts = self.draw(batch_size, context)?;
        Ok(Batch::of(&self.shard, starts.into_iter(), context))
    }

    /// Where the next `batch_size` windows begin.
    fn draw(&mut self, batch_size: usize, context: usize) -> Result<Vec<usize>, DataError> {
        check_window(&self.shard, "training", context)?;
        let mut starts = Vec::new();
        while starts.len() < batch_size {
            let SamplerState { seed, epoch, position } = self.state;
            let order = match self.order.take() {
                Some(order) if order.epoch == epoch && order.context == context => order,
                _ => EpochOrder::new(self.shard.len(), context, seed, epoch),
            };
            match order.start(position) {
                Some(start) => {
                    starts.push(start);
                    self.state.position += 1;
                }
                None => {
                    self.state.epoch = epoch.wrapping_add(1);
                    self.state.position = 0;
                }
            }
            self.order = Some(order);
        }
        Ok(starts)
    }
}

/// The windows of one epoch.
#[derive(Debug, Clone)]
struct EpochOrder {
    epoch: u64,
    context: usize,
    offset: usize,
    order: Vec<u32>,
}

impl EpochOrder {
    /// `tokens` is above `context`.
    fn new(tokens: usize, context: usize, seed: u64, epoch: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..16].copy_from_slice(&epoch.to_le_bytes());
        let mut rng = ChaCha8Rng::from_seed(bytes);
        let offset = below(&mut rng, context.min(tokens - context));
        let windows = (tokens - 1 - offset) / context;
        let mut order: Vec<u32> = (0..u32::try_from(windows).unwrap_or(u32::MAX)).collect();
        for last in (1..order.len()).rev() {
            order.swap(last, below(&mut rng, last + 1));
        }
        Self { epoch, context, offset, order }
    }

    fn start(&self, position: u64) -> Option<usize> {
        let window = self.order.get(usize::try_from(position).ok()?)?;
        Some(self.offset + *window as usize * self.context)
    }
}

/// A number below `bound`. Not `rand`'s own sampling, which may change with its version, while a
/// run must continue the same.
fn below(rng: &mut ChaCha8Rng, bound: usize) -> usize {
    ((u128::from(rng.next_u64()) * bound as u128) >> 64) as usize
}

/// Consecutive windows of a split, the same ones at every evaluation.
#[derive(Debug, Clone)]
pub struct ValidationBatches {
    shard: TokenShard,
    batch_size: usize,
    context: usize,
    windows: usize,
    batches: usize,
}

impl ValidationBatches {
    /// At most `limit` batches, spread evenly over the split; 0 takes all of them. Tokens at the end
    /// that fill no window are left out, and the last batch may be smaller.
    ///
    /// # Errors
    ///
    /// [`DataError::TooShort`] if the shard has no window of this context.
    pub fn new(
        shard: TokenShard,
        batch_size: usize,
        context: usize,
        limit: usize,
    ) -> Result<Self, DataError> {
        check_window(&shard, "validation", context)?;
        let batch_size = batch_size.max(1);
        let windows = (shard.len() - 1) / context;
        let all = windows.div_ceil(batch_size);
        Ok(Self {
            shard,
            batch_size,
            context,
            windows,
            batches: if limit == 0 { all } else { all.min(limit) },
        })
    }

    /// Number of batches.
    pub fn len(&self) -> usize {
        self.batches
    }

    /// Never: there is at least one window.
    pub fn is_empty(&self) -> bool {
        self.batches == 0
    }

    /// The batches in order.
    pub fn iter(&self) -> impl Iterator<Item = Batch> + '_ {
        let all = self.windows.div_ceil(self.batch_size);
        (0..self.batches).map(move |index| {
            let first = index * all / self.batches * self.batch_size;
            let last = (first + self.batch_size).min(self.windows);
            let starts = (first..last).map(|window| window * self.context);
            Batch::of(&self.shard, starts, self.context)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::shard::ShardWriter;
    use super::*;

    /// The tokens 0, 1, 2, …: each one tells where it was.
    fn counting(len: u32) -> TokenShard {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.bin");
        let mut writer = ShardWriter::create(&path, 1000).unwrap();
        writer.write(&(0..len).collect::<Vec<_>>()).unwrap();
        writer.finish().unwrap();
        TokenShard::open(&path, 1000).unwrap()
    }

    fn starts(batch: &Batch) -> Vec<i32> {
        batch.inputs.iter().step_by(batch.context).copied().collect()
    }

    #[test]
    fn an_epoch_has_every_window_once() {
        let mut sampler = BatchSampler::new(counting(101), 7);
        let mut seen = Vec::new();
        while sampler.state().epoch == 0 && sampler.state().position < 9 {
            let batch = sampler.next_batch(1, 10).unwrap();
            let shifted: Vec<i32> = batch.inputs.iter().map(|t| t + 1).collect();
            assert_eq!(batch.targets, shifted);
            seen.extend(starts(&batch));
        }
        assert!(!seen.is_sorted());
        seen.sort_unstable();
        let offset = seen[0] % 10;
        let steps = seen.windows(2).all(|w| w[1] - w[0] == 10);
        assert!(steps && offset > 0 && seen.len() == 9, "{seen:?}");
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let draw = |seed| {
            let mut sampler = BatchSampler::new(counting(1000), seed);
            [(); 3].map(|()| starts(&sampler.next_batch(99, 10).unwrap()))
        };
        assert_eq!(draw(1), draw(1));
        let [first, second, third] = draw(1);
        assert!(first != second && second != third && first != draw(2)[0]);
    }

    #[test]
    fn continues_from_its_state() {
        let shard = counting(95);
        // 9 windows an epoch and batches of 4: every third batch spans two epochs.
        let mut whole = BatchSampler::new(shard.clone(), 3);
        let batches: Vec<_> = (0..12).map(|_| whole.next_batch(4, 10).unwrap()).collect();
        assert!(whole.state().epoch >= 4);
        for stop in 0..12 {
            let mut sampler = BatchSampler::new(shard.clone(), 3);
            for _ in 0..stop {
                sampler.next_batch(4, 10).unwrap();
            }
            let json = serde_json::to_string(&sampler.state()).unwrap();
            let state = serde_json::from_str(&json).unwrap();
            let mut resumed = BatchSampler::from_state(shard.clone(), state);
            for batch in &batches[stop..] {
                assert_eq!(&resumed.next_batch(4, 10).unwrap(), batch, "from {stop}");
            }
            assert_eq!(resumed.state(), whole.state());
        }
    }

    #[test]
    fn ranks_share_the_windows_of_every_step() {
        // 9 windows an epoch, steps of 12 micro-batches of 2: every step spans epochs.
        let (shard, micros, steps) = (counting(95), 12, 5);
        let draw = |rank: Rank| {
            let mut sampler = BatchSampler::new(shard.clone(), 3).for_rank(rank);
            let mut step = || -> Vec<Option<Batch>> {
                (0..micros).map(|m| sampler.micro_batch(m, 2, 10).unwrap()).collect()
            };
            let drawn: Vec<_> = (0..steps).map(|_| step()).collect();
            (drawn, sampler.state())
        };
        let mut plain = BatchSampler::new(shard.clone(), 3);
        let whole: Vec<Vec<Batch>> = (0..steps)
            .map(|_| (0..micros).map(|_| plain.next_batch(2, 10).unwrap()).collect())
            .collect();
        for ranks in [1, 2, 3, 4, 12] {
            let drawn: Vec<_> =
                (0..ranks).map(|index| draw(Rank::new(index, ranks).unwrap())).collect();
            for (step, whole) in whole.iter().enumerate() {
                for (micro, batch) in whole.iter().enumerate() {
                    let holders = drawn.iter().filter_map(|(of, _)| of[step][micro].as_ref());
                    // Exactly one rank has it, and it is the batch that a single one would have.
                    assert_eq!(holders.collect::<Vec<_>>(), [batch], "{ranks} {step} {micro}");
                }
                // Each as many as the others.
                let of = |drawn: &[Option<Batch>]| drawn.iter().flatten().count();
                assert!(drawn.iter().all(|(drawn, _)| of(&drawn[step]) == micros / ranks));
            }
            assert!(drawn.iter().all(|(_, state)| *state == plain.state()));
        }
        assert_eq!(
            (Rank::new(2, 2), Rank::new(0, 0), Rank::new(0, 1)),
            (None, None, Some(Rank::ONLY))
        );
    }

    #[test]
    fn order_is_pinned() {
        // Changing this order changes every resumed run.
        let mut sampler = BatchSampler::new(counting(101), 1);
        assert_eq!(starts(&sampler.next_batch(6, 10).unwrap()), [13, 43, 33, 83, 3, 53]);
    }

    #[test]
    fn short_shards_are_errors_and_exact_ones_are_not() {
        let mut sampler = BatchSampler::new(counting(11), 1);
        for _ in 0..3 {
            assert_eq!(starts(&sampler.next_batch(2, 10).unwrap()), [0, 0]);
        }
        let error = sampler.next_batch(2, 11).unwrap_err().to_string();
        assert_eq!(error, "the training split has 11 tokens, but one window needs 12");
        for context in [0, usize::MAX] {
            assert!(sampler.next_batch(1, context).is_err());
            assert!(ValidationBatches::new(counting(11), 1, context, 0).is_err());
        }
        assert!(sampler.next_batch(0, 10).unwrap().inputs.is_empty());
    }

    #[test]
    fn validation_windows_are_fixed_and_spread() {
        // 95 tokens, windows at 0, 10, …, 80.
        for (batch_size, limit, expected) in [
            (4, 0, &[&[0, 10, 20, 30][..], &[40, 50, 60, 70], &[80]][..]),
            (4, 9, &[&[0, 10, 20, 30], &[40, 50, 60, 70], &[80]]),
            (2, 2, &[&[0, 10], &[40, 50]]),
            (1, 3, &[&[0], &[30], &[60]]),
            (100, 0, &[&[0, 10, 20, 30, 40, 50, 60, 70, 80]]),
        ] {
            let batches = ValidationBatches::new(counting(95), batch_size, 10, limit).unwrap();
            assert_eq!((batches.len(), batches.is_empty()), (expected.len(), false));
            for _ in 0..2 {
                let found: Vec<_> = batches.iter().map(|b| starts(&b)).collect();
                assert_eq!(found, expected, "{batch_size} {limit}");
            }
        }
    }
}
