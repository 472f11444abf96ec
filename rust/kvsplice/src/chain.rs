//! Chained chunk hashes: storage keys that depend on a chunk's tokens and on all that came before it.
//!
//! The hash of a chunk is `BLAKE3(parent ‖ tokens as big-endian u32)`, and that of the first one has [`root`] as its
//! parent. `LMCache` computes the same with its algorithm `blake3`.

/// Bytes of a chained hash.
pub const BYTES: usize = 32;

/// The parent of a first chunk: the hash of eight zero bytes and the token 0.
#[must_use]
pub fn root() -> [u8; BYTES] {
    *blake3::hash(&[0; 12]).as_bytes()
}

/// The hashes of all full chunks of `tokens`, the first of which follows `parent`.
///
/// # Panics
///
/// If `chunk_size` is 0.
#[must_use]
pub fn chunk_hashes(tokens: &[u32], chunk_size: usize, parent: &[u8]) -> Vec<[u8; BYTES]> {
    let mut hashes: Vec<[u8; BYTES]> = Vec::with_capacity(tokens.len() / chunk_size);
    let mut message = Vec::with_capacity(parent.len().max(BYTES) + 4 * chunk_size);
    for chunk in tokens.chunks_exact(chunk_size) {
        message.clear();
        message.extend_from_slice(hashes.last().map_or(parent, |hash| hash));
        message.extend(chunk.iter().flat_map(|token| token.to_be_bytes()));
        hashes.push(*blake3::hash(&message).as_bytes());
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_may_be_cut_and_continued() {
        let tokens: Vec<u32> = (0..100).collect();
        let whole = chunk_hashes(&tokens, 16, &root());
        assert_eq!(whole.len(), 6);
        let rest = chunk_hashes(&tokens[32..], 16, &whole[1]);
        assert_eq!(rest, whole[2..]);
    }

    #[test]
    fn a_hash_depends_on_all_that_came_before() {
        let mut tokens: Vec<u32> = (0..64).collect();
        let before = chunk_hashes(&tokens, 16, &root());
        tokens[0] = 7;
        let after = chunk_hashes(&tokens, 16, &root());
        assert!(before.iter().zip(&after).all(|(before, after)| before != after));
    }
}
