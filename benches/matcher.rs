//! Criterion benches of the core: `cargo bench -p kvsplice`.
//!
//! Query length is 32,768 tokens throughout; throughput is in tokens (matching) or chunks (registering, removing).

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvsplice::hash::{Roller, Scratch};
use kvsplice::{Config, Index, Options, Simd};

const CHUNK: usize = 256;
const QUERY: usize = 32_768;

/// A stream of token ids of a usual vocabulary that does not repeat.
struct Text(u64);

impl Text {
    fn tokens(&mut self, len: usize) -> Vec<u32> {
        let next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as u32 % 128_000
        };
        std::iter::repeat_with(next).take(len).collect()
    }
}

fn chunk_hash(n: usize) -> [u8; 32] {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&(n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    hash[8..16].copy_from_slice(&n.to_le_bytes());
    hash
}

/// An index of `entries` chunks, and the text of every chunk that is asked for again.
fn filled(entries: usize, chunk: usize, keep: usize) -> (Index, Vec<u32>) {
    let index =
        Index::new(Config { chunk_size: chunk, capacity: entries, seed: Some(1), ..Config::default() }).unwrap();
    let mut text = Text(7);
    let mut kept = Vec::new();
    let stride = (entries / keep.max(1)).max(1);
    for n in 0..entries {
        let tokens = text.tokens(chunk);
        index.register(&tokens, &[chunk_hash(n)], 0, 0, b"").unwrap();
        if n % stride == 0 && kept.len() < keep * chunk {
            kept.extend_from_slice(&tokens);
        }
    }
    (index, kept)
}

fn roll(c: &mut Criterion) {
    let mut group = c.benchmark_group("roll");
    group.throughput(Throughput::Elements(QUERY as u64));
    let query = Text(1).tokens(QUERY);
    for simd in Simd::available() {
        let roller = Roller::with_factor(CHUNK, 0x1234_5678_9abc_def1, 1, simd);
        let mut scratch = Scratch::default();
        let mut out = vec![0; roller.block_len()];
        group.bench_function(simd.name(), |b| {
            b.iter(|| {
                let windows = roller.windows(query.len());
                for first in (0..windows).step_by(out.len()) {
                    let len = out.len().min(windows - first);
                    roller.block(black_box(&query[first..]), &mut scratch, &mut out[..len]);
                    black_box(&out);
                }
            });
        });
    }
    group.finish();
}

/// Nothing of the query is held. Short chunks keep 16M entries within a few GiB; the probe sees only fingerprints.
fn probe(c: &mut Criterion) {
    let mut group = c.benchmark_group("probe without hits");
    group.throughput(Throughput::Elements(QUERY as u64));
    let query = Text(99).tokens(QUERY);
    for (name, entries) in [("64k", 1 << 16), ("1M", 1 << 20), ("4M", 1 << 22), ("16M", 1 << 24)] {
        let (index, _) = filled(entries, 16, 0);
        group.bench_function(name, |b| b.iter(|| index.matches(black_box(&query), b"", Options::default())));
    }
    group.finish();
}

fn matching(c: &mut Criterion) {
    let mut group = c.benchmark_group("match");
    group.throughput(Throughput::Elements(QUERY as u64));
    for (name, entries) in [("1k", 1000), ("100k", 100_000), ("800k", 800_000)] {
        let (index, kept) = filled(entries, CHUNK, QUERY / CHUNK / 2);
        let none = Text(99).tokens(QUERY);
        let mut half = none.clone();
        for (n, chunk) in kept.chunks_exact(CHUNK).enumerate() {
            half[2 * n * CHUNK + 37..][..CHUNK].copy_from_slice(chunk);
        }
        assert_eq!(index.matches(&half, b"", Options::default()).len(), QUERY / CHUNK / 2);
        for (reuse, query) in [("none", &none), ("half", &half)] {
            group.bench_function(BenchmarkId::new(format!("reuse {reuse}"), name), |b| {
                b.iter(|| index.matches(black_box(query), b"", Options::default()));
            });
        }
    }
    group.finish();
}

fn contended_match(c: &mut Criterion) {
    let mut group = c.benchmark_group("match while another thread registers");
    group.throughput(Throughput::Elements(QUERY as u64));
    let (index, _) = filled(100_000, CHUNK, 0);
    let index = Arc::new(index);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let (index, stop) = (Arc::clone(&index), Arc::clone(&stop));
        move || {
            let mut text = Text(5);
            let mut n = 1 << 40;
            while !stop.load(Ordering::Relaxed) {
                index.register(&text.tokens(CHUNK), &[chunk_hash(n)], 0, 0, b"").unwrap();
                n += 1;
            }
        }
    });
    let query = Text(99).tokens(QUERY);
    group.bench_function("100k", |b| b.iter(|| index.matches(black_box(&query), b"", Options::default())));
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    group.finish();
}

fn writing(c: &mut Criterion) {
    let mut group = c.benchmark_group("write");
    let chunks = 128;
    group.throughput(Throughput::Elements(chunks as u64));
    let prompts = |count: usize| {
        let mut text = Text(3);
        (0..count).map(|_| text.tokens(chunks * CHUNK)).collect::<Vec<_>>()
    };
    let prompts = prompts(64);
    let keys = |n: usize| (0..chunks).map(|k| chunk_hash(n * chunks + k)).collect::<Vec<_>>();
    for capacity in [1 << 20, 100_000] {
        let index = Index::new(Config { capacity, ..Config::default() }).unwrap();
        let mut n = 0;
        group.bench_function(BenchmarkId::new("register a 32k prompt", capacity), |b| {
            b.iter_batched(
                || {
                    n += 1;
                    (keys(n), &prompts[n % prompts.len()])
                },
                |(keys, prompt)| index.register(prompt, &keys, 0, 0, b"").unwrap(),
                BatchSize::SmallInput,
            );
        });
    }
    let index = Index::new(Config::default()).unwrap();
    group.bench_function("register and remove", |b| {
        b.iter_custom(|rounds| {
            let mut spent = Duration::ZERO;
            for n in 0..rounds {
                let keys = keys(n as usize);
                let start = Instant::now();
                index.register(&prompts[n as usize % prompts.len()], &keys, 0, 0, b"").unwrap();
                index.remove(&keys, b"").unwrap();
                spent += start.elapsed();
            }
            spent
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    targets = roll, probe, matching, contended_match, writing
}
criterion_main!(benches);
