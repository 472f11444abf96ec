//! Contents: chunk texts, each kept once, with the keys that hold them.
//!
//! A content's holders are a stack of nodes that never change: the newest first, one for each registration or
//! confirmation. Only the head moves, by compare-and-swap. A node whose key has moved on is *stale*: it is popped when
//! it is on top, and dropped with all others when a content has gathered as many as it kept last time. A head of 0 is
//! the end: nobody pushes onto it any more, and the thread that wrote it buries the content.

use std::collections::HashSet;
use std::ops::ControlFlow;

use crate::arena::Arena;
use crate::epoch::Pin;
use crate::keys::{Keys, Registration};
use crate::limbo::{Limbo, Retired};
use crate::simd::prefetch;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, Step, fence, omitted};
use crate::table::{Level, Load, Records, Table};

/// Words of a content. Its tokens follow, two in a word.
const HEAD: usize = 0;
const HASH: usize = 1;
const SCOPE: usize = 2;
/// Nodes that are tolerated in the high half, nodes that went stale since the last clearing in the low one.
const STALE: usize = 3;
const TOKENS: usize = 4;

/// Words of a node: the next node in the high half and the key in the low one, and the key's incarnation.
const NEXT_KEY: usize = 0;
const INCARNATION: usize = 1;

const LEAST_TOLERATED: u64 = 8;

/// A chunk text on its way in or asked for.
#[derive(Clone, Copy)]
pub(crate) struct Text<'a> {
    pub(crate) hash: u64,
    pub(crate) scope: u32,
    pub(crate) tokens: &'a [u32],
}

/// How a content compares with a text.
#[derive(PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    /// Another hash or scope, or dead.
    Other,
    /// The same hash and scope, and other tokens.
    Collision,
}

pub(crate) struct Contents {
    arena: Arena,
    nodes: Arena,
    table: Table,
    live: AtomicUsize,
}

/// A copy of a stack that nobody else has seen.
struct Copied {
    top: u32,
    nodes: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Node {
    id: u32,
    next: u32,
    key: u32,
    incarnation: u64,
}

impl Contents {
    pub(crate) fn new(chunk: usize) -> Self {
        Self {
            arena: Arena::new(TOKENS + chunk.div_ceil(2)),
            nodes: Arena::new(2),
            table: Table::new(Load::SPARSE),
            live: AtomicUsize::new(0),
        }
    }

    pub(crate) fn level(&self) -> crate::sync::Arc<Level> {
        self.table.level()
    }

    fn head(&self, id: u32) -> u32 {
        self.arena.words(id)[HEAD].load(Ordering::Acquire) as u32
    }

    pub(crate) fn compare(&self, id: u32, text: &Text<'_>) -> Comparison {
        let words = self.arena.words(id);
        let dead = words[HEAD].load(Ordering::Acquire) == 0;
        if dead
            || words[HASH].load(Ordering::Relaxed) != text.hash
            || words[SCOPE].load(Ordering::Relaxed) != u64::from(text.scope)
        {
            return Comparison::Other;
        }
        if same_tokens(&words[TOKENS..], text.tokens) { Comparison::Equal } else { Comparison::Collision }
    }

    pub(crate) fn find(&self, text: &Text<'_>, _pin: &Pin<'_>) -> Option<u32> {
        self.table.find(text.hash, self, |id| self.compare(id, text) == Comparison::Equal)
    }

    /// Asks for the places in the table and its filter where texts are or will be.
    pub(crate) fn prefetch_places(&self, hashes: impl Iterator<Item = u64>) {
        let level = self.table.level();
        for hash in hashes {
            level.prefetch_home(hash);
            level.filter().prefetch(hash);
        }
    }

    /// Asks for the cache lines that [`compare`](Self::compare) will read.
    pub(crate) fn prefetch(&self, id: u32) {
        // The processor goes on by itself from there.
        self.arena.words(id).chunks(8).take(24).for_each(|line| prefetch(&line[0]));
    }

    /// Asks for the node of the newest holder.
    pub(crate) fn prefetch_holder(&self, id: u32) {
        let top = self.head(id);
        if top != 0 {
            prefetch(&self.nodes.words(top)[0]);
        }
    }

    /// The key of the newest holder, which may be stale.
    pub(crate) fn newest_holder(&self, id: u32) -> Option<u32> {
        let top = self.head(id);
        (top != 0).then(|| self.node(top).key)
    }

    /// Whether a key holds the content or is about to.
    pub(crate) fn is_held(&self, id: u32, keys: &Keys) -> bool {
        self.chain(self.head(id)).any(|node| keys.is_current(node.key, node.incarnation))
    }

    /// Makes `registration` a holder of `text`, whose content is made if there is none. Returns the content.
    pub(crate) fn hold(
        &self,
        text: &Text<'_>,
        registration: &Registration,
        keys: &Keys,
        pin: &Pin<'_>,
        limbo: &Limbo,
    ) -> u32 {
        let node = self.new_node(registration.key, registration.incarnation);
        loop {
            if let Some(id) = self.find(text, pin) {
                if self.push(id, node, keys, pin, limbo) {
                    return id;
                }
                continue;
            }
            let id = self.create(text, node);
            if self.table.insert(text.hash, id, self).is_ok() {
                return id;
            }
            self.arena.words(id)[HEAD].store(0, Ordering::Release);
            self.live.fetch_sub(1, Ordering::Relaxed);
            limbo.retire(pin, Retired::Content(id));
        }
    }

    fn new_node(&self, key: u32, incarnation: u64) -> u32 {
        let node = self.nodes.take();
        let words = self.nodes.words(node);
        words[NEXT_KEY].store(u64::from(key), Ordering::Relaxed);
        words[INCARNATION].store(incarnation, Ordering::Relaxed);
        node
    }

    fn create(&self, text: &Text<'_>, node: u32) -> u32 {
        let next_key = &self.nodes.words(node)[NEXT_KEY];
        next_key.store(next_key.load(Ordering::Relaxed) & 0xffff_ffff, Ordering::Relaxed);
        let id = self.arena.take();
        let words = self.arena.words(id);
        words[HASH].store(text.hash, Ordering::Relaxed);
        words[SCOPE].store(u64::from(text.scope), Ordering::Relaxed);
        words[STALE].store(LEAST_TOLERATED << 32, Ordering::Relaxed);
        store_tokens(&words[TOKENS..], text.tokens);
        words[HEAD].store(u64::from(node), Ordering::Release);
        self.live.fetch_add(1, Ordering::Relaxed);
        id
    }

    /// Puts a node that nobody else has seen on top, and while at it leaves stale nodes out if there are many: so a
    /// clearing can only be beaten by one that cleared as well. `false`: the content is dead.
    fn push(&self, id: u32, node: u32, keys: &Keys, pin: &Pin<'_>, limbo: &Limbo) -> bool {
        let next_key = &self.nodes.words(node)[NEXT_KEY];
        let key = next_key.load(Ordering::Relaxed) & 0xffff_ffff;
        let head = &self.arena.words(id)[HEAD];
        let mut top = head.load(Ordering::Acquire) as u32;
        while top != 0 || omitted(Step::LeaveTheDead) {
            let cleared = self.has_many_stale(id).then(|| self.copy_current(top, keys));
            let below = cleared.as_ref().map_or(top, |copy| copy.top);
            next_key.store((u64::from(below) << 32) | key, Ordering::Relaxed);
            let pushed = head.compare_exchange(u64::from(top), u64::from(node), Ordering::AcqRel, Ordering::Acquire);
            if let Some(copy) = cleared {
                self.settle(id, top, copy, pushed.is_ok(), pin, limbo);
            }
            match pushed {
                Ok(_) => return true,
                Err(seen) => top = seen as u32,
            }
        }
        false
    }

    fn node(&self, id: u32) -> Node {
        let words = self.nodes.words(id);
        let next_key = words[NEXT_KEY].load(Ordering::Relaxed);
        let incarnation = words[INCARNATION].load(Ordering::Relaxed);
        Node { id, next: (next_key >> 32) as u32, key: next_key as u32, incarnation }
    }

    /// The nodes from `top` down, the newest first.
    fn chain(&self, top: u32) -> impl Iterator<Item = Node> {
        let mut next = top;
        std::iter::from_fn(move || {
            (next != 0).then(|| {
                let node = self.node(next);
                next = node.next;
                node
            })
        })
    }

    /// Calls `visit` with the registered keys that hold the content and their start positions, the one
    /// registered or confirmed last first. A key that was confirmed may come again further down.
    pub(crate) fn visit_holders(&self, id: u32, keys: &Keys, mut visit: impl FnMut(u32, u64) -> ControlFlow<()>) {
        for node in self.chain(self.head(id)) {
            if !keys.is_live(node.key, node.incarnation) {
                continue;
            }
            let start = keys.start(node.key);
            // The key may have been removed and registered anew since; its start would be the new one's.
            fence(Ordering::Acquire);
            if keys.is_live(node.key, node.incarnation) && visit(node.key, start).is_break() {
                return;
            }
        }
    }

    /// Puts a living key on top of its content's holders.
    pub(crate) fn promote(&self, id: u32, key: u32, incarnation: u64, keys: &Keys, pin: &Pin<'_>, limbo: &Limbo) {
        let top = self.head(id);
        if top == 0 {
            return;
        }
        let node = self.node(top);
        if node.key == key && node.incarnation == incarnation {
            return;
        }
        let node = self.new_node(key, incarnation);
        if self.push(id, node, keys, pin, limbo) {
            // Its older node is of no more use. And should the key have died meanwhile, so is this one.
            self.drop_stale(id, keys, pin, limbo);
        } else {
            self.nodes.give_back(node);
        }
    }

    /// Clears up after a holder of the content went stale: its end, if that was the last.
    pub(crate) fn drop_stale(&self, id: u32, keys: &Keys, pin: &Pin<'_>, limbo: &Limbo) {
        // Of two threads whose keys die at once, at least one sees both deaths.
        if !omitted(Step::FenceBeforeSweep) {
            fence(Ordering::SeqCst);
        }
        if self.pop_stale(id, keys, pin, limbo) {
            self.arena.words(id)[STALE].fetch_add(1, Ordering::Relaxed);
            if self.has_many_stale(id) {
                self.clear_stale(id, keys, pin, limbo);
                fence(Ordering::SeqCst);
                self.pop_stale(id, keys, pin, limbo);
            }
        }
    }

    fn has_many_stale(&self, id: u32) -> bool {
        let count = self.arena.words(id)[STALE].load(Ordering::Relaxed);
        count & 0xffff_ffff >= count >> 32
    }

    /// Pops stale nodes off the top; buries the content if none is left. Whether it lives.
    fn pop_stale(&self, id: u32, keys: &Keys, pin: &Pin<'_>, limbo: &Limbo) -> bool {
        let head = &self.arena.words(id)[HEAD];
        loop {
            let top = head.load(Ordering::Acquire) as u32;
            if top == 0 {
                return false;
            }
            let keep = self.chain(top).find(|node| keys.is_current(node.key, node.incarnation));
            let keep = keep.map_or(0, |node| node.id);
            if keep == top {
                return true;
            }
            let popped = head.compare_exchange(u64::from(top), u64::from(keep), Ordering::AcqRel, Ordering::Relaxed);
            if popped.is_err() {
                continue;
            }
            if keep == 0 {
                self.live.fetch_sub(1, Ordering::Relaxed);
                self.table.erase(self.arena.words(id)[HASH].load(Ordering::Relaxed), id);
                limbo.retire(pin, Retired::Content(id));
            }
            for node in self.chain(top).take_while(|node| node.id != keep) {
                limbo.retire(pin, Retired::Node(node.id));
            }
            return keep != 0;
        }
    }

    /// Replaces the stack by one without stale nodes. Whoever moves the head meanwhile has cleared as well, or popped.
    fn clear_stale(&self, id: u32, keys: &Keys, pin: &Pin<'_>, limbo: &Limbo) {
        let head = &self.arena.words(id)[HEAD];
        let top = head.load(Ordering::Acquire) as u32;
        let copy = self.copy_current(top, keys);
        // An empty stack would be the content's end: that is for `pop_stale` to decide.
        let swapped = copy.top != 0
            && head.compare_exchange(u64::from(top), u64::from(copy.top), Ordering::AcqRel, Ordering::Relaxed).is_ok();
        self.settle(id, top, copy, swapped, pin, limbo);
    }

    /// Copies the nodes from `top` down that are not stale, the newest of each key.
    fn copy_current(&self, top: u32, keys: &Keys) -> Copied {
        let mut seen = HashSet::new();
        let kept: Vec<Node> = self
            .chain(top)
            .filter(|node| keys.is_current(node.key, node.incarnation) && seen.insert(node.key))
            .collect();
        let mut copy = Copied { top: 0, nodes: Vec::with_capacity(kept.len()) };
        for node in kept.iter().rev() {
            let id = self.new_node(node.key, node.incarnation);
            self.nodes.words(id)[NEXT_KEY].store((u64::from(copy.top) << 32) | u64::from(node.key), Ordering::Relaxed);
            copy.top = id;
            copy.nodes.push(id);
        }
        copy
    }

    /// After an attempt to put a copy in the place of the stack from `old_top` down: retires what is not needed.
    fn settle(&self, id: u32, old_top: u32, copy: Copied, swapped: bool, pin: &Pin<'_>, limbo: &Limbo) {
        if swapped {
            let tolerated = (copy.nodes.len() as u64).max(LEAST_TOLERATED);
            self.arena.words(id)[STALE].store(tolerated << 32, Ordering::Relaxed);
            self.chain(old_top).for_each(|node| limbo.retire(pin, Retired::Node(node.id)));
        } else {
            copy.nodes.into_iter().for_each(|node| self.nodes.give_back(node));
        }
    }

    pub(crate) fn free(&self, id: u32) {
        self.arena.give_back(id);
    }

    pub(crate) fn free_node(&self, id: u32) {
        self.nodes.give_back(id);
    }

    /// Bytes of the texts, and of all else.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let all = self.arena.bytes();
        let overhead = all / self.arena.stride() * TOKENS;
        (all - overhead, overhead + self.nodes.bytes() + self.table.bytes())
    }

    pub(crate) fn rebuilds(&self) -> u64 {
        self.table.rebuilds()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> {
        (1..self.arena.high_water()).filter(|&id| self.head(id) != 0)
    }

    /// The first broken rule, with no other thread at work.
    pub(crate) fn check(&self, keys: &Keys) -> Result<(), String> {
        let counted = self.live.load(Ordering::Relaxed);
        let found = self.ids().count();
        if counted != found {
            return Err(format!("contents: {counted} counted, {found} found"));
        }
        let mut nodes = HashSet::new();
        let mut holders = HashSet::new();
        for id in self.ids() {
            for (depth, node) in self.chain(self.head(id)).enumerate() {
                if !nodes.insert(node.id) {
                    return Err(format!("content {id}: node {} is in two places", node.id));
                }
                let current = keys.is_current(node.key, node.incarnation);
                if depth == 0 && !current {
                    return Err(format!("content {id}: the newest holder is stale"));
                }
                if current {
                    if keys.content(node.key) != id {
                        return Err(format!("content {id}: key {} names another content", node.key));
                    }
                    if u64::from(keys.scope(node.key)) != self.arena.words(id)[SCOPE].load(Ordering::Relaxed) {
                        return Err(format!("content {id}: key {} is of another scope", node.key));
                    }
                    holders.insert(node.key);
                }
            }
        }
        for key in keys.ids() {
            let state = keys.state(key);
            if keys.is_live(key, state.incarnation()) && !holders.contains(&key) {
                return Err(format!("key {key} is live and holds nothing"));
            }
        }
        self.table.check(self, self.ids()).map_err(|e| format!("contents: {e}"))
    }
}

impl Records for Contents {
    fn hash_of(&self, id: u32) -> Option<u64> {
        (self.head(id) != 0).then(|| self.arena.words(id)[HASH].load(Ordering::Relaxed))
    }

    fn same(&self, id: u32, other: u32) -> bool {
        let (a, b) = (self.arena.words(id), self.arena.words(other));
        let equal = |n: usize| a[n].load(Ordering::Relaxed) == b[n].load(Ordering::Relaxed);
        self.head(other) != 0 && (HASH..=SCOPE).all(equal) && (TOKENS..a.len()).all(equal)
    }

    fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }
}

fn store_tokens(words: &[AtomicU64], tokens: &[u32]) {
    let (pairs, last) = tokens.as_chunks::<2>();
    for (word, &[low, high]) in words.iter().zip(pairs) {
        word.store(u64::from(low) | (u64::from(high) << 32), Ordering::Relaxed);
    }
    if let [last] = last {
        words[pairs.len()].store(u64::from(*last), Ordering::Relaxed);
    }
}

fn same_tokens(words: &[AtomicU64], tokens: &[u32]) -> bool {
    let (pairs, last) = tokens.as_chunks::<2>();
    let differs = |(word, &[low, high]): (&AtomicU64, &[u32; 2])| {
        word.load(Ordering::Relaxed) != u64::from(low) | (u64::from(high) << 32)
    };
    !words.iter().zip(pairs).any(differs)
        && last.first().is_none_or(|&last| words[pairs.len()].load(Ordering::Relaxed) == u64::from(last))
}
