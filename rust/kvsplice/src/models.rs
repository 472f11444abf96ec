//! Loom models: every interleaving of a few steps of the production code, up to a bound on preemptions.
//!
//! Each comes with a control: the same model with one step of the code left out must fail. A control that passes
//! means that the model does not see what it is there for.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kvsplice --release --lib -- --test-threads=1 models`

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::sync::Arc;
use loom::thread;

use crate::epoch::Epoch;
use crate::sync::{AtomicU32, AtomicU64, Ordering, Step, fault};
use crate::table::{Load, Records, Table};
use crate::{Config, Index, Options};

/// Runs a model as it is, and once more without `step`: then it must fail.
fn explore(preemptions: usize, step: Step, model: impl Fn() + Copy + Send + Sync + 'static) {
    let run = move || {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.max_branches = 100_000;
        builder.check(model);
    };
    run();
    fault::omit(Some(step));
    // The panic of a control is expected; its message would only confuse.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = catch_unwind(AssertUnwindSafe(run));
    std::panic::set_hook(hook);
    fault::omit(None);
    assert!(outcome.is_err(), "the model does not notice that {step:?} is left out");
}

/// Records of a table: for each id a key, which is also its hash, and whether it lives.
struct Toys {
    keys: Vec<u64>,
    alive: Vec<AtomicU32>,
}

impl Toys {
    fn new(keys: &[u64]) -> Self {
        Self { keys: keys.to_vec(), alive: keys.iter().map(|_| AtomicU32::new(0)).collect() }
    }

    fn insert(&self, table: &Table, id: u32) -> Result<(), u32> {
        self.alive[id as usize].store(1, Ordering::Release);
        let done = table.insert(self.keys[id as usize], id, self);
        if done.is_err() {
            self.alive[id as usize].store(0, Ordering::Release);
        }
        done
    }

    fn remove(&self, table: &Table, id: u32) {
        self.alive[id as usize].store(0, Ordering::Release);
        table.erase(self.keys[id as usize], id);
    }

    fn finds(&self, table: &Table, id: u32) -> bool {
        let find = |found| {
            if found == id { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        table.level().probe(self.keys[id as usize], find).is_some()
    }

    fn check(&self, table: &Table) {
        table.check(self, 0..self.keys.len() as u32).unwrap();
    }
}

impl Records for Toys {
    fn hash_of(&self, id: u32) -> Option<u64> {
        (self.alive[id as usize].load(Ordering::Acquire) == 1).then(|| self.keys[id as usize])
    }

    fn same(&self, id: u32, other: u32) -> bool {
        self.keys[id as usize] == self.keys[other as usize] && self.hash_of(other).is_some()
    }

    fn live(&self) -> usize {
        3
    }
}

/// Two homes in a level of two buckets. The last two are the same.
const KEYS: [u64; 6] = [0, 1 << 60, 2 << 60, 9 << 60, 11 << 60, 11 << 60];
/// A third word begins a rebuild of the first level.
const BEFORE: [u32; 2] = [1, 3];

#[test]
fn what_is_inserted_during_a_rebuild_is_found() {
    explore(3, Step::FollowRebuild, || {
        let shared = Arc::new((Table::new(Load::SPARSE), Toys::new(&KEYS)));
        let (table, toys) = &*shared;
        BEFORE.into_iter().for_each(|id| toys.insert(table, id).unwrap());
        let other = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let (table, toys) = &*shared;
                toys.insert(table, 2).unwrap();
                assert!(toys.finds(table, 2));
            }
        });
        toys.insert(table, 4).unwrap();
        assert!(toys.finds(table, 4) && toys.finds(table, 1));
        other.join().unwrap();
        toys.check(table);
    });
}

#[test]
fn what_is_erased_during_a_rebuild_stays_away() {
    explore(3, Step::RecheckAfterInsert, || {
        let shared = Arc::new((Table::new(Load::SPARSE), Toys::new(&KEYS)));
        let (table, toys) = &*shared;
        BEFORE.into_iter().for_each(|id| toys.insert(table, id).unwrap());
        let other = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.1.insert(&shared.0, 2).unwrap()
        });
        toys.remove(table, 1);
        assert!(!toys.finds(table, 1));
        other.join().unwrap();
        toys.check(table);
    });
}

#[test]
fn of_two_insertions_of_one_key_one_wins() {
    explore(2, Step::LookBeforeClaim, || {
        let shared = Arc::new((Table::new(Load::SPARSE), Toys::new(&KEYS)));
        let (table, toys) = &*shared;
        BEFORE.into_iter().for_each(|id| toys.insert(table, id).unwrap());
        let other = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.1.insert(&shared.0, 4)
        });
        let mine = toys.insert(table, 5);
        match (mine, other.join().unwrap()) {
            (Ok(()), Err(winner)) => assert_eq!(winner, 5),
            (Err(winner), Ok(())) => assert_eq!(winner, 4),
            both => panic!("{both:?}"),
        }
        toys.check(table);
    });
}

#[test]
fn an_id_is_not_used_again_under_a_reader() {
    explore(3, Step::GracePeriod, || {
        // `link` names a slot; the slot must hold its value for as long as a reader that followed the link is pinned.
        let shared = Arc::new((Epoch::<u64>::new(), AtomicU32::new(1), AtomicU64::new(7)));
        let reader = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let (epoch, link, slot) = &*shared;
                let _pin = epoch.pin();
                if link.load(Ordering::Acquire) == 1 {
                    assert_eq!(slot.load(Ordering::Relaxed), 7);
                }
            }
        });
        let (epoch, link, slot) = &*shared;
        let pin = epoch.pin();
        link.store(0, Ordering::Release);
        epoch.retire(&pin, 1);
        drop(pin);
        for _ in 0..3 {
            epoch.collect(|_| slot.store(8, Ordering::Relaxed));
        }
        reader.join().unwrap();
    });
}

const A: &[u32] = &[1, 2];
const B: &[u32] = &[3, 4];

fn index() -> Index {
    Index::new(Config { chunk_size: 2, capacity: 8, seed: Some(1), ..Config::default() }).unwrap()
}

fn register(index: &Index, text: &[u32], key: &str, start: u64) -> usize {
    index.register(text, &[key], 0, start, b"").unwrap().count
}

/// The key and position under which a text is found.
fn find(index: &Index, text: &[u32]) -> Option<(String, u64)> {
    let hits = index.matches(text, b"", Options::default());
    assert!(hits.len() <= 1);
    hits.first().map(|hit| (String::from_utf8(hit.chunk_hash.as_bytes().to_vec()).unwrap(), hit.old_start))
}

#[test]
fn a_reader_sees_a_whole_chunk_or_none() {
    explore(2, Step::PublishLast, || {
        let index = Arc::new(index());
        let reader = thread::spawn({
            let index = Arc::clone(&index);
            move || {
                let found = find(&index, A);
                assert!(found.is_none() || found == Some(("a".into(), 40)), "{found:?}");
            }
        });
        assert_eq!(register(&index, A, "a", 40), 1);
        assert_eq!(find(&index, A), Some(("a".into(), 40)));
        reader.join().unwrap();
        index.check().unwrap();
    });
}

#[test]
fn a_removed_chunk_never_surfaces_under_another() {
    explore(2, Step::GracePeriod, || {
        let index = Arc::new(index());
        register(&index, A, "a", 40);
        let reader = thread::spawn({
            let index = Arc::clone(&index);
            move || {
                let found = find(&index, A);
                assert!(found.is_none() || found == Some(("a".into(), 40)), "{found:?}");
            }
        });
        assert_eq!(index.remove(&["a"], b"").unwrap(), 1);
        register(&index, B, "b", 80);
        assert_eq!(find(&index, A), None);
        assert_eq!(find(&index, B), Some(("b".into(), 80)));
        reader.join().unwrap();
        index.check().unwrap();
    });
}

#[test]
fn a_text_goes_with_the_last_of_its_holders() {
    explore(2, Step::FenceBeforeSweep, || {
        let index = Arc::new(index());
        register(&index, A, "a", 40);
        register(&index, A, "b", 80);
        let other = thread::spawn({
            let index = Arc::clone(&index);
            move || assert_eq!(index.remove(&["a"], b"").unwrap(), 1)
        });
        assert_eq!(index.remove(&["b"], b"").unwrap(), 1);
        other.join().unwrap();
        index.check().unwrap();
        assert_eq!(index.stats().contents, 0);
    });
}

#[test]
fn a_new_holder_outlives_the_last_one() {
    explore(2, Step::LeaveTheDead, || {
        let index = Arc::new(index());
        register(&index, A, "a", 40);
        let other = thread::spawn({
            let index = Arc::clone(&index);
            move || assert_eq!(index.remove(&["a"], b"").unwrap(), 1)
        });
        assert_eq!(register(&index, A, "b", 80), 1);
        other.join().unwrap();
        assert_eq!(find(&index, A), Some(("b".into(), 80)));
        index.check().unwrap();
    });
}

#[test]
fn one_key_is_registered_once() {
    explore(2, Step::LookBeforeClaim, || {
        let index = Arc::new(index());
        let other = thread::spawn({
            let index = Arc::clone(&index);
            move || register(&index, A, "a", 40)
        });
        let mine = register(&index, B, "a", 80);
        assert_eq!(mine + other.join().unwrap(), 1);
        assert_eq!(index.len(), 1);
        let found = (find(&index, A), find(&index, B));
        let expected = if mine == 1 { (None, Some(("a".into(), 80))) } else { (Some(("a".into(), 40)), None) };
        assert_eq!(found, expected);
        index.check().unwrap();
    });
}

#[test]
fn what_is_in_flight_is_not_struck() {
    explore(2, Step::SpareInFlight, || {
        let index = Arc::new(index());
        register(&index, A, "a", 40);
        let begun = Arc::new(AtomicU32::new(0));
        let other = thread::spawn({
            let (index, begun) = (Arc::clone(&index), Arc::clone(&begun));
            move || {
                index.begin(&["a"], b"").unwrap();
                begun.store(1, Ordering::Release);
            }
        });
        let before = begun.load(Ordering::Acquire) == 1;
        let struck = index.strike(&["a"], 1, b"").unwrap();
        assert!(struck.is_empty() || !before);
        other.join().unwrap();
        assert_eq!(find(&index, A).is_none(), !struck.is_empty());
        index.finish(&["a"], b"").unwrap();
        index.check().unwrap();
    });
}
