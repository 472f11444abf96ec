//! Occupancy filter: a few bits per entry that say of most offsets "surely not here" without leaving the cache.
//!
//! A Bloom filter whose bits for one hash lie in one word, so that a test is one load. Bits are only ever
//! set; a rebuild of the table starts a new filter. No false negatives.

use crate::sync::{AtomicU64, Ordering, zeroed_slice_box};

pub(crate) struct Filter {
    words: Box<[AtomicU64]>,
    shift: u32,
}

impl Filter {
    /// Room for `entries`, with 16 to 32 bits for each.
    pub(crate) fn for_entries(entries: usize) -> Self {
        let words = (entries / 4).next_power_of_two().max(2);
        Self { words: zeroed_slice_box(words), shift: 64 - words.ilog2() }
    }

    #[inline]
    fn place(&self, hash: u64) -> (usize, u64) {
        // The word comes from the high bits, the bits in it from the low ones.
        let bits = (1 << (hash & 63)) | (1 << ((hash >> 6) & 63));
        ((hash >> self.shift) as usize, bits)
    }

    /// Whether `hash` may have been added.
    #[inline]
    pub(crate) fn may_hold(&self, hash: u64) -> bool {
        let (word, bits) = self.place(hash);
        self.words[word].load(Ordering::Relaxed) & bits == bits
    }

    pub(crate) fn add(&self, hash: u64) {
        let (word, bits) = self.place(hash);
        if self.words[word].load(Ordering::Relaxed) & bits != bits {
            self.words[word].fetch_or(bits, Ordering::Relaxed);
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }
}
