//! Which part of the data is whose, where several replicas train side by side.

/// One of several replicas that train the same model side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    index: usize,
    ranks: usize,
}

impl Rank {
    /// The only one.
    pub const ONLY: Self = Self { index: 0, ranks: 1 };

    /// Number `index` of `ranks`; `None` if there are not so many.
    pub fn new(index: usize, ranks: usize) -> Option<Self> {
        (index < ranks).then_some(Self { index, ranks })
    }

    /// Which one it is, from 0.
    pub fn index(self) -> usize {
        self.index
    }

    /// How many there are.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// Whether a micro-batch of a step is its own: they go round.
    pub fn takes(self, micro: usize) -> bool {
        micro % self.ranks == self.index
    }
}
