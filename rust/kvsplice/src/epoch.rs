//! When a retired id may be used again: not before every reader that could hold it is gone.
//!
//! A reader *pins* the current epoch for as long as it follows ids. A writer that has unlinked an id *retires* it
//! under the current epoch. The epoch moves from `e` to `e + 1` only when nobody is pinned at `e - 1`; an id retired
//! at `e` is free once the epoch has reached `e + 2`. Nobody waits for anybody: a reader that never
//! leaves delays reuse, and memory grows by what is retired meanwhile.

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU64, AtomicUsize, Ordering, Queue, Step, fence, omitted, thread_stripe};

/// Counters per epoch, so that threads seldom share a cache line.
#[cfg(not(loom))]
const STRIPES: usize = 16;
#[cfg(loom)]
const STRIPES: usize = 1;

/// Retirements between two attempts to move the epoch.
#[cfg(not(loom))]
const COLLECT_EVERY: usize = 64;
#[cfg(loom)]
const COLLECT_EVERY: usize = 1;

pub(crate) struct Epoch<T> {
    now: AtomicU64,
    /// Pinned readers at epoch `e`, in row `e % 3`.
    pinned: [[CachePadded<AtomicUsize>; STRIPES]; 3],
    limbo: Queue<(u64, T)>,
    since_collect: AtomicUsize,
}

/// While this lives, no id that its holder can reach is used for anything else.
pub(crate) struct Pin<'a>(&'a AtomicUsize);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl<T> Epoch<T> {
    pub(crate) fn new() -> Self {
        Self {
            // Not 0, so that `now - 1` exists.
            now: AtomicU64::new(1),
            pinned: std::array::from_fn(|_| std::array::from_fn(|_| CachePadded::new(AtomicUsize::new(0)))),
            limbo: Queue::new(),
            since_collect: AtomicUsize::new(0),
        }
    }

    /// Goes round again only when the epoch moved between two neighbouring instructions; the epoch moves at most once
    /// in [`COLLECT_EVERY`] retirements.
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

    /// Hands over something that no new reader can reach.
    pub(crate) fn retire(&self, _pin: &Pin<'_>, item: T) {
        // Whoever still holds the item pinned before this fence, so the epoch read here is no older than theirs.
        fence(Ordering::SeqCst);
        self.limbo.push((self.now.load(Ordering::Relaxed), item));
        self.since_collect.fetch_add(1, Ordering::Relaxed);
    }

    /// [Collects](Self::collect) when enough was retired since the last time.
    pub(crate) fn collect_if_due(&self, free: impl FnMut(T)) {
        if self.since_collect.load(Ordering::Relaxed) >= COLLECT_EVERY {
            self.since_collect.store(0, Ordering::Relaxed);
            self.collect(free);
        }
    }

    /// Moves the epoch if it can be moved, and frees what has outlived its readers.
    pub(crate) fn collect(&self, mut free: impl FnMut(T)) {
        let now = self.advance();
        while let Some((epoch, item)) = self.limbo.pop() {
            if epoch + 2 <= now || omitted(Step::GracePeriod) {
                free(item);
            } else {
                self.limbo.push((epoch, item));
                break;
            }
        }
    }

    fn advance(&self) -> u64 {
        let now = self.now.load(Ordering::Acquire);
        fence(Ordering::SeqCst);
        let row = &self.pinned[((now - 1) % 3) as usize];
        // Acquire: what those readers did comes before any reuse of what they read.
        if row.iter().any(|cell| cell.load(Ordering::Acquire) != 0) {
            return now;
        }
        match self.now.compare_exchange(now, now + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => now + 1,
            Err(seen) => seen,
        }
    }

    pub(crate) fn in_limbo(&self) -> usize {
        self.limbo.len()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_freed_only_after_its_readers_left() {
        let epoch = Epoch::new();
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
        assert_eq!(epoch.in_limbo(), 0);
    }
}
