//! Finds stored chunks of tokens at any offset of a query.
//!
//! An LLM server stores the KV of a prompt in chunks of some hundred tokens. An [`Index`] remembers which text each stored
//! chunk had, and [`Index::matches`] says which of them occur in a new prompt, and where, aligned or not.
//!
//! ```
//! use kvsplice::{Config, Index, Options};
//!
//! # fn main() -> Result<(), kvsplice::Error> {
//! let index = Index::new(Config { chunk_size: 4, ..Config::default() })?;
//! let stored: Vec<u32> = (0..8).collect();
//! index.register(&stored, &[b"first", b"other"], 0, 0, b"model-a")?;
//!
//! let query = [90, 91, 92, 4, 5, 6, 7, 93];
//! let hits = index.matches(&query, b"model-a", Options::default());
//! assert_eq!(hits[0].chunk_hash.as_bytes(), b"other");
//! assert_eq!((hits[0].old_start, hits[0].cur_start), (4, 3));
//! assert!(index.matches(&query, b"model-b", Options::default()).is_empty());
//! # Ok(())
//! # }
//! ```
//!
//! # How a match works
//!
//! A polynomial fingerprint is computed for each offset. A filter that stays in the cache rejects most of them; a bucket of
//! one cache line rejects nearly all others; for what is left, the 64-bit fingerprint, the scope and
//! then the tokens themselves are compared. A reported match is exact.
//!
//! # What concurrent callers can rely on
//!
//! Every method takes `&self` and may be called from any thread at any time. Nothing locks and nobody waits: writers go
//! by compare-and-swap, and a writer that is stopped half-way keeps no other from its work (the memory allocator aside).
//!
//! 1. A chunk whose registration returned before a match began, and that nobody removed or evicted, is found.
//! 2. A reported match is token-exact and of the scope asked for, and its key and position belong together.
//! 3. A removal is never undone by a race.
//! 4. The id of a removed chunk never surfaces under another chunk.
//!
//! A registration that skips a chunk hash because another thread is just registering it may return before the chunk is
//! found; that other call's return is what counts.
//!
//! # Not supported
//!
//! Iteration, persistence, and snapshots of several calls at once. Memory that was used stays with the index for later use
//! until it is dropped.

mod arena;
pub mod chain;
mod config;
mod contents;
mod epoch;
mod error;
mod filter;
pub mod hash;
mod index;
mod keys;
mod limbo;
#[cfg(all(test, loom))]
mod models;
mod report;
mod scopes;
mod simd;
pub mod spans;
mod sync;
mod table;

pub use config::{Config, MAX_CAPACITY, MAX_CHUNK_SIZE, MAX_STRIKES, OnFull};
pub use error::Error;
pub use index::Index;
pub use keys::{ChunkHash, MAX_CHUNK_HASH_BYTES, MAX_IN_FLIGHT};
pub use report::{Hit, Options, Registered, Stats};
pub use simd::Simd;
