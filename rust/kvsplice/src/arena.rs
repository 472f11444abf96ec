//! Numbered slots of atomic words that grow without moving and are used again.

use crate::sync::{AtomicU32, AtomicU64, Once, Ordering, Queue, zeroed_slice_box};

/// Slots in the first segment; each further segment has twice as many as the one before.
#[cfg(not(loom))]
const FIRST: u32 = 64;
#[cfg(loom)]
const FIRST: u32 = 8;

/// Enough doublings of [`FIRST`] for nearly every 32-bit id.
const SEGMENTS: usize = 26;

/// Slots of `stride` words each, named by ids from 1; 0 names nothing.
///
/// A slot's memory is never given back while the arena lives, so reading through an old id is always a read of
/// valid atomics. Whether it still means what the reader thinks is the epoch's business.
pub(crate) struct Arena {
    stride: usize,
    segments: [Once<Box<[AtomicU64]>>; SEGMENTS],
    fresh: AtomicU32,
    free: Queue<u32>,
}

impl Arena {
    pub(crate) fn new(stride: usize) -> Self {
        let arena = Self {
            stride,
            segments: std::array::from_fn(|_| Once::new()),
            fresh: AtomicU32::new(1),
            free: Queue::new(),
        };
        if cfg!(loom) {
            arena.grow(0);
        }
        arena
    }

    /// An id that nobody else holds. The words of its slot are zero or what their last use left.
    pub(crate) fn take(&self) -> u32 {
        if let Some(id) = self.free.pop() {
            return id;
        }
        let id = self.fresh.fetch_add(1, Ordering::Relaxed);
        assert!(id < u32::MAX - FIRST, "arena has no ids left");
        let (segment, _) = locate(id);
        if self.segments[segment].get().is_none() {
            self.grow(segment);
        }
        id
    }

    /// Hands an id back. No thread may still read its slot.
    pub(crate) fn give_back(&self, id: u32) {
        self.free.push(id);
    }

    #[inline]
    pub(crate) fn words(&self, id: u32) -> &[AtomicU64] {
        let (segment, slot) = locate(id);
        let words = self.segments[segment].get().expect("an id comes from take()");
        &words[slot * self.stride..][..self.stride]
    }

    /// Words in a slot.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// One more than the highest id handed out so far.
    pub(crate) fn high_water(&self) -> u32 {
        self.fresh.load(Ordering::Relaxed)
    }

    /// Bytes of all slots handed out so far, those handed back included.
    pub(crate) fn bytes(&self) -> usize {
        (self.high_water() as usize - 1) * self.stride * size_of::<u64>() + self.free.len() * size_of::<u64>()
    }

    fn grow(&self, segment: usize) {
        // Zeroed memory comes from the system page by page as it is touched.
        let len = ((FIRST as usize) << segment) * self.stride;
        // Losing the race hands our segment back; the winner's serves as well.
        let _ = self.segments[segment].set(Box::new(zeroed_slice_box::<AtomicU64>(len)));
    }
}

/// Segment and slot of an id.
#[inline]
fn locate(id: u32) -> (usize, usize) {
    let n = id + FIRST;
    let segment = n.ilog2() - FIRST.ilog2();
    (segment as usize, (n - (FIRST << segment)) as usize)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ids_name_slots_one_to_one() {
        let mut seen = std::collections::HashSet::new();
        for id in 1..10_000 {
            let (segment, slot) = locate(id);
            assert!(slot < (FIRST as usize) << segment);
            assert!(seen.insert((segment, slot)));
        }
    }

    #[test]
    fn an_id_handed_back_is_used_again() {
        let arena = Arena::new(2);
        let ids: Vec<u32> = (0..1000).map(|_| arena.take()).collect();
        for &id in &ids {
            arena.words(id)[1].store(u64::from(id), Ordering::Relaxed);
        }
        assert!(ids.iter().all(|&id| arena.words(id)[1].load(Ordering::Relaxed) == u64::from(id)));
        ids.iter().for_each(|&id| arena.give_back(id));
        let mut again: Vec<u32> = (0..1000).map(|_| arena.take()).collect();
        again.sort_unstable();
        assert_eq!(again, ids);
        assert_eq!(arena.high_water(), 1001);
    }
}
