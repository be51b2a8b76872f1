//! What mixes positions in which block.

use super::{MixerKind, ModelConfig};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error, IntoDeserializer, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// `"attention"`, `"bk"`, or an array of such: block i has number i of it, which begins anew where it ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mixers(Vec<MixerKind>);

impl Mixers {
    /// These by turns. None at all is what [`Config::validate`](super::Config::validate) refuses.
    pub fn new(by_turns: Vec<MixerKind>) -> Self {
        Self(by_turns)
    }

    /// The array.
    pub fn by_turns(&self) -> &[MixerKind] {
        &self.0
    }
}

impl From<MixerKind> for Mixers {
    fn from(kind: MixerKind) -> Self {
        Self(vec![kind])
    }
}

impl ModelConfig {
    /// The mixer of each block.
    pub fn mixers(&self) -> impl Iterator<Item = MixerKind> + '_ {
        self.mixer.by_turns().iter().copied().cycle().take(self.layers)
    }

    /// Whether a block has this mixer.
    pub(crate) fn has(&self, kind: MixerKind) -> bool {
        self.mixer.by_turns().iter().take(self.layers).any(|mixer| *mixer == kind)
    }
}

impl Serialize for Mixers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.by_turns() {
            [everywhere] => everywhere.serialize(serializer),
            by_turns => by_turns.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Mixers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Not one of serde's untagged enums, whose errors do not name what is wrong.
        struct OneOrSeveral;
        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = Mixers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mixer such as \"attention\", or an array of them")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Mixers, E> {
                MixerKind::deserialize(name.into_deserializer()).map(Mixers::from)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, names: A) -> Result<Mixers, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(names)).map(Mixers)
            }
        }
        deserializer.deserialize_any(OneOrSeveral)
    }
}
