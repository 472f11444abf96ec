//! The index against a plain model, over random interleavings of all operations.
#![cfg(not(loom))]
#![allow(missing_docs)]

use std::collections::{HashMap, HashSet};

use kvsplice::{Config, Index, OnFull, Options};
use proptest::prelude::*;

const CHUNK: usize = 3;

type Key = (Vec<u8>, Vec<u8>);

#[derive(Default)]
struct Model {
    /// (scope, chunk hash) -> text, stored position, strikes, time of the last registration or confirmation.
    held: HashMap<Key, (Vec<u32>, u64, u64, u64)>,
    in_flight: HashMap<Key, u64>,
    now: u64,
    dedup: bool,
}

impl Model {
    fn register(&mut self, tokens: &[u32], hashes: &[Vec<u8>], first: usize, offset: u64, scope: &[u8]) -> usize {
        let mut added = 0;
        for (n, text) in tokens.chunks_exact(CHUNK).enumerate().skip(first) {
            let key = (scope.to_vec(), hashes[n].clone());
            let known = |(s, _): &Key, held: &Vec<u32>| s == scope && held == text;
            if self.held.contains_key(&key) || (self.dedup && self.held.iter().any(|(key, value)| known(key, &value.0)))
            {
                continue;
            }
            self.now += 1;
            self.held.insert(key, (text.to_vec(), offset + (n * CHUNK) as u64, 0, self.now));
            added += 1;
        }
        added
    }

    fn matches(&self, tokens: &[u32], scope: &[u8], options: Options) -> Vec<(u64, usize, Vec<u8>)> {
        let mut found = Vec::new();
        let mut seen = HashSet::new();
        for (offset, text) in tokens.windows(CHUNK).enumerate() {
            let mut holders: Vec<_> =
                self.held.iter().filter(|((s, _), value)| s == scope && value.0 == text).collect();
            holders.sort_by_key(|(_, value)| std::cmp::Reverse(value.3));
            if !options.all_holders {
                holders.truncate(1);
            }
            if options.every_occurrence || seen.insert(text) {
                found.extend(holders.iter().map(|((_, hash), value)| (value.1, offset, hash.clone())));
            }
        }
        found
    }

    fn strike(&mut self, hash: &[u8], threshold: u64, scope: &[u8]) -> bool {
        let key = (scope.to_vec(), hash.to_vec());
        if self.in_flight.get(&key).is_some_and(|&n| n > 0) {
            return false;
        }
        let Some(value) = self.held.get_mut(&key) else {
            return false;
        };
        value.2 += 1;
        let out = value.2 >= threshold;
        if out {
            self.held.remove(&key);
        }
        out
    }

    fn confirm(&mut self, hash: &[u8], scope: &[u8]) {
        if let Some(value) = self.held.get_mut(&(scope.to_vec(), hash.to_vec())) {
            self.now += 1;
            value.2 = 0;
            value.3 = self.now;
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Register { tokens: Vec<u32>, hashes: Vec<Vec<u8>>, first: usize, offset: u64 },
    Match { tokens: Vec<u32>, every_occurrence: bool, all_holders: bool },
    Remove(Vec<Vec<u8>>),
    Strike(Vec<Vec<u8>>, u64),
    Confirm(Vec<Vec<u8>>),
    Begin(Vec<Vec<u8>>),
    Finish(Vec<Vec<u8>>),
}

/// Few keys, of all sizes in which they are kept.
fn chunk_hash() -> impl Strategy<Value = Vec<u8>> {
    (0u8..24).prop_map(|n| vec![n; [1, 8, 16, 17, 32, 33, 64][n as usize % 7]])
}

fn hashes(len: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Vec<Vec<u8>>> {
    prop::collection::vec(chunk_hash(), len)
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = |len| prop::collection::vec(0u32..3, len);
    prop_oneof![
        4 => (tokens(0..16), hashes(5), 0usize..3, 0u64..100)
            .prop_map(|(tokens, hashes, first, offset)| Op::Register { tokens, hashes, first, offset }),
        4 => (tokens(0..24), any::<bool>(), any::<bool>())
            .prop_map(|(tokens, every_occurrence, all_holders)| Op::Match { tokens, every_occurrence, all_holders }),
        2 => hashes(0..4).prop_map(Op::Remove),
        2 => (hashes(0..4), 1u64..4).prop_map(|(hashes, threshold)| Op::Strike(hashes, threshold)),
        2 => hashes(0..4).prop_map(Op::Confirm),
        1 => hashes(0..3).prop_map(Op::Begin),
        1 => hashes(0..3).prop_map(Op::Finish),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn behaves_like_the_model(
        ops in prop::collection::vec((op(), 0u8..2), 1..120),
        dedup_content in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let config = Config { chunk_size: CHUNK, dedup_content, seed: Some(seed), ..Config::default() };
        let index = Index::new(config).unwrap();
        let mut model = Model { dedup: dedup_content, ..Model::default() };
        for (op, scope) in ops {
            let scope: &[u8] = if scope == 0 { b"" } else { b"another" };
            match op {
                Op::Register { tokens, hashes, first, offset } => {
                    let added = index.register(&tokens, &hashes, first, offset, scope).unwrap().count;
                    prop_assert_eq!(added, model.register(&tokens, &hashes, first, offset, scope));
                }
                Op::Match { tokens, every_occurrence, all_holders } => {
                    let options = Options { every_occurrence, all_holders };
                    let hits = index.matches(&tokens, scope, options);
                    let hits: Vec<_> =
                        hits.iter().map(|h| (h.old_start, h.cur_start, h.chunk_hash.as_bytes().to_vec())).collect();
                    prop_assert_eq!(hits, model.matches(&tokens, scope, options));
                }
                Op::Remove(hashes) => {
                    let removed = index.remove(&hashes, scope).unwrap();
                    let there = hashes.iter().filter(|h| model.held.remove(&(scope.to_vec(), (*h).clone())).is_some());
                    prop_assert_eq!(removed, there.count());
                }
                Op::Strike(hashes, threshold) => {
                    let evicted = index.strike(&hashes, threshold, scope).unwrap();
                    let expected: Vec<usize> =
                        (0..hashes.len()).filter(|&n| model.strike(&hashes[n], threshold, scope)).collect();
                    prop_assert_eq!(evicted, expected);
                }
                Op::Confirm(hashes) => {
                    index.confirm(&hashes, scope).unwrap();
                    hashes.iter().for_each(|h| model.confirm(h, scope));
                }
                Op::Begin(hashes) => {
                    index.begin(&hashes, scope).unwrap();
                    for hash in hashes {
                        *model.in_flight.entry((scope.to_vec(), hash)).or_default() += 1;
                    }
                }
                Op::Finish(hashes) => {
                    index.finish(&hashes, scope).unwrap();
                    for hash in hashes {
                        let count = model.in_flight.entry((scope.to_vec(), hash)).or_default();
                        *count = count.saturating_sub(1);
                    }
                }
            }
            prop_assert_eq!(index.len(), model.held.len());
            prop_assert_eq!(index.check(), Ok(()));
        }
    }
}

/// Tokens that do not repeat, a chunk for each number.
fn text(number: u32) -> Vec<u32> {
    (0..CHUNK as u32).map(|n| number * CHUNK as u32 + n).collect()
}

#[test]
fn ten_million_registrations_and_evictions_leave_memory_flat() {
    let runs: u32 = if cfg!(debug_assertions) { 200_000 } else { 10_000_000 };
    let capacity = runs / 100;
    let config = Config { chunk_size: CHUNK, capacity: capacity as usize, ..Config::default() };
    let index = Index::new(config).unwrap();
    let mut high_water = 0;
    for n in 0..runs {
        index.register(&text(n), &[n.to_le_bytes()], 0, 0, b"").unwrap();
        if n == 3 * capacity {
            let stats = index.stats();
            high_water = stats.token_bytes + stats.overhead_bytes;
        }
    }
    let stats = index.stats();
    assert!(stats.token_bytes + stats.overhead_bytes <= high_water * 11 / 10, "{high_water} then {stats:?}");
    assert_eq!(stats.entries, capacity as usize);
    assert_eq!(stats.evicted, u64::from(runs - capacity));
    // Nothing was used, so what is left is what came last.
    for n in runs - capacity..runs {
        let hits = index.matches(&text(n), b"", Options::default());
        assert_eq!(hits[0].chunk_hash.as_bytes(), n.to_le_bytes());
    }
    assert!(index.matches(&text(runs - capacity - 1), b"", Options::default()).is_empty());
    assert_eq!(index.check(), Ok(()));
}

#[test]
fn what_is_used_outlives_what_is_not() {
    let config = Config { chunk_size: CHUNK, capacity: 1000, ..Config::default() };
    let index = Index::new(config).unwrap();
    for n in 0..20_000u32 {
        index.register(&text(n), &[n.to_le_bytes()], 0, 0, b"").unwrap();
        if n % 400 == 0 {
            (0..100)
                .for_each(|used| assert!(n < used || index.matches(&text(used), b"", Options::default()).len() == 1));
        }
    }
}

#[test]
fn a_full_index_that_rejects_keeps_what_it_has() {
    let config = Config { chunk_size: CHUNK, capacity: 10, on_full: OnFull::Reject, ..Config::default() };
    let index = Index::new(config).unwrap();
    let register = |n: u32| index.register(&text(n), &[n.to_le_bytes()], 0, 0, b"").unwrap();
    assert!((0..10).all(|n| register(n).count == 1 && !register(n).first_time_full));
    assert!(register(10).first_time_full);
    assert!(!register(11).first_time_full);
    assert_eq!((index.len(), index.stats().rejected_full), (10, 2));
    index.remove(&[3u32.to_le_bytes()], b"").unwrap();
    assert_eq!(register(10).count, 1);
    assert_eq!(index.check(), Ok(()));
}

#[test]
fn many_holders_of_one_text_cost_no_more_than_few() {
    let index = Index::new(Config { chunk_size: CHUNK, ..Config::default() }).unwrap();
    let holders = 200_000u32;
    for n in 0..holders {
        index.register(&text(0), &[n.to_le_bytes()], 0, u64::from(n), b"").unwrap();
    }
    assert_eq!(index.stats().contents, 1);
    // From the oldest and from the newest end; quadratic work would take minutes.
    for n in 0..holders / 2 - 1 {
        index.remove(&[n.to_le_bytes()], b"").unwrap();
        index.remove(&[(holders - 1 - n).to_le_bytes()], b"").unwrap();
    }
    assert_eq!(index.matches(&text(0), b"", Options { all_holders: true, ..Options::default() }).len(), 2);
    assert_eq!(index.check(), Ok(()));
}

/// A level for the few that live must have room for what comes while the large one before it is copied.
#[test]
fn an_index_that_shrinks_goes_on() {
    let peak = if cfg!(debug_assertions) { 100_000u32 } else { 786_000 };
    for left in [64, 300, 1000, 1400] {
        let index = Index::new(Config { chunk_size: CHUNK, ..Config::default() }).unwrap();
        let register = |n: u32| index.register(&text(n), &[n.to_le_bytes()], 0, 0, b"").unwrap().count;
        (0..peak).for_each(|n| assert_eq!(register(n), 1));
        (left..peak).for_each(|n| assert_eq!(index.remove(&[n.to_le_bytes()], b""), Ok(1)));
        for n in peak..peak + 200_000 {
            assert_eq!(register(n), 1);
            assert_eq!(index.remove(&[n.to_le_bytes()], b""), Ok(1));
        }
        assert_eq!(index.len(), left as usize);
        assert_eq!(index.check(), Ok(()));
    }
}

#[test]
fn memory_of_the_removed_is_used_again_without_further_removals() {
    let index = Index::new(Config { chunk_size: CHUNK, ..Config::default() }).unwrap();
    let register = |n: u32| index.register(&text(n), &[n.to_le_bytes()], 0, 0, b"").unwrap();
    (0..20_000).for_each(|n| assert_eq!(register(n).count, 1));
    (0..20_000u32).for_each(|n| assert_eq!(index.remove(&[n.to_le_bytes()], b""), Ok(1)));
    let before = index.stats().token_bytes;
    (0..20_000).for_each(|n| assert_eq!(register(20_000 + n).count, 1));
    assert!(index.stats().token_bytes <= before + before / 50);
}
