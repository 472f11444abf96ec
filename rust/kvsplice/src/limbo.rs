//! Ids of all kinds that wait until no reader can hold them.

use crate::epoch::Epoch;

/// An id that waits until no reader can hold it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Retired {
    Scope(u32),
    Key(u32),
    Content(u32),
    Node(u32),
}

/// As a word: the kind in the high half, the id in the low one.
impl From<Retired> for u64 {
    fn from(item: Retired) -> Self {
        let (kind, id) = match item {
            Retired::Scope(id) => (0, id),
            Retired::Key(id) => (1, id),
            Retired::Content(id) => (2, id),
            Retired::Node(id) => (3, id),
        };
        (kind << 32) | Self::from(id)
    }
}

impl From<u64> for Retired {
    fn from(word: u64) -> Self {
        let id = word as u32;
        match word >> 32 {
            0 => Self::Scope(id),
            1 => Self::Key(id),
            2 => Self::Content(id),
            _ => Self::Node(id),
        }
    }
}

pub(crate) type Limbo = Epoch<Retired>;
