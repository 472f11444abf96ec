//! How an index is made, and its limits.

/// The longest chunk, in tokens.
pub const MAX_CHUNK_SIZE: usize = 1 << 16;

/// The most chunk hashes that one index can hold.
pub const MAX_CAPACITY: usize = 1 << 30;

/// The highest threshold for strikes.
pub const MAX_STRIKES: u64 = 255;

/// What to do when a registration finds the index full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// Drop the chunk hash that went unused for longest.
    Evict,
    /// Index no more.
    Reject,
}

/// How an [`Index`](crate::Index) is made.
#[derive(Clone, Debug)]
pub struct Config {
    /// Tokens per chunk, 1 to [`MAX_CHUNK_SIZE`].
    pub chunk_size: usize,
    /// The most chunk hashes held at once, 1 to [`MAX_CAPACITY`].
    pub capacity: usize,
    /// What a registration does when that is reached.
    pub on_full: OnFull,
    /// Skip a chunk whose text is indexed in its scope already.
    pub dedup_content: bool,
    /// Seed of the fingerprint base and the table hash; random if absent.
    pub seed: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self { chunk_size: 256, capacity: 1 << 20, on_full: OnFull::Evict, dedup_content: false, seed: None }
    }
}
