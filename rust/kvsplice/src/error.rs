//! What can be wrong with a caller's arguments.

use crate::config::{MAX_CAPACITY, MAX_CHUNK_SIZE, MAX_STRIKES};
use crate::keys::{MAX_CHUNK_HASH_BYTES, MAX_IN_FLIGHT};

/// An argument that was refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Chunk size out of range.
    #[error("chunk_size must be 1 to {MAX_CHUNK_SIZE}, not {0}")]
    ChunkSize(usize),
    /// Capacity out of range.
    #[error("capacity must be 1 to {MAX_CAPACITY}, not {0}")]
    Capacity(usize),
    /// Fewer chunk hashes than full chunks.
    #[error("chunk_hashes has {given} items for {needed} full chunks of tokens")]
    TooFewChunkHashes {
        /// Chunk hashes given.
        given: usize,
        /// Full chunks in the tokens.
        needed: usize,
    },
    /// A chunk hash of a wrong length.
    #[error("chunk_hashes[{index}] must have 1 to {MAX_CHUNK_HASH_BYTES} bytes, not {len}")]
    ChunkHashLength {
        /// Its place in the list.
        index: usize,
        /// Its length in bytes.
        len: usize,
    },
    /// Stored positions that do not fit 63 bits.
    #[error("position_offset must leave positions below 2**63, {0} does not")]
    PositionOffset(u64),
    /// Strike threshold out of range.
    #[error("threshold must be 1 to {MAX_STRIKES}, not {0}")]
    Threshold(u64),
    /// Too many registrations of one chunk hash in flight.
    #[error("chunk_hashes[{index}] has {MAX_IN_FLIGHT} registrations in flight already")]
    InFlight {
        /// Its place in the list.
        index: usize,
    },
}
