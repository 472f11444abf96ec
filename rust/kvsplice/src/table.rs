//! A lock-free table of hints: hash → ids.
//!
//! A *level* is an array of buckets, each one cache line of eight words `[high half of the hash | id]`. The high half
//! also determines the home bucket, so a word can move to another level by itself. A full bucket spills into the
//! next. A slot goes from empty to a word to a tombstone and never back, so a probe that meets an empty slot has seen
//! all there is. When enough of a level's slots were used, a new level is built beside it, sized by what lives,
//! and takes its place.
//!
//! The table holds no truth. An id found here is a candidate; whether its record lives and is the one
//! sought is for the caller to check, through [`Records`]. What the table does promise:
//!
//! 1. While a record lives and its insertion has returned, every probe for its hash finds its id.
//! 2. Of two insertions that the caller calls the same, one returns the other's id.
//! 3. When a record's death, its erasure and all insertions of it are over, no level holds its word.
//!
//! During a rebuild, writers write the old level, then look for a new one and write that too. The copier
//! announces the new level before it reads the old one. With a fence between the two steps on both sides, a word is
//! seen by the copier or the new level by the writer; so nothing is missed (1). Copying is idempotent: every writer
//! claims the first empty slot in probe order, so two copies of one word contend for one slot. Each
//! insertion during a rebuild copies one block, and any thread can do the blocks that a stalled one left.

use std::ops::ControlFlow;

use crate::filter::Filter;
use crate::simd::prefetch;
use crate::sync::{
    Arc, AtomicU32, AtomicU64, AtomicUsize, Next, Ordering, Step, Swap, fence, omitted, zeroed_slice_box,
};

#[cfg(not(loom))]
const BUCKET: usize = 8;
#[cfg(loom)]
const BUCKET: usize = 2;

/// Buckets that are copied at a time.
#[cfg(not(loom))]
const BLOCK: usize = 64;
#[cfg(loom)]
const BLOCK: usize = 1;

#[cfg(not(loom))]
const LEAST_BUCKETS: usize = 64;
#[cfg(loom)]
const LEAST_BUCKETS: usize = 2;

const EMPTY: u64 = 0;
/// Id 0 names nothing, so no word looks like this.
const TOMBSTONE: u64 = HIGH;

const HIGH: u64 = u64::MAX << 32;

/// The records that a table's ids name. All methods are called under a pin.
pub(crate) trait Records {
    /// The hash of record `id`, or `None` when it is dead.
    fn hash_of(&self, id: u32) -> Option<u64>;
    /// Whether two records may not both be in the table. Dead records are the same as none.
    fn same(&self, id: u32, other: u32) -> bool;
    /// About how many live.
    fn live(&self) -> usize;
}

#[repr(align(64))]
#[cfg_attr(not(loom), derive(bytemuck::Zeroable))]
struct Bucket([AtomicU64; BUCKET]);

#[cfg(loom)]
impl crate::sync::Zeroed for Bucket {
    fn zeroed() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

pub(crate) struct Level {
    filter: Filter,
    buckets: Box<[Bucket]>,
    used: AtomicUsize,
    /// The level that is being built from this one.
    next: Next<Level>,
    cursor: AtomicUsize,
    copied: Box<[AtomicU32]>,
}

enum Claim {
    Done,
    Exists(u32),
    Full,
}

fn word(hash: u64, id: u32) -> u64 {
    (hash & HIGH) | u64::from(id)
}

/// Whether a word is of a record whose hash has the same high half.
fn agrees(word: u64, hash: u64) -> bool {
    word & HIGH == hash & HIGH && word as u32 != 0
}

impl Level {
    /// A level that is to be replaced at `entries`.
    fn for_entries(entries: usize, load: Load) -> Self {
        let slots = (entries * load.of).div_ceil(load.full);
        let buckets = slots.div_ceil(BUCKET).max(LEAST_BUCKETS);
        let blocks = buckets.div_ceil(BLOCK);
        Self {
            filter: Filter::for_entries(if load.filtered { buckets * BUCKET * load.full / load.of } else { 0 }),
            buckets: zeroed_slice_box(buckets),
            used: AtomicUsize::new(0),
            next: Next::new(),
            cursor: AtomicUsize::new(0),
            copied: zeroed_slice_box(blocks),
        }
    }

    fn slots(&self) -> usize {
        self.buckets.len() * BUCKET
    }

    /// Whether writers have to leave what is free to the copier.
    fn is_full(&self) -> bool {
        self.used.load(Ordering::Relaxed) >= self.slots() - self.slots() / 8
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        // Scaled to the number of buckets.
        (((hash >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    pub(crate) fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Asks for `hash`'s home bucket.
    pub(crate) fn prefetch_home(&self, hash: u64) {
        prefetch(&self.buckets[self.home(hash)]);
    }

    /// Whether `hash`'s home bucket rules nothing in: no word agrees and it has spilled nothing.
    ///
    /// Free of branches, so that the cache misses of neighbouring calls overlap.
    #[inline]
    pub(crate) fn home_rejects(&self, hash: u64) -> bool {
        let mut agrees = false;
        let mut spilled = true;
        for slot in &self.buckets[self.home(hash)].0 {
            let word = slot.load(Ordering::Relaxed);
            agrees |= word & HIGH == hash & HIGH;
            spilled &= word != EMPTY;
        }
        !(agrees | spilled)
    }

    fn probe_order(&self, hash: u64) -> impl Iterator<Item = &AtomicU64> {
        let home = self.home(hash);
        let (before, after) = self.buckets.split_at(home);
        after.iter().chain(before).flat_map(|bucket| &bucket.0)
    }

    /// Calls `visit` with each id whose word agrees with `hash`.
    #[inline]
    pub(crate) fn probe<B>(&self, hash: u64, mut visit: impl FnMut(u32) -> ControlFlow<B>) -> Option<B> {
        for slot in self.probe_order(hash) {
            let word = slot.load(Ordering::Acquire);
            if word == EMPTY {
                break;
            }
            if agrees(word, hash)
                && let ControlFlow::Break(found) = visit(word as u32)
            {
                return Some(found);
            }
        }
        None
    }

    fn claim(&self, hash: u64, id: u32, records: &impl Records) -> Claim {
        self.filter.add(hash);
        let mine = word(hash, id);
        for slot in self.probe_order(hash) {
            let mut seen = slot.load(Ordering::Acquire);
            if seen == EMPTY {
                match slot.compare_exchange(EMPTY, mine, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => {
                        self.used.fetch_add(1, Ordering::Relaxed);
                        return Claim::Done;
                    }
                    Err(other) => seen = other,
                }
            }
            if seen == mine {
                return Claim::Done;
            }
            if agrees(seen, hash) && !omitted(Step::LookBeforeClaim) && records.same(id, seen as u32) {
                return Claim::Exists(seen as u32);
            }
        }
        Claim::Full
    }

    fn tombstone(&self, hash: u64, id: u32) {
        let mine = word(hash, id);
        for slot in self.probe_order(hash) {
            let seen = slot.load(Ordering::Acquire);
            if seen == mine {
                // Another eraser of the same word may have been faster; that is as good.
                let _ = slot.compare_exchange(mine, TOMBSTONE, Ordering::AcqRel, Ordering::Relaxed);
                return;
            }
            if seen == EMPTY {
                return;
            }
        }
    }

    fn words(&self) -> impl Iterator<Item = u64> {
        self.buckets.iter().flat_map(|bucket| &bucket.0).map(|slot| slot.load(Ordering::Acquire))
    }
}

/// How full a table may get, as a fraction of its slots, and whether it has a filter.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    full: usize,
    of: usize,
    filtered: bool,
}

impl Load {
    /// For a table that is asked mostly for what it does not hold, and often.
    pub(crate) const SPARSE: Self = Self { full: 1, of: 2, filtered: true };
    /// For a table that is asked mostly for what it holds.
    pub(crate) const DENSE: Self = Self { full: 3, of: 4, filtered: false };
}

pub(crate) struct Table {
    current: Swap<Level>,
    load: Load,
    rebuilds: AtomicU64,
}

impl Table {
    pub(crate) fn new(load: Load) -> Self {
        Self { current: Swap::new(Level::for_entries(1, load)), load, rebuilds: AtomicU64::new(0) }
    }

    /// What readers probe. It stays complete for all that was inserted before it was loaded.
    pub(crate) fn level(&self) -> Arc<Level> {
        self.current.load()
    }

    /// The record under `hash` that `wanted` accepts, for a caller that is going to act on it.
    ///
    /// During a rebuild a level may hold the word of an insertion that is yet to lose against another one in the new level.
    /// So what is found is first brought into the new level, and if another record is there before it,
    /// that is the answer.
    pub(crate) fn find(&self, hash: u64, records: &impl Records, wanted: impl Fn(u32) -> bool) -> Option<u32> {
        let mut level = self.current.load();
        let mut found =
            level.probe(hash, |id| if wanted(id) { ControlFlow::Break(id) } else { ControlFlow::Continue(()) })?;
        loop {
            fence(Ordering::SeqCst);
            let Some(next) = level.next.get() else {
                return wanted(found).then_some(found);
            };
            found = Self::relink(&next, hash, found, records);
            level = next;
        }
    }

    /// Makes `id` findable under `hash`, or returns the id of a living record that is the same.
    ///
    /// In the second case the caller retires `id`; it is not in the table.
    pub(crate) fn insert(&self, hash: u64, id: u32, records: &impl Records) -> Result<(), u32> {
        let start = loop {
            let start = self.current.load();
            match Self::insert_from(&start, hash, id, records) {
                Claim::Done => break start,
                Claim::Exists(other) => {
                    Self::erase_from(&start, hash, id);
                    return Err(other);
                }
                Claim::Full => self.rebuild_now(records),
            }
        };
        self.keep_room(records);
        // A copier may have written the word again after an eraser looked for it, and so may we. Both
        // look at the record once more: it is dead, or the eraser comes after us.
        fence(Ordering::SeqCst);
        if records.hash_of(id) != Some(hash) && !omitted(Step::RecheckAfterInsert) {
            Self::erase_from(&start, hash, id);
        }
        Ok(())
    }

    fn insert_from(start: &Arc<Level>, hash: u64, id: u32, records: &impl Records) -> Claim {
        let mut level = Arc::clone(start);
        loop {
            if level.is_full() {
                return Claim::Full;
            }
            let claim = level.claim(hash, id, records);
            if !matches!(claim, Claim::Done) {
                return claim;
            }
            // Pairs with the fence in `copy_block`.
            fence(Ordering::SeqCst);
            if omitted(Step::FollowRebuild) {
                return claim;
            }
            match level.next.get() {
                Some(next) => level = next,
                None => return claim,
            }
        }
    }

    /// Removes the word of a record that is dead already.
    pub(crate) fn erase(&self, hash: u64, id: u32) {
        let current = self.current.load();
        // The record's death and the choice of the level come before our look at the slots: see `insert` and
        // `copy_block`.
        fence(Ordering::SeqCst);
        Self::erase_from(&current, hash, id);
    }

    fn erase_from(start: &Arc<Level>, hash: u64, id: u32) {
        let mut level = Arc::clone(start);
        loop {
            level.tombstone(hash, id);
            fence(Ordering::SeqCst);
            match level.next.get() {
                Some(next) => level = next,
                None => return,
            }
        }
    }

    /// Starts a rebuild when enough slots were used, and copies a block of one that is under way.
    fn keep_room(&self, records: &impl Records) {
        let level = self.current.load();
        if level.used.load(Ordering::Relaxed) * self.load.of <= level.slots() * self.load.full {
            return;
        }
        let next = self.next_of(&level, records);
        let claimed = level.cursor.fetch_add(1, Ordering::Relaxed);
        let block = if claimed < level.copied.len() {
            Some(claimed)
        } else {
            level.copied.iter().position(|done| done.load(Ordering::Acquire) == 0)
        };
        if let Some(block) = block {
            self.copy_block(&level, &next, block, records);
        }
        self.finish(&level, next);
    }

    fn next_of(&self, level: &Arc<Level>, records: &impl Records) -> Arc<Level> {
        loop {
            if let Some(next) = level.next.get() {
                return next;
            }
            // Room for half as much again as lives now, and for what comes while the blocks are copied: each insertion
            // copies one.
            let entries = records.live() * 3 / 2 + level.copied.len();
            level.next.set(Arc::new(Level::for_entries(entries, self.load)));
        }
    }

    fn copy_block(&self, level: &Arc<Level>, next: &Arc<Level>, block: usize, records: &impl Records) {
        let first = block * BLOCK;
        let last = (first + BLOCK).min(level.buckets.len());
        let slots = || level.buckets[first..last].iter().flat_map(|bucket| &bucket.0);
        // Pairs with the fence in `insert_from`.
        fence(Ordering::SeqCst);
        let mut copied = [(&level.buckets[first].0[0], EMPTY); BLOCK * BUCKET];
        let mut count = 0;
        for slot in slots() {
            let word = slot.load(Ordering::Acquire);
            if word as u32 != 0 && Self::copy_word(next, word, word as u32, records) == word as u32 {
                copied[count] = (slot, word);
                count += 1;
            }
        }
        // Whoever erased one of these meanwhile began with this level, and then it is gone here; or it began with the
        // next, and then that has become the current one. Otherwise the eraser comes after us.
        fence(Ordering::SeqCst);
        let still_current = Arc::ptr_eq(&self.current.load(), level);
        for &(slot, word) in &copied[..count] {
            let id = word as u32;
            let erased = if still_current {
                slot.load(Ordering::Acquire) != word
            } else {
                !records.hash_of(id).is_some_and(|hash| agrees(word, hash))
            };
            if erased && !omitted(Step::RecheckAfterInsert) {
                Self::erase_from(next, word, id);
                // The id may serve the same text again by now, whose insertion took our word for its own.
                fence(Ordering::SeqCst);
                if records.hash_of(id).is_some_and(|hash| agrees(word, hash)) {
                    Self::relink(next, word, id, records);
                }
            }
        }
        level.copied[block].store(1, Ordering::Release);
    }

    /// Writes a word into a new level, or returns the record that is there instead.
    fn copy_word(next: &Level, hash: u64, id: u32, records: &impl Records) -> u32 {
        match next.claim(hash, id, records) {
            Claim::Done => id,
            Claim::Exists(other) => other,
            // See `next_of`: it was made with room for all that can come until it is complete.
            Claim::Full => unreachable!("no room in a new level"),
        }
    }

    /// As [`copy_word`](Self::copy_word), and takes the word back if the record is dead.
    fn relink(next: &Arc<Level>, hash: u64, id: u32, records: &impl Records) -> u32 {
        loop {
            let there = Self::copy_word(next, hash, id, records);
            fence(Ordering::SeqCst);
            let lives = || records.hash_of(id).is_some_and(|other| agrees(word(hash, id), other));
            if there != id || lives() {
                return there;
            }
            Self::erase_from(next, hash, id);
            fence(Ordering::SeqCst);
            if !lives() {
                return id;
            }
        }
    }

    fn finish(&self, level: &Arc<Level>, next: Arc<Level>) {
        // The flags themselves, not a count of them: a thread that stopped between flag and count would hold all up.
        let unfinished = || level.copied.iter().any(|done| done.load(Ordering::Acquire) == 0);
        let all_claimed = level.cursor.load(Ordering::Relaxed) >= level.copied.len();
        if all_claimed && !unfinished() && self.current.replace(level, next) {
            self.rebuilds.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Completes a rebuild alone, for a writer that found no slot.
    fn rebuild_now(&self, records: &impl Records) {
        let level = self.current.load();
        if level.next.get().is_none() && !level.is_full() {
            // Another thread has just been through with it.
            return;
        }
        let next = self.next_of(&level, records);
        level.cursor.store(level.copied.len(), Ordering::Relaxed);
        for (block, done) in level.copied.iter().enumerate() {
            if done.load(Ordering::Acquire) == 0 {
                self.copy_block(&level, &next, block, records);
            }
        }
        self.finish(&level, next);
    }

    pub(crate) fn bytes(&self) -> usize {
        let level = self.level();
        let size = |level: &Level| size_of_val(&*level.buckets) + level.filter.bytes();
        size(&level) + level.next.get().map_or(0, |next| size(&next))
    }

    pub(crate) fn rebuilds(&self) -> u64 {
        self.rebuilds.load(Ordering::Relaxed)
    }

    /// The first broken promise, with no other thread at work.
    pub(crate) fn check(&self, records: &impl Records, ids: impl Iterator<Item = u32>) -> Result<(), String> {
        let mut levels = vec![self.level()];
        levels.extend(levels[0].next.get());
        for (n, level) in levels.iter().enumerate() {
            let mut seen = std::collections::HashSet::new();
            for word in level.words().filter(|&word| word as u32 != 0) {
                let id = word as u32;
                let Some(hash) = records.hash_of(id) else {
                    return Err(format!("level {n} holds the dead record {id}"));
                };
                if !agrees(word, hash) {
                    return Err(format!("level {n} holds record {id} under another hash"));
                }
                if !seen.insert(id) {
                    return Err(format!("level {n} holds record {id} twice"));
                }
            }
        }
        for id in ids {
            let Some(hash) = records.hash_of(id) else {
                continue;
            };
            let find = |other| {
                if other == id { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            if !levels[0].filter.may_hold(hash) {
                return Err(format!("the filter denies record {id}"));
            }
            if levels[0].probe(hash, find).is_none() {
                return Err(format!("no probe finds record {id}"));
            }
        }
        Ok(())
    }
}
