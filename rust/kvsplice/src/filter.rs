//! Occupancy filter: a few bits per entry that say of most offsets "surely not here" without leaving the cache.
//!
//! A Bloom filter whose bits for one hash lie in one word, so that a test is one load. Bits are only ever
//! set; a rebuild of the table starts a new filter. No false negatives.

use crate::simd::{Simd, per_simd, prefetch};
use crate::sync::{AtomicU64, Ordering, zeroed_slice_box};

pub(crate) struct Filter {
    words: Box<[AtomicU64]>,
    shift: u32,
}

impl Filter {
    /// Room for `entries`, with 16 to 32 bits for each while that fits the L2 cache, and with 8 to 16 beyond.
    pub(crate) fn for_entries(entries: usize) -> Self {
        let generous = (entries / 4).next_power_of_two().max(2);
        let words = if generous < LARGE { generous } else { generous / 2 };
        Self { words: zeroed_slice_box(words), shift: 64 - words.ilog2() }
    }

    #[inline]
    fn place(&self, hash: u64) -> (usize, u64) {
        // All from the high half of the hash, which is all that a table keeps of it: the word from its upper bits, the
        // bits in it from its lower ones.
        ((hash >> self.shift) as usize, (1 << ((hash >> 32) & 63)) | (1 << ((hash >> 38) & 63)))
    }

    /// Whether `hash` may have been added.
    pub(crate) fn may_hold(&self, hash: u64) -> bool {
        let (word, bits) = self.place(hash);
        self.words[word].load(Ordering::Relaxed) & bits == bits
    }

    /// Asks for the word that `hash` is in.
    pub(crate) fn prefetch(&self, hash: u64) {
        prefetch(&self.words[self.place(hash).0]);
    }

    /// Writes the places in `hashes` of those that may have been added to the front of `places`; returns their number.
    pub(crate) fn select(&self, simd: Simd, hashes: &[u64], places: &mut [u32]) -> usize {
        let select = if self.words.len() < LARGE { select } else { select_large };
        select(simd, &self.words, self.shift, hashes, places)
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

/// A filter of this many words or more is likely not to be in the L2 cache in whole.
const LARGE: usize = (512 << 10) / size_of::<u64>();

/// How many hashes ahead of its test a word of a large filter is asked for.
const AHEAD: usize = 32;

per_simd! {
    fn select(words: &[AtomicU64], shift: u32, hashes: &[u64], places: &mut [u32]) -> usize
        = select_body::<false>;
}

per_simd! {
    fn select_large(words: &[AtomicU64], shift: u32, hashes: &[u64], places: &mut [u32]) -> usize
        = select_body::<true>;
}

// It must take on its callers' instruction sets.
#[expect(clippy::inline_always)]
#[inline(always)]
fn select_body<const LARGE: bool>(words: &[AtomicU64], shift: u32, hashes: &[u64], places: &mut [u32]) -> usize {
    let places = &mut places[..hashes.len()];
    let mut selected = 0;
    let mut test = |place: usize, hash: u64| {
        // Always written, kept if selected: no branch to mispredict.
        places[selected] = place as u32;
        let word = words[(hash >> shift) as usize].load(Ordering::Relaxed);
        selected += ((word >> ((hash >> 32) & 63)) & (word >> ((hash >> 38) & 63)) & 1) as usize;
    };
    let ahead = if LARGE { hashes.get(AHEAD..).unwrap_or_default() } else { &[] };
    for (place, (&hash, &ahead)) in hashes.iter().zip(ahead).enumerate() {
        prefetch(&words[(ahead >> shift) as usize]);
        test(place, hash);
    }
    for (place, &hash) in hashes.iter().enumerate().skip(ahead.len()) {
        test(place, hash);
    }
    selected
}
