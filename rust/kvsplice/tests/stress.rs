//! Writers, removers and readers at once, then the structural check.
//!
//! `KVSPLICE_STRESS_SECONDS` sets how long each runs; 2 by default.
#![cfg(not(loom))]
#![allow(missing_docs)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvsplice::{Config, Index, Options};

const CHUNK: usize = 8;

fn seconds() -> Duration {
    let seconds = std::env::var("KVSPLICE_STRESS_SECONDS").ok().map(|s| s.parse().expect("a number of seconds"));
    Duration::from_secs(seconds.unwrap_or(2))
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// The text of a number, with nothing in common with any other's.
fn text(number: u64) -> Vec<u32> {
    (0..CHUNK as u64).map(|n| (number * CHUNK as u64 + n) as u32).collect()
}

/// A key says which text it was registered for and at which position, so that a reader can tell.
fn key(number: u64, holder: u64) -> [u8; 16] {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&number.to_le_bytes());
    key[8..].copy_from_slice(&holder.to_le_bytes());
    key
}

fn position(number: u64, holder: u64) -> u64 {
    number * 1000 + holder
}

/// Runs random operations over `texts` texts with three holders each, in an index of `capacity`.
fn churn(capacity: usize, texts: u64) {
    let index = Index::new(Config { chunk_size: CHUNK, capacity, ..Config::default() }).unwrap();
    // Texts from here on are registered once, before the readers start, and never touched: they must always be found.
    let kept = 1_000_000..1_000_000 + if capacity as u64 > 4 * texts { 200u64 } else { 0 };
    for number in kept.clone() {
        index.register(&text(number), &[key(number, 0)], 0, position(number, 0), b"").unwrap();
    }
    let stop = AtomicBool::new(false);
    let hits = AtomicU64::new(0);
    std::thread::scope(|threads| {
        for seed in 1..=3u64 {
            let (index, stop) = (&index, &stop);
            threads.spawn(move || {
                let mut state = seed * 0x9e37_79b9;
                while !stop.load(Ordering::Relaxed) {
                    let (number, holder) = (random(&mut state) % texts, random(&mut state) % 3);
                    let keys = [key(number, holder)];
                    match random(&mut state) % 8 {
                        0..=3 => {
                            index.register(&text(number), &keys, 0, position(number, holder), b"").unwrap();
                        }
                        4 => drop(index.remove(&keys, b"").unwrap()),
                        5 => drop(index.strike(&keys, 2, b"").unwrap()),
                        6 => index.confirm(&keys, b"").unwrap(),
                        _ => {
                            index.begin(&keys, b"").unwrap();
                            index.finish(&keys, b"").unwrap();
                        }
                    }
                }
            });
        }
        for seed in 11..=12u64 {
            let (index, stop, hits, kept) = (&index, &stop, &hits, kept.clone());
            threads.spawn(move || {
                let mut state = seed * 0x9e37_79b9;
                while !stop.load(Ordering::Relaxed) {
                    let number = random(&mut state) % texts;
                    let mut query = vec![u32::MAX; 3];
                    query.extend(text(number));
                    query.push(u32::MAX - 1);
                    if !kept.is_empty() {
                        query.extend(text(kept.start + random(&mut state) % (kept.end - kept.start)));
                    }
                    let all_holders = random(&mut state).is_multiple_of(2);
                    let found = index.matches(&query, b"", Options { all_holders, every_occurrence: false });
                    for hit in &found {
                        let bytes = hit.chunk_hash.as_bytes();
                        let word = |n: usize| u64::from_le_bytes(bytes[n..n + 8].try_into().unwrap());
                        assert_eq!(query[hit.cur_start..][..CHUNK], text(word(0)), "a key of another text");
                        assert_eq!(hit.old_start, position(word(0), word(8)), "a position of another key");
                    }
                    if !kept.is_empty() {
                        assert!(found.iter().any(|hit| hit.cur_start == CHUNK + 4), "a registered chunk was missed");
                    }
                    hits.fetch_add(found.len() as u64, Ordering::Relaxed);
                }
            });
        }
        let start = Instant::now();
        while start.elapsed() < seconds() {
            std::thread::sleep(Duration::from_millis(20));
            assert!(index.len() <= capacity);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(index.check(), Ok(()));
    assert!(hits.into_inner() > 0);
    for number in kept {
        assert_eq!(index.matches(&text(number), b"", Options::default()).len(), 1);
    }
}

#[test]
fn few_texts_much_contention() {
    churn(1000, 20);
}

#[test]
fn many_texts_and_growth() {
    churn(1 << 20, 100_000);
}

#[test]
fn constant_eviction() {
    churn(500, 5000);
}

/// One thread adds holders of one text, another removes them: neither may fall behind for good.
#[test]
fn a_popular_text() {
    let index = Index::new(Config { chunk_size: CHUNK, ..Config::default() }).unwrap();
    let (registered, removed) = (AtomicU64::new(0), AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let n = registered.load(Ordering::Relaxed);
                // The remover gets the time to keep up.
                if n - removed.load(Ordering::Relaxed) < 10_000 {
                    index.register(&text(0), &[key(0, n)], 0, position(0, n), b"").unwrap();
                    registered.store(n + 1, Ordering::Release);
                }
            }
        });
        threads.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let n = removed.load(Ordering::Relaxed);
                if n + 100 < registered.load(Ordering::Acquire) {
                    assert_eq!(index.remove(&[key(0, n)], b""), Ok(1));
                    removed.store(n + 1, Ordering::Relaxed);
                }
            }
        });
        std::thread::sleep(seconds());
        stop.store(true, Ordering::Relaxed);
    });
    let removed = removed.into_inner();
    assert!(removed > 50_000, "{removed} removals in {:?}", seconds());
    assert_eq!(index.check(), Ok(()));
}
