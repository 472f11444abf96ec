//! Fingerprints of token windows: a polynomial in the tokens modulo 2^64.
//!
//! `fingerprint(t) = Σ t[i] · base^(n-1-i) mod 2^64`, for an odd `base`. An odd base has an inverse, so all windows
//! of a block come from one running sum: with `s[j] = Σ_{m<j} t[m] · base^-m`, the window at `i` has the fingerprint
//! `(s[i+n] - s[i]) · base^(i+n-1)`. That is two multiplications for each token and no chain of dependent ones.

use crate::simd::{Simd, per_simd};

/// Offsets per block. Large enough that the `chunk - 1` tokens of overlap cost little, small enough for the L1 cache.
const BLOCK: usize = 2048;

/// Computes window fingerprints for one base and window length, each multiplied by a fixed odd factor.
pub struct Roller {
    chunk: usize,
    simd: Simd,
    /// `base^-j`, for each token of a block.
    down: Box<[u64]>,
    /// `factor · base^(i+n-1)`, for each offset of a block.
    up: Box<[u64]>,
    /// `factor · base^(n-1-k)`, for each token of a single window.
    powers: Box<[u64]>,
}

/// Scratch space of a [`Roller`], to be used again from block to block.
#[derive(Default)]
pub struct Scratch {
    sums: Vec<u64>,
}

impl Roller {
    /// Plain fingerprints under `base`.
    ///
    /// # Panics
    /// If `base` is even or `chunk` is 0.
    pub fn new(chunk: usize, base: u64) -> Self {
        Self::with_factor(chunk, base, 1, Simd::detect())
    }

    /// Fingerprints under `base`, times `factor`, on a chosen instruction set.
    ///
    /// # Panics
    /// If `base` is even or `chunk` is 0.
    pub fn with_factor(chunk: usize, base: u64, factor: u64, simd: Simd) -> Self {
        assert!(base % 2 == 1, "base must be odd");
        assert!(chunk > 0, "chunk must not be 0");
        let block = BLOCK.max(chunk);
        let powers_of = |start: u64, step: u64, len: usize| {
            std::iter::successors(Some(start), move |p| Some(p.wrapping_mul(step))).take(len)
        };
        let mut powers: Box<[u64]> = powers_of(factor, base, chunk).collect();
        powers.reverse();
        Self {
            chunk,
            simd,
            down: powers_of(1, inverse(base), block + chunk - 1).collect(),
            up: powers_of(powers[0], base, block).collect(),
            powers,
        }
    }

    /// Offsets that one call of [`block`](Self::block) can fill.
    pub fn block_len(&self) -> usize {
        self.up.len()
    }

    /// Number of windows in `tokens` tokens.
    pub fn windows(&self, tokens: usize) -> usize {
        (tokens + 1).saturating_sub(self.chunk)
    }

    /// Writes the value of the window at each of the offsets `0..out.len()` of `tokens`.
    ///
    /// # Panics
    /// If `out` is longer than a block, or `tokens` is shorter than `out.len() + chunk - 1`.
    pub fn block(&self, tokens: &[u32], scratch: &mut Scratch, out: &mut [u64]) {
        self.keyed_block(0, tokens, scratch, out);
    }

    /// As [`block`](Self::block), with `key` added to each value by exclusive or.
    pub(crate) fn keyed_block(&self, key: u64, tokens: &[u32], scratch: &mut Scratch, out: &mut [u64]) {
        let (tokens, sums) = self.prepare(tokens, scratch, out.len());
        block(self.simd, key, tokens, &self.down, &self.up, sums, out);
    }

    fn prepare<'a>(&self, tokens: &'a [u32], scratch: &'a mut Scratch, out: usize) -> (&'a [u32], &'a mut [u64]) {
        assert!(out <= self.block_len(), "one block");
        let tokens = &tokens[..(out + self.chunk - 1) * usize::from(out > 0)];
        scratch.sums.resize(self.down.len() + 1, 0);
        (tokens, &mut scratch.sums[..=tokens.len()])
    }

    /// The value of the window at every offset of `tokens`.
    pub fn rolling(&self, tokens: &[u32]) -> Vec<u64> {
        let mut out = vec![0; self.windows(tokens.len())];
        let mut scratch = Scratch::default();
        let step = self.block_len();
        for (n, part) in out.chunks_mut(step).enumerate() {
            self.block(&tokens[n * step..], &mut scratch, part);
        }
        out
    }

    /// The value of one window.
    ///
    /// # Panics
    /// If `window` is not one chunk long.
    pub fn single(&self, window: &[u32]) -> u64 {
        assert_eq!(window.len(), self.chunk, "one chunk");
        let terms = window.iter().zip(&self.powers).map(|(&t, &p)| u64::from(t).wrapping_mul(p));
        terms.fold(0, u64::wrapping_add)
    }

    /// The value of each full, non-overlapping chunk of `tokens`.
    pub fn chunks(&self, tokens: &[u32]) -> Vec<u64> {
        tokens.chunks_exact(self.chunk).map(|window| self.single(window)).collect()
    }
}

per_simd! {
    fn block(key: u64, tokens: &[u32], down: &[u64], up: &[u64], sums: &mut [u64], out: &mut [u64]) = block_body;
}

// It must take on its callers' instruction sets.
#[expect(clippy::inline_always)]
#[inline(always)]
fn block_body(key: u64, tokens: &[u32], down: &[u64], up: &[u64], sums: &mut [u64], out: &mut [u64]) {
    let mut sum = 0u64;
    let (first, rest) = sums.split_first_mut().expect("one more sum than tokens");
    *first = 0;
    for ((&token, &power), slot) in tokens.iter().zip(down).zip(rest) {
        sum = sum.wrapping_add(u64::from(token).wrapping_mul(power));
        *slot = sum;
    }
    let late = &sums[tokens.len() + 1 - out.len()..];
    for (((value, &before), &after), &power) in out.iter_mut().zip(sums.iter()).zip(late).zip(up) {
        *value = after.wrapping_sub(before).wrapping_mul(power) ^ key;
    }
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration: each round doubles the bits that are right.
fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    for _ in 0..5 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
    }
    x
}

/// The secrets of one index, drawn from its seed.
pub(crate) struct Secrets {
    /// Base of the polynomial.
    pub(crate) base: u64,
    /// Odd factor that makes the high half of a hash depend on all of the fingerprint.
    pub(crate) factor: u64,
    /// Key of the hash of chunk hashes and scopes.
    pub(crate) key: u64,
}

impl Secrets {
    pub(crate) fn from_seed(seed: u64) -> Self {
        let mut state = seed;
        Self { base: splitmix(&mut state) | 1, factor: splitmix(&mut state) | 1, key: splitmix(&mut state) }
    }
}

/// The odd base of the polynomial that an index made with `seed` uses.
pub fn base_for_seed(seed: u64) -> u64 {
    Secrets::from_seed(seed).base
}

/// `SplitMix64`, by Sebastiano Vigna: <https://prng.di.unimi.it/splitmix64.c> (public domain).
pub(crate) fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Hash of some words under a key.
pub(crate) fn hash_words(key: u64, words: impl IntoIterator<Item = u64>) -> u64 {
    let mut state = key;
    for word in words {
        state ^= word;
        state = splitmix(&mut state);
    }
    state
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn horner(tokens: &[u32], base: u64) -> u64 {
        tokens.iter().fold(0u64, |h, &t| h.wrapping_mul(base).wrapping_add(u64::from(t)))
    }

    #[test]
    fn inverse_inverts() {
        for odd in [1, 3, 0x9e37_79b9_7f4a_7c15, u64::MAX] {
            assert_eq!(inverse(odd).wrapping_mul(odd), 1);
        }
    }

    proptest! {
        #[test]
        fn every_path_equals_horner(
            tokens in prop::collection::vec(any::<u32>(), 0..5000),
            chunk in 1usize..700,
            base in any::<u64>().prop_map(|b| b | 1),
            factor in any::<u64>().prop_map(|f| f | 1),
        ) {
            let expected: Vec<u64> =
                tokens.windows(chunk).map(|w| horner(w, base).wrapping_mul(factor)).collect();
            for simd in Simd::available() {
                let roller = Roller::with_factor(chunk, base, factor, simd);
                prop_assert_eq!(&roller.rolling(&tokens), &expected);
                let whole: Vec<u64> = expected.iter().copied().step_by(chunk).collect();
                prop_assert_eq!(roller.chunks(&tokens), whole);
            }
        }
    }
}
