//! What an index is asked for and what it answers.

use crate::keys::ChunkHash;

/// What [`Index::matches`](crate::Index::matches) reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A text at each offset where it occurs, not only at the first.
    pub every_occurrence: bool,
    /// Each chunk hash that holds a text, not only the one registered or confirmed last.
    pub all_holders: bool,
}

/// A stored chunk found in a query.
#[derive(Clone, Copy, Debug)]
pub struct Hit {
    /// Position of its first token when it was stored.
    pub old_start: u64,
    /// Offset of its first token in the query.
    pub cur_start: usize,
    /// Its length in tokens.
    pub len: usize,
    /// Its storage key.
    pub chunk_hash: ChunkHash,
}

/// Counters of an [`Index`](crate::Index); exact when no other thread is at work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Chunk hashes registered now.
    pub entries: usize,
    /// Different texts held now.
    pub contents: usize,
    /// Scopes in use now.
    pub scopes: usize,
    /// The most chunk hashes that can be registered at once.
    pub capacity: usize,
    /// Memory for texts, in bytes, free slots included.
    pub token_bytes: usize,
    /// Memory for all else, in bytes.
    pub overhead_bytes: usize,
    /// Chunk hashes newly indexed so far.
    pub registered: u64,
    /// Chunk hashes removed so far by [`Index::remove`](crate::Index::remove).
    pub removed: u64,
    /// Chunk hashes evicted so far by [`Index::strike`](crate::Index::strike).
    pub struck_out: u64,
    /// Chunk hashes evicted so far to make room.
    pub evicted: u64,
    /// Chunks not indexed so far for want of room.
    pub rejected_full: u64,
    /// Fingerprint hits so far whose tokens differed.
    pub rejected_collisions: u64,
    /// Table rebuilds so far.
    pub table_rebuilds: u64,
}

/// What one registration did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// Chunks newly indexed.
    pub count: usize,
    /// The index was full for the first time.
    pub first_time_full: bool,
}
