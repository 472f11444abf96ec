//! When a retired id may be used again: not before every reader that could hold it is gone.
//!
//! A reader *pins* the current epoch for as long as it follows ids. A writer that has unlinked an id *retires* it
//! under the current epoch. The epoch moves from `e` to `e + 1` only when nobody is pinned at `e - 1`; an id retired
//! at `e` is free once the epoch has reached `e + 2`. Nobody waits for anybody: a reader that never
//! leaves delays reuse, and memory grows by what is retired meanwhile.

use std::marker::PhantomData;

use crossbeam_utils::CachePadded;

use crate::arena::{Arena, Stack};
use crate::sync::{AtomicU64, AtomicUsize, Ordering, Step, fence, omitted, thread_stripe};

/// Counters per epoch, so that threads seldom share a cache line.
#[cfg(not(loom))]
const STRIPES: usize = 16;
#[cfg(loom)]
const STRIPES: usize = 1;

/// Steps of writers between two attempts to move the epoch.
#[cfg(not(loom))]
const COLLECT_EVERY: usize = 64;
#[cfg(loom)]
const COLLECT_EVERY: usize = 1;

pub(crate) struct Epoch<T> {
    now: AtomicU64,
    /// Pinned readers at epoch `e`, in row `e % 3`.
    pinned: [[CachePadded<AtomicUsize>; STRIPES]; 3],
    /// What was retired at epoch `e`, in `limbo[e % 3]`; the entries lie in `entries`.
    limbo: [Stack; 3],
    entries: Arena,
    waiting: AtomicUsize,
    /// Steps of writers since the last attempt to move the epoch.
    steps: AtomicUsize,
    item: PhantomData<T>,
}

/// Words of an entry. The last is also the link of a free one.
const EPOCH: usize = 0;
const ITEM: usize = 1;
const LINK: usize = 2;

/// While this lives, no id that its holder can reach is used for anything else.
pub(crate) struct Pin<'a>(&'a AtomicUsize);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl<T: Into<u64> + From<u64>> Epoch<T> {
    pub(crate) fn new() -> Self {
        Self {
            // Not 0, so that `now - 1` exists.
            now: AtomicU64::new(1),
            pinned: std::array::from_fn(|_| std::array::from_fn(|_| CachePadded::new(AtomicUsize::new(0)))),
            limbo: std::array::from_fn(|_| Stack::new()),
            entries: Arena::new(3),
            waiting: AtomicUsize::new(0),
            steps: AtomicUsize::new(0),
            item: PhantomData,
        }
    }

    /// Goes round again only when the epoch moved between two neighbouring instructions; the epoch moves at most once
    /// in [`COLLECT_EVERY`] steps of writers.
    pub(crate) fn pin(&self) -> Pin<'_> {
        let stripe = thread_stripe(STRIPES);
        loop {
            let epoch = self.now.load(Ordering::Relaxed);
            let cell: &AtomicUsize = &self.pinned[(epoch % 3) as usize][stripe];
            cell.fetch_add(1, Ordering::Relaxed);
            // Pairs with the fence in `advance`: either that sees our count, or we see its new epoch.
            fence(Ordering::SeqCst);
            if self.now.load(Ordering::Relaxed) == epoch {
                return Pin(cell);
            }
            cell.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Hands over something that no new reader can reach. The caller is pinned, so the epoch moves at most once until
    /// it has done so.
    pub(crate) fn retire(&self, _pin: &Pin<'_>, item: T) {
        // Whoever still holds the item pinned before this fence, so the epoch read here is no older than theirs.
        fence(Ordering::SeqCst);
        let epoch = self.now.load(Ordering::Relaxed);
        let entry = self.entries.take();
        let words = self.entries.words(entry);
        words[EPOCH].store(epoch, Ordering::Relaxed);
        words[ITEM].store(item.into(), Ordering::Relaxed);
        self.push(entry, epoch);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    fn push(&self, entry: u32, epoch: u64) {
        let link = &self.entries.words(entry)[LINK];
        self.limbo[(epoch % 3) as usize].push(entry, |below| link.store(u64::from(below), Ordering::Relaxed));
    }

    /// A step of a writer: every so many, what waits is [collected](Self::collect), also when nothing more is retired.
    pub(crate) fn step(&self, free: impl FnMut(T)) {
        if self.waiting.load(Ordering::Relaxed) > 0 && self.steps.fetch_add(1, Ordering::Relaxed) + 1 >= COLLECT_EVERY {
            self.steps.store(0, Ordering::Relaxed);
            self.collect(free);
        }
    }

    /// Moves the epoch if it can be moved, and frees what has thereby outlived its readers.
    pub(crate) fn collect(&self, mut free: impl FnMut(T)) {
        let Some(now) = self.advance() else { return };
        let due = (now + 1) % 3;
        for (row, limbo) in (0..).zip(&self.limbo) {
            if row != due && !omitted(Step::GracePeriod) {
                continue;
            }
            // Retired at `now - 2`. Should this thread have been slow, newer things may be among it.
            let mut entry = limbo.take_all();
            while entry != 0 {
                let words = self.entries.words(entry);
                let next = words[LINK].load(Ordering::Relaxed) as u32;
                let epoch = words[EPOCH].load(Ordering::Relaxed);
                if epoch + 2 <= now || omitted(Step::GracePeriod) {
                    let item = words[ITEM].load(Ordering::Relaxed);
                    self.entries.give_back(entry);
                    self.waiting.fetch_sub(1, Ordering::Relaxed);
                    free(T::from(item));
                } else {
                    self.push(entry, epoch);
                }
                entry = next;
            }
        }
    }

    /// The new epoch, if it was this thread that moved it.
    fn advance(&self) -> Option<u64> {
        let now = self.now.load(Ordering::Acquire);
        fence(Ordering::SeqCst);
        let row = &self.pinned[((now - 1) % 3) as usize];
        // Acquire: what those readers did comes before any reuse of what they read.
        let left = row.iter().all(|cell| cell.load(Ordering::Acquire) == 0) || omitted(Step::GracePeriod);
        let moved = || self.now.compare_exchange(now, now + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        (left && moved()).then_some(now + 1)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.entries.bytes()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_freed_only_after_its_readers_left() {
        let epoch = Epoch::<u64>::new();
        let mut freed = Vec::new();
        let reader = epoch.pin();
        {
            let writer = epoch.pin();
            epoch.retire(&writer, 7);
        }
        for _ in 0..10 {
            epoch.collect(|item| freed.push(item));
        }
        assert!(freed.is_empty());
        drop(reader);
        for _ in 0..3 {
            epoch.collect(|item| freed.push(item));
        }
        assert_eq!(freed, [7]);
    }
}
