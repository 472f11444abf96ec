//! Keys: what is known under one (scope, chunk hash).
//!
//! A key's record lives while the key is registered or a registration of it is in flight. Its whole state is
//! one word, so that every decision about it (strike it unless in flight, register it unless somebody else does)
//! is one compare-and-swap.

use crate::arena::Arena;
use crate::epoch::Pin;
use crate::hash::hash_words;
use crate::limbo::{Limbo, Retired};
use crate::scopes::Scopes;
use crate::simd::prefetch;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, Step, fence, omitted};
use crate::table::{Load, Records, Table};

/// The longest chunk hash, in bytes.
pub const MAX_CHUNK_HASH_BYTES: usize = 64;

/// Words of a record.
const STATE: usize = 0;
const HASH: usize = 1;
/// Content id in the high half, scope id in the low one.
const CONTENT_SCOPE: usize = 2;
/// Where the bytes are, and whether the key was used since the eviction hand last came by.
const BYTES: usize = 3;
const START: usize = 4;
const STRIDE: usize = 5;

/// Sizes in which chunk hashes are kept, in words.
const SIZES: [usize; 3] = [2, 4, 8];

const USED: u64 = 1 << 63;

/// Where a key is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not registered, nothing in flight. Never left: the record is buried.
    Dead,
    /// Not registered; a registration is in flight.
    Idle,
    /// One thread is registering it.
    Claimed,
    /// Registered: readers may report it.
    Live,
}

/// `[incarnation: 40 | in flight: 14 | strikes: 8 | phase: 2]`
///
/// The incarnation grows with each registration under one record id and is never reset, so that what refers to an earlier
/// one is recognized.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct State(u64);

/// The most registrations of one chunk hash in flight at once.
pub const MAX_IN_FLIGHT: u64 = (1 << 14) - 1;

impl State {
    const STRIKE: u64 = 1 << 2;
    const FLIGHT: u64 = 1 << 10;
    const INCARNATION: u64 = 1 << 24;
    const STRIKES: u64 = Self::FLIGHT - Self::STRIKE;
    const FLIGHTS: u64 = Self::INCARNATION - Self::FLIGHT;
    const PHASE: u64 = Self::STRIKE - 1;

    pub(crate) fn phase(self) -> Phase {
        match self.0 & Self::PHASE {
            0 => Phase::Dead,
            1 => Phase::Idle,
            2 => Phase::Claimed,
            _ => Phase::Live,
        }
    }

    pub(crate) fn strikes(self) -> u64 {
        (self.0 & Self::STRIKES) / Self::STRIKE
    }

    pub(crate) fn in_flight(self) -> u64 {
        (self.0 & Self::FLIGHTS) / Self::FLIGHT
    }

    pub(crate) fn incarnation(self) -> u64 {
        self.0 / Self::INCARNATION
    }

    pub(crate) fn may_be_struck(self) -> bool {
        self.phase() == Phase::Live && (self.in_flight() == 0 || omitted(Step::SpareInFlight))
    }

    fn with_phase(self, phase: Phase) -> Self {
        Self(self.0 & !Self::PHASE | phase as u64)
    }

    fn without_strikes(self) -> Self {
        Self(self.0 & !Self::STRIKES)
    }

    /// The state after a registration ended or a removal.
    fn unregistered(self) -> Self {
        let phase = if self.in_flight() == 0 { Phase::Dead } else { Phase::Idle };
        self.without_strikes().with_phase(phase)
    }
}

/// A chunk hash as it was registered.
#[derive(Clone, Copy)]
pub struct ChunkHash {
    len: u8,
    bytes: [u8; MAX_CHUNK_HASH_BYTES],
}

impl ChunkHash {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }
}

impl std::fmt::Debug for ChunkHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A chunk hash on its way in: as words, with its hash.
pub(crate) struct KeyName {
    scope: u32,
    len: usize,
    words: [u64; MAX_CHUNK_HASH_BYTES / 8],
    hash: u64,
}

impl KeyName {
    /// `bytes` has 1 to [`MAX_CHUNK_HASH_BYTES`] bytes.
    pub(crate) fn new(scope: u32, scope_key: u64, bytes: &[u8]) -> Self {
        let mut words = [0; MAX_CHUNK_HASH_BYTES / 8];
        for (word, part) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..part.len()].copy_from_slice(part);
            *word = u64::from_le_bytes(eight);
        }
        let filled = &words[..bytes.len().div_ceil(8)];
        let hash = hash_words(scope_key ^ bytes.len() as u64, filled.iter().copied());
        Self { scope, len: bytes.len(), words, hash }
    }

    fn words(&self) -> &[u64] {
        &self.words[..self.len.div_ceil(8)]
    }
}

/// A registration under way: the right, held by one thread, to make the key live.
pub(crate) struct Registration {
    pub(crate) key: u32,
    pub(crate) incarnation: u64,
}

pub(crate) struct Keys {
    records: Arena,
    bytes: [Arena; SIZES.len()],
    table: Table,
    existing: AtomicUsize,
    hand: AtomicU64,
}

/// Where a record keeps its chunk hash.
#[derive(Clone, Copy)]
struct Place {
    size: usize,
    len: usize,
    slot: u32,
}

impl Place {
    fn pack(self) -> u64 {
        ((self.size as u64) << 40) | ((self.len as u64) << 32) | u64::from(self.slot)
    }

    fn unpack(word: u64) -> Self {
        Self { size: (word >> 40) as usize & 3, len: (word >> 32) as usize & 0xff, slot: word as u32 }
    }
}

impl Keys {
    pub(crate) fn new() -> Self {
        Self {
            records: Arena::new(STRIDE),
            bytes: SIZES.map(Arena::new),
            table: Table::new(Load::DENSE),
            existing: AtomicUsize::new(0),
            hand: AtomicU64::new(0),
        }
    }

    fn place(&self, id: u32) -> Place {
        Place::unpack(self.records.words(id)[BYTES].load(Ordering::Relaxed))
    }

    fn key_words(&self, place: Place) -> &[AtomicU64] {
        &self.bytes[place.size].words(place.slot)[..place.len.div_ceil(8)]
    }

    pub(crate) fn state(&self, id: u32) -> State {
        State(self.records.words(id)[STATE].load(Ordering::Acquire))
    }

    pub(crate) fn scope(&self, id: u32) -> u32 {
        self.records.words(id)[CONTENT_SCOPE].load(Ordering::Relaxed) as u32
    }

    pub(crate) fn content(&self, id: u32) -> u32 {
        (self.records.words(id)[CONTENT_SCOPE].load(Ordering::Relaxed) >> 32) as u32
    }

    pub(crate) fn start(&self, id: u32) -> u64 {
        self.records.words(id)[START].load(Ordering::Relaxed)
    }

    pub(crate) fn chunk_hash(&self, id: u32) -> ChunkHash {
        let place = self.place(id);
        let mut bytes = [0; MAX_CHUNK_HASH_BYTES];
        for (part, word) in bytes.chunks_mut(8).zip(self.key_words(place)) {
            part.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        ChunkHash { len: place.len as u8, bytes }
    }

    /// Asks for the places in the table where keys are or will be.
    pub(crate) fn prefetch_places<'a>(&self, names: impl Iterator<Item = &'a KeyName>) {
        let level = self.table.level();
        names.for_each(|name| level.prefetch_home(name.hash));
    }

    /// Asks for a key's record.
    pub(crate) fn prefetch(&self, id: u32) {
        prefetch(&self.records.words(id)[STATE]);
    }

    /// Asks for a key's chunk hash. The key may be another's by now, or half made.
    pub(crate) fn prefetch_chunk_hash(&self, id: u32) {
        let place = self.place(id);
        if let Some([first, ..]) = self.bytes.get(place.size).and_then(|arena| arena.try_words(place.slot)) {
            prefetch(first);
        }
    }

    /// Whether `incarnation` of the key is registered or being registered.
    pub(crate) fn is_current(&self, id: u32, incarnation: u64) -> bool {
        let state = self.state(id);
        state.incarnation() == incarnation && matches!(state.phase(), Phase::Claimed | Phase::Live)
    }

    /// Whether `incarnation` of the key is registered.
    pub(crate) fn is_live(&self, id: u32, incarnation: u64) -> bool {
        let state = self.state(id);
        state.incarnation() == incarnation && state.phase() == Phase::Live
    }

    /// Marks the key as used, for the eviction hand.
    pub(crate) fn touch(&self, id: u32) {
        let word = &self.records.words(id)[BYTES];
        if word.load(Ordering::Relaxed) & USED == 0 {
            word.fetch_or(USED, Ordering::Relaxed);
        }
    }

    fn is_named(&self, id: u32, name: &KeyName) -> bool {
        let record = self.records.words(id);
        let place = self.place(id);
        record[HASH].load(Ordering::Relaxed) == name.hash
            && self.scope(id) == name.scope
            && place.len == name.len
            && self.key_words(place).iter().map(|w| w.load(Ordering::Relaxed)).eq(name.words().iter().copied())
    }

    /// The record of a key that is not dead.
    pub(crate) fn find(&self, name: &KeyName, _pin: &Pin<'_>) -> Option<u32> {
        let wanted = |id| self.state(id).phase() != Phase::Dead && self.is_named(id, name);
        self.table.find(name.hash, self, wanted)
    }

    /// Changes a record's state as `step` says, until it declines. Returns the states before and after.
    fn update(&self, id: u32, step: impl Fn(State) -> Option<State>) -> Option<(State, State)> {
        let word = &self.records.words(id)[STATE];
        let mut before = State(word.load(Ordering::Acquire));
        loop {
            let after = step(before)?;
            match word.compare_exchange_weak(before.0, after.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some((before, after)),
                Err(seen) => before = State(seen),
            }
        }
    }

    /// Makes a record in `first`'s phase and puts it into the table. `None`: somebody else's is there.
    fn create(
        &self,
        name: &KeyName,
        first: State,
        pin: &Pin<'_>,
        scopes: &Scopes,
        limbo: &Limbo,
    ) -> Option<Registration> {
        let id = self.records.take();
        let size = SIZES.iter().position(|&size| size >= name.words().len()).expect("64 bytes at most");
        let place = Place { size, len: name.len, slot: self.bytes[size].take() };
        for (slot, &word) in self.key_words(place).iter().zip(name.words()) {
            slot.store(word, Ordering::Relaxed);
        }
        let record = self.records.words(id);
        record[HASH].store(name.hash, Ordering::Relaxed);
        record[CONTENT_SCOPE].store(u64::from(name.scope), Ordering::Relaxed);
        record[BYTES].store(place.pack(), Ordering::Relaxed);
        let incarnation = State(record[STATE].load(Ordering::Relaxed)).incarnation() + 1;
        record[STATE].store((incarnation * State::INCARNATION) | first.0, Ordering::Release);
        scopes.retain(name.scope);
        self.existing.fetch_add(1, Ordering::Relaxed);
        if self.table.insert(name.hash, id, self).is_ok() {
            return Some(Registration { key: id, incarnation });
        }
        self.update(id, |state| Some(state.with_phase(Phase::Dead)));
        self.forget(id, pin, scopes, limbo);
        None
    }

    /// Claims the right to register a key. `None`: it is registered, or another thread is at it.
    pub(crate) fn claim(&self, name: &KeyName, pin: &Pin<'_>, scopes: &Scopes, limbo: &Limbo) -> Option<Registration> {
        loop {
            if let Some(key) = self.find(name, pin) {
                let claim = |state: State| {
                    let next = State(state.0 + State::INCARNATION).with_phase(Phase::Claimed);
                    (state.phase() == Phase::Idle).then_some(next)
                };
                if let Some((_, state)) = self.update(key, claim) {
                    return Some(Registration { key, incarnation: state.incarnation() });
                }
                if self.state(key).phase() != Phase::Dead {
                    return None;
                }
            } else {
                let claimed = State(0).with_phase(Phase::Claimed);
                if let Some(registration) = self.create(name, claimed, pin, scopes, limbo) {
                    return Some(registration);
                }
            }
        }
    }

    /// Says what a claimed key will name.
    pub(crate) fn describe(&self, registration: &Registration, content: u32, start: u64) {
        // A reader that sees what is written here sees the claim before it too, and so takes neither for the one before.
        fence(Ordering::Release);
        let record = self.records.words(registration.key);
        let scope = record[CONTENT_SCOPE].load(Ordering::Relaxed) as u32;
        record[CONTENT_SCOPE].store((u64::from(content) << 32) | u64::from(scope), Ordering::Relaxed);
        record[START].store(start, Ordering::Relaxed);
    }

    /// Makes a claimed key live: from here on readers report it.
    pub(crate) fn publish(&self, registration: &Registration) {
        self.update(registration.key, |state| Some(state.without_strikes().with_phase(Phase::Live)));
    }

    /// Gives a claim up.
    pub(crate) fn abandon(&self, registration: &Registration, pin: &Pin<'_>, scopes: &Scopes, limbo: &Limbo) {
        let end = self.update(registration.key, |state| Some(state.unregistered()));
        self.bury_if_dead(registration.key, end, pin, scopes, limbo);
    }

    /// Ends the registration of a live key if `condition` holds for its state. Returns the incarnation that ended
    /// and the content that it named; the caller calls [`bury_if_dead`](Self::bury_if_dead) with the rest.
    pub(crate) fn kill(&self, id: u32, condition: impl Fn(State) -> bool) -> Option<(u32, (State, State))> {
        loop {
            let state = self.state(id);
            if state.phase() != Phase::Live || !condition(state) {
                return None;
            }
            // Read before the state is changed, and right if it is changed from just this state.
            let content = self.content(id);
            let word = &self.records.words(id)[STATE];
            let after = state.unregistered();
            if word.compare_exchange(state.0, after.0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return Some((content, (state, after)));
            }
        }
    }

    /// Notes one strike, unless that would reach `threshold` or a registration is in flight. Whether it did.
    pub(crate) fn strike(&self, id: u32, threshold: u64) -> bool {
        let step = |state: State| {
            let counts = state.may_be_struck() && state.strikes() + 1 < threshold;
            counts.then_some(State(state.0 + State::STRIKE))
        };
        self.update(id, step).is_some()
    }

    pub(crate) fn clear_strikes(&self, id: u32) {
        self.update(id, |state| (state.strikes() > 0).then_some(state.without_strikes()));
    }

    /// Counts one more registration in flight. `false`: there are too many.
    pub(crate) fn begin(&self, name: &KeyName, pin: &Pin<'_>, scopes: &Scopes, limbo: &Limbo) -> bool {
        loop {
            if let Some(id) = self.find(name, pin) {
                let step = |state: State| {
                    let more = State(state.0 + State::FLIGHT);
                    (state.phase() != Phase::Dead && state.in_flight() < MAX_IN_FLIGHT).then_some(more)
                };
                if self.update(id, step).is_some() {
                    return true;
                }
                if self.state(id).phase() != Phase::Dead {
                    return false;
                }
            } else {
                let idle = State(State::FLIGHT).with_phase(Phase::Idle);
                if self.create(name, idle, pin, scopes, limbo).is_some() {
                    return true;
                }
            }
        }
    }

    /// Counts one registration in flight less.
    pub(crate) fn finish(&self, name: &KeyName, pin: &Pin<'_>, scopes: &Scopes, limbo: &Limbo) {
        let Some(id) = self.find(name, pin) else {
            return;
        };
        let step = |state: State| {
            let less = State(state.0.wrapping_sub(State::FLIGHT));
            let next = if state.phase() == Phase::Idle { less.unregistered() } else { less };
            (state.in_flight() > 0).then_some(next)
        };
        let end = self.update(id, step);
        self.bury_if_dead(id, end, pin, scopes, limbo);
    }

    /// Buries the record if this change of state was its death.
    pub(crate) fn bury_if_dead(
        &self,
        id: u32,
        change: Option<(State, State)>,
        pin: &Pin<'_>,
        scopes: &Scopes,
        limbo: &Limbo,
    ) {
        if change.is_some_and(|(before, after)| before.phase() != Phase::Dead && after.phase() == Phase::Dead) {
            self.table.erase(self.records.words(id)[HASH].load(Ordering::Relaxed), id);
            self.forget(id, pin, scopes, limbo);
        }
    }

    fn forget(&self, id: u32, pin: &Pin<'_>, scopes: &Scopes, limbo: &Limbo) {
        self.existing.fetch_sub(1, Ordering::Relaxed);
        scopes.release(self.scope(id), pin, limbo);
        limbo.retire(pin, Retired::Key(id));
    }

    pub(crate) fn free(&self, id: u32) {
        let place = self.place(id);
        self.bytes[place.size].give_back(place.slot);
        self.records.give_back(id);
    }

    /// The next live key that was not used since the hand last came by.
    ///
    /// Second chance: the hand goes round the records, forgives each used one once, and passes over keys with a
    /// registration in flight. Two rounds and nothing found: `None`.
    pub(crate) fn longest_unused(&self) -> Option<u32> {
        let records = u64::from(self.records.high_water() - 1);
        for _ in 0..2 * records {
            let id = (self.hand.fetch_add(1, Ordering::Relaxed) % records) as u32 + 1;
            let state = self.state(id);
            if state.phase() != Phase::Live || state.in_flight() > 0 {
                continue;
            }
            let word = &self.records.words(id)[BYTES];
            if word.load(Ordering::Relaxed) & USED == 0 {
                return Some(id);
            }
            word.fetch_and(!USED, Ordering::Relaxed);
        }
        None
    }

    pub(crate) fn bytes(&self) -> usize {
        self.records.bytes() + self.bytes.iter().map(Arena::bytes).sum::<usize>() + self.table.bytes()
    }

    pub(crate) fn rebuilds(&self) -> u64 {
        self.table.rebuilds()
    }

    /// Ids of all records that are not dead.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> {
        (1..self.records.high_water()).filter(|&id| self.state(id).phase() != Phase::Dead)
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let counted = self.existing.load(Ordering::Relaxed);
        let found = self.ids().count();
        if counted != found {
            return Err(format!("keys: {counted} counted, {found} found"));
        }
        self.table.check(self, self.ids()).map_err(|e| format!("keys: {e}"))
    }
}

impl Records for Keys {
    fn hash_of(&self, id: u32) -> Option<u64> {
        let alive = self.state(id).phase() != Phase::Dead;
        alive.then(|| self.records.words(id)[HASH].load(Ordering::Relaxed))
    }

    fn same(&self, id: u32, other: u32) -> bool {
        // Alive first: then the rest stays what it is while the caller is pinned.
        if self.state(other).phase() == Phase::Dead || self.scope(id) != self.scope(other) {
            return false;
        }
        let (a, b) = (self.place(id), self.place(other));
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        a.len == b.len && self.key_words(a).iter().map(load).eq(self.key_words(b).iter().map(load))
    }

    fn live(&self) -> usize {
        self.existing.load(Ordering::Relaxed)
    }
}
