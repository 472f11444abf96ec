//! The matcher: register, match, remove, strike, confirm, and registrations in flight.

use std::collections::HashSet;
use std::ops::ControlFlow;

use crate::config::{Config, MAX_CAPACITY, MAX_CHUNK_SIZE, MAX_STRIKES, OnFull};
use crate::contents::{Comparison, Contents, Text};
use crate::epoch::{Epoch, Pin};
use crate::error::Error;
use crate::hash::{Roller, Scratch, Secrets};
use crate::keys::{KeyName, Keys, MAX_CHUNK_HASH_BYTES, Phase, State};
use crate::limbo::{Limbo, Retired};
use crate::report::{Hit, Options, Registered, Stats};
use crate::scopes::{ScopeName, Scopes};
use crate::simd::Simd;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering, Step, fence, omitted};
use crate::table::Records;

#[derive(Default)]
struct Counters {
    registered: AtomicU64,
    removed: AtomicU64,
    struck_out: AtomicU64,
    evicted: AtomicU64,
    rejected_full: AtomicU64,
    rejected_collisions: AtomicU64,
}

fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

/// Finds stored chunks at any offset of a token sequence.
///
/// See the [crate](crate) for what it promises to concurrent callers.
pub struct Index {
    config: Config,
    simd: Simd,
    roller: Roller,
    secret: u64,
    scopes: Scopes,
    keys: Keys,
    contents: Contents,
    limbo: Limbo,
    entries: AtomicUsize,
    was_full: AtomicU32,
    counters: Counters,
}

impl Index {
    /// An empty index.
    ///
    /// # Errors
    /// A field of `config` is out of range.
    pub fn new(config: Config) -> Result<Self, Error> {
        if !(1..=MAX_CHUNK_SIZE).contains(&config.chunk_size) {
            return Err(Error::ChunkSize(config.chunk_size));
        }
        if !(1..=MAX_CAPACITY).contains(&config.capacity) {
            return Err(Error::Capacity(config.capacity));
        }
        let secrets = Secrets::from_seed(config.seed.unwrap_or_else(random_seed));
        let simd = Simd::detect();
        Ok(Self {
            simd,
            roller: Roller::with_factor(config.chunk_size, secrets.base, secrets.factor, simd),
            secret: secrets.key,
            scopes: Scopes::new(secrets.key),
            keys: Keys::new(),
            contents: Contents::new(config.chunk_size),
            limbo: Epoch::new(),
            entries: AtomicUsize::new(0),
            was_full: AtomicU32::new(0),
            counters: Counters::default(),
            config,
        })
    }

    /// Tokens per chunk.
    pub fn chunk_size(&self) -> usize {
        self.config.chunk_size
    }

    /// Chunk hashes registered now.
    pub fn len(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    /// Whether nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Indexes the full chunks `start_chunk..` of `tokens`, chunk `i` under `chunk_hashes[i]` with the stored position
    /// `position_offset + i * chunk_size`. A chunk hash that is registered in `scope` already is skipped.
    ///
    /// # Errors
    /// Fewer chunk hashes than full chunks, one of a wrong length, or positions beyond `i64::MAX`; nothing was indexed.
    pub fn register(
        &self,
        tokens: &[u32],
        chunk_hashes: &[impl AsRef<[u8]>],
        start_chunk: usize,
        position_offset: u64,
        scope: &[u8],
    ) -> Result<Registered, Error> {
        let chunks = tokens.len() / self.config.chunk_size;
        if chunk_hashes.len() < chunks {
            return Err(Error::TooFewChunkHashes { given: chunk_hashes.len(), needed: chunks });
        }
        check_chunk_hashes(chunk_hashes)?;
        if position_offset > i64::MAX as u64 - tokens.len() as u64 {
            return Err(Error::PositionOffset(position_offset));
        }
        let mut done = Registered::default();
        if start_chunk >= chunks {
            return Ok(done);
        }
        let scope = self.enter(scope);
        for first in (start_chunk..chunks).step_by(GROUP) {
            let new_chunk = |n: usize| NewChunk {
                window: &tokens[n * self.config.chunk_size..][..self.config.chunk_size],
                start: position_offset + (n * self.config.chunk_size) as u64,
                key: KeyName::new(scope.id, scope.name.key, chunk_hashes[n].as_ref()),
                hash: None,
            };
            let mut group: Vec<NewChunk<'_>> = (first..chunks.min(first + GROUP)).map(new_chunk).collect();
            self.prefetch_places(&mut group, &scope);
            for chunk in &group {
                done.count += usize::from(self.register_chunk(chunk, &scope, &mut done));
                self.reclaim();
            }
        }
        self.leave(&scope);
        count(&self.counters.registered, done.count);
        Ok(done)
    }

    /// Asks for the places in the tables where chunks will go, for all of them before the first is registered.
    fn prefetch_places(&self, group: &mut [NewChunk<'_>], scope: &EnteredScope) {
        self.keys.prefetch_places(group.iter().map(|chunk| &chunk.key));
        let pin = self.limbo.pin();
        for chunk in group.iter_mut().filter(|chunk| self.keys.find(&chunk.key, &pin).is_none()) {
            chunk.hash = Some(self.roller.single(chunk.window) ^ scope.name.key);
        }
        self.contents.prefetch_places(group.iter().filter_map(|chunk| chunk.hash));
    }

    fn register_chunk(&self, chunk: &NewChunk<'_>, scope: &EnteredScope, done: &mut Registered) -> bool {
        let pin = self.limbo.pin();
        let text = || {
            let hash = chunk.hash.unwrap_or_else(|| self.roller.single(chunk.window) ^ scope.name.key);
            Text { hash, scope: scope.id, tokens: chunk.window }
        };
        if self.config.dedup_content
            && let Some(content) = self.contents.find(&text(), &pin)
            && self.contents.is_held(content, &self.keys)
        {
            return false;
        }
        let Some(claim) = self.keys.claim(&chunk.key, &pin, &self.scopes, &self.limbo) else {
            return false;
        };
        if !self.make_room(&pin, done) {
            self.keys.abandon(&claim, &pin, &self.scopes, &self.limbo);
            count(&self.counters.rejected_full, 1);
            return false;
        }
        let content = self.contents.hold(&text(), &claim, &self.keys, &pin, &self.limbo);
        if omitted(Step::PublishLast) {
            self.keys.publish(&claim);
        }
        self.keys.describe(&claim, content, chunk.start);
        self.keys.publish(&claim);
        true
    }

    /// Counts one more entry, and evicts one if there is no room for it.
    fn make_room(&self, pin: &Pin<'_>, done: &mut Registered) -> bool {
        let more = |n| (n < self.config.capacity).then_some(n + 1);
        while self.entries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            if self.was_full.swap(1, Ordering::Relaxed) == 0 {
                done.first_time_full = true;
            }
            if self.config.on_full == OnFull::Reject {
                return false;
            }
            let Some(victim) = self.keys.longest_unused() else {
                return false;
            };
            if self.unregister(victim, |state| state.in_flight() == 0, pin) {
                count(&self.counters.evicted, 1);
            }
        }
        true
    }

    /// Ends the registration of a key if it is live and `condition` holds for its state.
    fn unregister(&self, key: u32, condition: impl Fn(State) -> bool, pin: &Pin<'_>) -> bool {
        let Some((content, change)) = self.keys.kill(key, condition) else {
            return false;
        };
        self.entries.fetch_sub(1, Ordering::Relaxed);
        self.contents.drop_stale(content, &self.keys, pin, &self.limbo);
        self.keys.bury_if_dead(key, Some(change), pin, &self.scopes, &self.limbo);
        true
    }

    /// The stored chunks of `scope` that occur in `tokens`, in order of their offset.
    ///
    /// Takes no lock and waits for nobody.
    pub fn matches(&self, tokens: &[u32], scope: &[u8], options: Options) -> Vec<Hit> {
        let mut hits = Vec::new();
        let pin = self.limbo.pin();
        let name = ScopeName::new(self.secret, scope);
        let Some(scope) = self.scopes.find(&name, &pin) else {
            return hits;
        };
        let mut seen = HashSet::new();
        for group in self.candidates(tokens, &name).chunks(GROUP) {
            self.prefetch(group);
            for candidate in group {
                if !options.every_occurrence && seen.contains(&candidate.content) {
                    continue;
                }
                let window = &tokens[candidate.offset..][..self.config.chunk_size];
                let text = Text { hash: candidate.hash, scope, tokens: window };
                match self.contents.compare(candidate.content, &text) {
                    Comparison::Equal => {
                        if self.report(candidate, options, &mut hits) {
                            seen.insert(candidate.content);
                        }
                    }
                    Comparison::Collision => count(&self.counters.rejected_collisions, 1),
                    Comparison::Other => {}
                }
            }
        }
        hits
    }

    /// The offsets of `tokens` at which the table names a content, in order. Nearly all of them are hits.
    fn candidates(&self, tokens: &[u32], scope: &ScopeName) -> Vec<Candidate> {
        let level = self.contents.level();
        let mut candidates = Vec::new();
        let mut scratch = Scratch::default();
        let step = self.roller.block_len();
        let windows = self.roller.windows(tokens.len());
        let mut hashes = vec![0; step.min(windows)];
        let mut places = vec![0u32; step.min(windows)];
        for first in (0..windows).step_by(step) {
            let hashes = &mut hashes[..step.min(windows - first)];
            // Three passes, each over what the one before left: tests without branches, so that cache misses
            // overlap; then the few offsets that are left.
            self.roller.keyed_block(scope.key, &tokens[first..], &mut scratch, hashes);
            let selected = level.filter().select(self.simd, hashes, &mut places);
            for &place in &places[..selected] {
                level.prefetch_home(hashes[place as usize]);
            }
            let mut likely = 0;
            for n in 0..selected {
                let place = places[n];
                places[likely] = place;
                likely += usize::from(!level.home_rejects(hashes[place as usize]));
            }
            for &place in &places[..likely] {
                let hash = hashes[place as usize];
                level.probe(hash, |content| {
                    candidates.push(Candidate { offset: first + place as usize, hash, content });
                    ControlFlow::<()>::Continue(())
                });
            }
        }
        candidates
    }

    /// Asks for all that the verification of some candidates will read, each step for all of them before the next, so
    /// that their cache misses overlap.
    fn prefetch(&self, group: &[Candidate]) {
        group.iter().for_each(|candidate| self.contents.prefetch(candidate.content));
        group.iter().for_each(|candidate| self.contents.prefetch_holder(candidate.content));
        let holders = || group.iter().filter_map(|candidate| self.contents.newest_holder(candidate.content));
        holders().for_each(|key| self.keys.prefetch(key));
        holders().for_each(|key| self.keys.prefetch_chunk_hash(key));
    }

    /// Appends the holders of a candidate that proved right; whether there are any.
    fn report(&self, candidate: &Candidate, options: Options, hits: &mut Vec<Hit>) -> bool {
        let before = hits.len();
        let cur_start = candidate.offset;
        let mut reported = HashSet::new();
        self.contents.visit_holders(candidate.content, &self.keys, |key, old_start| {
            if options.all_holders && !reported.insert(key) {
                return ControlFlow::Continue(());
            }
            self.keys.touch(key);
            let chunk_hash = self.keys.chunk_hash(key);
            hits.push(Hit { old_start, cur_start, len: self.config.chunk_size, chunk_hash });
            if options.all_holders { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        hits.len() > before
    }

    /// Evicts the given chunk hashes of `scope`; returns how many were registered.
    ///
    /// # Errors
    /// A chunk hash of a wrong length; nothing was removed.
    pub fn remove(&self, chunk_hashes: &[impl AsRef<[u8]>], scope: &[u8]) -> Result<usize, Error> {
        let mut removed = 0;
        self.for_each_known(chunk_hashes, scope, |_, key, pin| {
            removed += usize::from(self.unregister(key, |_| true, pin));
        })?;
        count(&self.counters.removed, removed);
        Ok(removed)
    }

    /// Notes that storage no longer held these chunks. One that reaches `threshold` strikes is evicted, one that is in
    /// flight takes none. Returns the indices of the evicted.
    ///
    /// # Errors
    /// A chunk hash of a wrong length, or a threshold outside 1 to [`MAX_STRIKES`]; nothing was noted.
    pub fn strike(&self, chunk_hashes: &[impl AsRef<[u8]>], threshold: u64, scope: &[u8]) -> Result<Vec<usize>, Error> {
        if !(1..=MAX_STRIKES).contains(&threshold) {
            return Err(Error::Threshold(threshold));
        }
        let mut evicted = Vec::new();
        self.for_each_known(chunk_hashes, scope, |n, key, pin| {
            let due = |state: State| state.may_be_struck() && state.strikes() + 1 >= threshold;
            loop {
                if self.unregister(key, due, pin) {
                    evicted.push(n);
                } else if !self.keys.strike(key, threshold) && self.keys.state(key).may_be_struck() {
                    // Another strike came between the two looks.
                    continue;
                }
                break;
            }
        })?;
        count(&self.counters.struck_out, evicted.len());
        Ok(evicted)
    }

    /// Notes that storage holds these chunks: clears their strikes, and lets them be reported before
    /// other holders of their text.
    ///
    /// # Errors
    /// A chunk hash of a wrong length; nothing was noted.
    pub fn confirm(&self, chunk_hashes: &[impl AsRef<[u8]>], scope: &[u8]) -> Result<(), Error> {
        self.for_each_known(chunk_hashes, scope, |_, key, pin| {
            let state = self.keys.state(key);
            if state.phase() != Phase::Live {
                return;
            }
            let content = self.keys.content(key);
            fence(Ordering::Acquire);
            // The content is that of this incarnation only if it still is the same one.
            if self.keys.is_live(key, state.incarnation()) {
                self.keys.clear_strikes(key);
                self.keys.touch(key);
                self.contents.promote(content, key, state.incarnation(), &self.keys, pin, &self.limbo);
            }
        })
    }

    /// Marks a registration of each chunk hash as in flight, registered or not. Counted.
    ///
    /// # Errors
    /// A chunk hash of a wrong length, or too many in flight of one; none was counted.
    pub fn begin(&self, chunk_hashes: &[impl AsRef<[u8]>], scope: &[u8]) -> Result<(), Error> {
        check_chunk_hashes(chunk_hashes)?;
        if chunk_hashes.is_empty() {
            return Ok(());
        }
        let entered = self.enter(scope);
        let refused = chunk_hashes.iter().position(|chunk_hash| {
            let pin = self.limbo.pin();
            let name = KeyName::new(entered.id, entered.name.key, chunk_hash.as_ref());
            !self.keys.begin(&name, &pin, &self.scopes, &self.limbo)
        });
        self.leave(&entered);
        match refused {
            None => Ok(()),
            Some(index) => {
                self.finish(&chunk_hashes[..index], scope)?;
                Err(Error::InFlight { index })
            }
        }
    }

    /// Ends one registration in flight of each chunk hash; one that is not in flight is ignored.
    ///
    /// # Errors
    /// A chunk hash of a wrong length; none was ended.
    pub fn finish(&self, chunk_hashes: &[impl AsRef<[u8]>], scope: &[u8]) -> Result<(), Error> {
        check_chunk_hashes(chunk_hashes)?;
        let name = ScopeName::new(self.secret, scope);
        for chunk_hash in chunk_hashes {
            let pin = self.limbo.pin();
            let Some(scope) = self.scopes.find(&name, &pin) else {
                return Ok(());
            };
            let key = KeyName::new(scope, name.key, chunk_hash.as_ref());
            self.keys.finish(&key, &pin, &self.scopes, &self.limbo);
            drop(pin);
            self.reclaim();
        }
        Ok(())
    }

    /// Whether `chunk_hash` is registered in `scope`.
    ///
    /// # Errors
    /// A chunk hash of a wrong length.
    pub fn contains(&self, chunk_hash: &[u8], scope: &[u8]) -> Result<bool, Error> {
        let mut found = false;
        self.for_each_known(&[chunk_hash], scope, |_, key, _| {
            found = self.keys.state(key).phase() == Phase::Live;
        })?;
        Ok(found)
    }

    /// Calls `act` with the place in the list and the record of each chunk hash that has one.
    fn for_each_known(
        &self,
        chunk_hashes: &[impl AsRef<[u8]>],
        scope: &[u8],
        mut act: impl FnMut(usize, u32, &Pin<'_>),
    ) -> Result<(), Error> {
        check_chunk_hashes(chunk_hashes)?;
        let name = ScopeName::new(self.secret, scope);
        for (n, chunk_hash) in chunk_hashes.iter().enumerate() {
            let pin = self.limbo.pin();
            let Some(scope) = self.scopes.find(&name, &pin) else {
                return Ok(());
            };
            let key = KeyName::new(scope, name.key, chunk_hash.as_ref());
            if let Some(record) = self.keys.find(&key, &pin) {
                act(n, record, &pin);
            }
            drop(pin);
            self.reclaim();
        }
        Ok(())
    }

    /// Refers to a scope for the time of a call.
    fn enter(&self, scope: &[u8]) -> EnteredScope {
        let pin = self.limbo.pin();
        let name = ScopeName::new(self.secret, scope);
        EnteredScope { id: self.scopes.acquire(&name, &pin, &self.limbo), name }
    }

    fn leave(&self, scope: &EnteredScope) {
        let pin = self.limbo.pin();
        self.scopes.release(scope.id, &pin, &self.limbo);
        drop(pin);
        self.reclaim();
    }

    fn reclaim(&self) {
        self.limbo.step(|item| match item {
            Retired::Scope(id) => self.scopes.free(id),
            Retired::Key(id) => self.keys.free(id),
            Retired::Content(id) => self.contents.free(id),
            Retired::Node(id) => self.contents.free_node(id),
        });
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (token_bytes, overhead_bytes) = self.contents.bytes();
        Stats {
            entries: self.len(),
            contents: Records::live(&self.contents),
            scopes: Records::live(&self.scopes),
            capacity: self.config.capacity,
            token_bytes,
            overhead_bytes: overhead_bytes + self.keys.bytes() + self.scopes.bytes() + self.limbo.bytes(),
            registered: read(&self.counters.registered),
            removed: read(&self.counters.removed),
            struck_out: read(&self.counters.struck_out),
            evicted: read(&self.counters.evicted),
            rejected_full: read(&self.counters.rejected_full),
            rejected_collisions: read(&self.counters.rejected_collisions),
            table_rebuilds: self.contents.rebuilds() + self.keys.rebuilds(),
        }
    }

    /// Checks every rule of the data structure and names the first that is broken. Call it with no other thread at work.
    ///
    /// # Errors
    /// The first broken rule.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        let pin = self.limbo.pin();
        let mut live = 0;
        let mut references = std::collections::HashMap::new();
        for key in self.keys.ids() {
            let state = self.keys.state(key);
            match state.phase() {
                Phase::Live => live += 1,
                Phase::Claimed => return Err(format!("key {key} is claimed and nobody is at it")),
                Phase::Idle if state.in_flight() == 0 => {
                    return Err(format!("key {key} is kept for nothing"));
                }
                Phase::Idle | Phase::Dead => {}
            }
            *references.entry(self.keys.scope(key)).or_insert(0u64) += 1;
        }
        if live != self.len() {
            return Err(format!("{live} keys are live, {} are counted", self.len()));
        }
        for scope in self.scopes.ids() {
            let counted = self.scopes.references(scope);
            let found = references.remove(&scope).unwrap_or(0);
            if counted != found {
                return Err(format!("scope {scope} counts {counted} references and has {found}"));
            }
        }
        if let Some(scope) = references.keys().next() {
            return Err(format!("keys of the dead scope {scope}"));
        }
        self.scopes.check()?;
        self.keys.check()?;
        self.contents.check(&self.keys)?;
        drop(pin);
        Ok(())
    }
}

/// A content that the table names for an offset of a query.
struct Candidate {
    offset: usize,
    hash: u64,
    content: u32,
}

/// A chunk on its way in.
struct NewChunk<'a> {
    window: &'a [u32],
    start: u64,
    key: KeyName,
    /// Computed for those whose key is new.
    hash: Option<u64>,
}

/// Chunks that are verified or registered together.
const GROUP: usize = 16;

struct EnteredScope {
    id: u32,
    name: ScopeName,
}

fn check_chunk_hashes(chunk_hashes: &[impl AsRef<[u8]>]) -> Result<(), Error> {
    let wrong = |chunk_hash: &[u8]| !(1..=MAX_CHUNK_HASH_BYTES).contains(&chunk_hash.len());
    match chunk_hashes.iter().position(|chunk_hash| wrong(chunk_hash.as_ref())) {
        None => Ok(()),
        Some(index) => Err(Error::ChunkHashLength { index, len: chunk_hashes[index].as_ref().len() }),
    }
}

/// Unpredictable, from the keys that the standard library draws for its own hash maps.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
