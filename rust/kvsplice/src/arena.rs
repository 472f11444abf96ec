//! Numbered slots of atomic words that grow without moving and are used again.

use crate::sync::{AtomicU32, AtomicU64, Once, Ordering, zeroed_slice_box};

/// Slots in the first segment; each further segment has twice as many as the one before.
#[cfg(not(loom))]
const FIRST: u32 = 64;
#[cfg(loom)]
const FIRST: u32 = 16;

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
    free: Stack,
}

impl Arena {
    pub(crate) fn new(stride: usize) -> Self {
        let arena = Self {
            stride,
            segments: std::array::from_fn(|_| Once::new()),
            fresh: AtomicU32::new(1),
            free: Stack::new(),
        };
        if cfg!(loom) {
            arena.grow(0);
        }
        arena
    }

    /// An id that nobody else holds. The words of its slot are zero or what their last use left.
    pub(crate) fn take(&self) -> u32 {
        if let Some(id) = self.free.pop(|id| self.link(id).load(Ordering::Relaxed) as u32) {
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
        self.free.push(id, |next| self.link(id).store(u64::from(next), Ordering::Relaxed));
    }

    /// Where a free slot keeps the id of the next one: its last word.
    fn link(&self, id: u32) -> &AtomicU64 {
        &self.words(id)[self.stride - 1]
    }

    #[inline]
    pub(crate) fn words(&self, id: u32) -> &[AtomicU64] {
        self.try_words(id).expect("an id comes from take()")
    }

    /// As [`words`](Self::words), for an id that may be wrong.
    #[inline]
    pub(crate) fn try_words(&self, id: u32) -> Option<&[AtomicU64]> {
        let (segment, slot) = locate(id);
        let words = self.segments[segment].get()?;
        words.get(slot * self.stride..(slot + 1) * self.stride)
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
        (self.high_water() as usize - 1) * self.stride * size_of::<u64>()
    }

    fn grow(&self, segment: usize) {
        // Zeroed memory comes from the system page by page as it is touched.
        let len = ((FIRST as usize) << segment) * self.stride;
        // Losing the race hands our segment back; the winner's serves as well.
        let _ = self.segments[segment].set(Box::new(zeroed_slice_box::<AtomicU64>(len)));
    }
}

/// A lock-free stack of ids whose links lie elsewhere (Treiber, "Systems programming: coping with parallelism", 1986).
pub(crate) struct Stack {
    /// `[changes | id]`: the count of changes keeps a pop from mistaking an id that came back for one that stayed.
    top: AtomicU64,
}

impl Stack {
    pub(crate) fn new() -> Self {
        Self { top: AtomicU64::new(0) }
    }

    /// Puts `id` on top; `link` is told what is below.
    pub(crate) fn push(&self, id: u32, link: impl Fn(u32)) {
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            link(top as u32);
            match self.top.compare_exchange_weak(top, changed(top, id), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(seen) => top = seen,
            }
        }
    }

    /// Takes the top; `link` tells what is below an id, and may be asked about one that is no longer in the stack.
    pub(crate) fn pop(&self, link: impl Fn(u32) -> u32) -> Option<u32> {
        let mut top = self.top.load(Ordering::Acquire);
        while top as u32 != 0 {
            let below = link(top as u32);
            match self.top.compare_exchange_weak(top, changed(top, below), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(top as u32),
                Err(seen) => top = seen,
            }
        }
        None
    }

    /// Takes all; returns the top, 0 if there is none.
    pub(crate) fn take_all(&self) -> u32 {
        let mut top = self.top.load(Ordering::Acquire);
        loop {
            match self.top.compare_exchange_weak(top, changed(top, 0), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return top as u32,
                Err(seen) => top = seen,
            }
        }
    }
}

fn changed(top: u64, id: u32) -> u64 {
    ((top >> 32).wrapping_add(1) << 32) | u64::from(id)
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
