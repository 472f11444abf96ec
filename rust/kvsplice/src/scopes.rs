//! Scopes: byte strings of any length, interned as small ids while anything refers to them.
//!
//! A scope is known by its BLAKE3 digest. Its record counts what refers to it (calls under way and keys), and dies with
//! the last; a count of zero is never left again, so of several threads one alone buries it.

use crate::arena::Arena;
use crate::epoch::Pin;
use crate::hash::hash_words;
use crate::limbo::{Limbo, Retired};
use crate::sync::{AtomicUsize, Ordering};
use crate::table::{Load, Records, Table};

/// Words of a record.
const REFERENCES: usize = 0;
const DIGEST: usize = 1;
const STRIDE: usize = 5;

/// A scope as its bytes alone define it.
#[derive(Clone, Copy)]
pub(crate) struct ScopeName {
    digest: [u64; 4],
    /// Moves each scope's fingerprints to other places of the table.
    pub(crate) key: u64,
}

impl ScopeName {
    pub(crate) fn new(secret: u64, bytes: &[u8]) -> Self {
        let digest = blake3::hash(bytes);
        let digest = std::array::from_fn(|n| {
            u64::from_le_bytes(digest.as_bytes()[8 * n..][..8].try_into().expect("eight bytes"))
        });
        Self { digest, key: hash_words(secret, digest) }
    }
}

pub(crate) struct Scopes {
    arena: Arena,
    table: Table,
    secret: u64,
    live: AtomicUsize,
}

impl Scopes {
    pub(crate) fn new(secret: u64) -> Self {
        Self { arena: Arena::new(STRIDE), table: Table::new(Load::DENSE), secret, live: AtomicUsize::new(0) }
    }

    fn digest(&self, id: u32) -> [u64; 4] {
        let words = self.arena.words(id);
        std::array::from_fn(|n| words[DIGEST + n].load(Ordering::Relaxed))
    }

    fn alive(&self, id: u32) -> bool {
        self.arena.words(id)[REFERENCES].load(Ordering::Acquire) != 0
    }

    /// The id of a scope that something refers to.
    pub(crate) fn find(&self, name: &ScopeName, _pin: &Pin<'_>) -> Option<u32> {
        self.table.find(name.key, self, |id| self.alive(id) && self.digest(id) == name.digest)
    }

    /// The id of a scope, with a reference to be [released](Self::release).
    pub(crate) fn acquire(&self, name: &ScopeName, pin: &Pin<'_>, limbo: &Limbo) -> u32 {
        loop {
            if let Some(id) = self.find(name, pin) {
                if self.try_retain(id) {
                    return id;
                }
                continue;
            }
            let id = self.arena.take();
            let words = self.arena.words(id);
            for (n, &word) in name.digest.iter().enumerate() {
                words[DIGEST + n].store(word, Ordering::Relaxed);
            }
            words[REFERENCES].store(1, Ordering::Release);
            self.live.fetch_add(1, Ordering::Relaxed);
            if self.table.insert(name.key, id, self).is_ok() {
                return id;
            }
            words[REFERENCES].store(0, Ordering::Release);
            self.live.fetch_sub(1, Ordering::Relaxed);
            limbo.retire(pin, Retired::Scope(id));
        }
    }

    fn try_retain(&self, id: u32) -> bool {
        let count = &self.arena.words(id)[REFERENCES];
        let more = |n| if n == 0 { None } else { Some(n + 1) };
        count.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// One more reference, for a caller that holds one.
    pub(crate) fn retain(&self, id: u32) {
        self.arena.words(id)[REFERENCES].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn release(&self, id: u32, pin: &Pin<'_>, limbo: &Limbo) {
        if self.arena.words(id)[REFERENCES].fetch_sub(1, Ordering::AcqRel) == 1 {
            self.live.fetch_sub(1, Ordering::Relaxed);
            self.table.erase(hash_words(self.secret, self.digest(id)), id);
            limbo.retire(pin, Retired::Scope(id));
        }
    }

    pub(crate) fn free(&self, id: u32) {
        self.arena.give_back(id);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.arena.bytes() + self.table.bytes()
    }

    pub(crate) fn references(&self, id: u32) -> u64 {
        self.arena.words(id)[REFERENCES].load(Ordering::Acquire)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> {
        (1..self.arena.high_water()).filter(|&id| self.alive(id))
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.table.check(self, self.ids()).map_err(|e| format!("scopes: {e}"))
    }
}

impl Records for Scopes {
    fn hash_of(&self, id: u32) -> Option<u64> {
        self.alive(id).then(|| hash_words(self.secret, self.digest(id)))
    }

    fn same(&self, id: u32, other: u32) -> bool {
        self.alive(other) && self.digest(id) == self.digest(other)
    }

    fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }
}
