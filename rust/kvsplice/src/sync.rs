//! The one place that switches between real atomics and loom's model of them.
//!
//! Everything that threads share goes through the names below. Under `--cfg loom` the containers that come from
//! other crates are replaced by a mutex around the plain thing: loom then explores every interleaving of *our*
//! steps, and takes the containers as correct.

pub(crate) use std::sync::Arc;

#[cfg(not(loom))]
pub(crate) use real::*;

#[cfg(loom)]
pub(crate) use modelled::*;

#[cfg(not(loom))]
mod real {
    use std::sync::Arc;
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

    pub(crate) use bytemuck::zeroed_slice_box;
    pub(crate) use once_cell::race::OnceBox as Once;

    /// A shared pointer that readers load without a lock and writers replace by compare-and-swap.
    pub(crate) struct Swap<T>(arc_swap::ArcSwap<T>);

    impl<T> Swap<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(arc_swap::ArcSwap::from_pointee(value))
        }

        pub(crate) fn load(&self) -> Arc<T> {
            self.0.load_full()
        }

        /// Replaces `old` by `new` unless somebody was faster.
        pub(crate) fn replace(&self, old: &Arc<T>, new: Arc<T>) -> bool {
            let before = self.0.compare_and_swap(old, new);
            Arc::ptr_eq(&before, old)
        }
    }

    /// A pointer that is set at most once. Losing a race to set it costs the loser its value and nothing else.
    pub(crate) struct Next<T>(Once<Arc<T>>);

    impl<T> Next<T> {
        pub(crate) fn new() -> Self {
            Self(Once::new())
        }

        pub(crate) fn get(&self) -> Option<Arc<T>> {
            self.0.get().cloned()
        }

        pub(crate) fn set(&self, value: Arc<T>) {
            // An error hands the value back: another thread's stands.
            let _ = self.0.set(Box::new(value));
        }
    }

    /// A number below `count` that spreads threads over counters.
    pub(crate) fn thread_stripe(count: usize) -> usize {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static MINE: usize = THREADS.fetch_add(1, Ordering::Relaxed));
        MINE.with(|mine| *mine) % count
    }
}

#[cfg(loom)]
mod modelled {
    use std::sync::Arc;

    use loom::sync::Mutex;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

    /// Loom's atomics cannot be made from zeroed memory.
    pub(crate) fn zeroed_slice_box<T: Zeroed>(len: usize) -> Box<[T]> {
        (0..len).map(|_| T::zeroed()).collect()
    }

    pub(crate) trait Zeroed {
        fn zeroed() -> Self;
    }

    impl Zeroed for AtomicU64 {
        fn zeroed() -> Self {
            Self::new(0)
        }
    }

    impl Zeroed for AtomicU32 {
        fn zeroed() -> Self {
            Self::new(0)
        }
    }

    /// Arenas fill theirs before a model starts its threads, so there is no race in it to explore.
    pub(crate) struct Once<T>(std::sync::OnceLock<Box<T>>);

    impl<T> Once<T> {
        pub(crate) fn new() -> Self {
            Self(std::sync::OnceLock::new())
        }

        pub(crate) fn get(&self) -> Option<&T> {
            self.0.get().map(|value| &**value)
        }

        pub(crate) fn set(&self, value: Box<T>) -> Result<(), Box<T>> {
            self.0.set(value)
        }
    }

    pub(crate) struct Swap<T>(Mutex<Arc<T>>);

    impl<T> Swap<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(Mutex::new(Arc::new(value)))
        }

        pub(crate) fn load(&self) -> Arc<T> {
            self.0.lock().unwrap().clone()
        }

        pub(crate) fn replace(&self, old: &Arc<T>, new: Arc<T>) -> bool {
            let mut held = self.0.lock().unwrap();
            let same = Arc::ptr_eq(&held, old);
            if same {
                *held = new;
            }
            same
        }
    }

    /// Modelled by an atomic flag beside the value, so that its ordering is what the real one has
    /// (acquire and release) and not the stronger order of a mutex.
    pub(crate) struct Next<T> {
        set: AtomicU32,
        value: Mutex<Option<Arc<T>>>,
    }

    impl<T> Next<T> {
        pub(crate) fn new() -> Self {
            Self { set: AtomicU32::new(0), value: Mutex::new(None) }
        }

        pub(crate) fn get(&self) -> Option<Arc<T>> {
            if self.set.load(Ordering::Acquire) == 0 {
                return None;
            }
            self.value.lock().unwrap().clone()
        }

        pub(crate) fn set(&self, value: Arc<T>) {
            let mut held = self.value.lock().unwrap();
            if held.is_none() {
                *held = Some(value);
                self.set.store(1, Ordering::Release);
            }
        }
    }

    pub(crate) fn thread_stripe(_count: usize) -> usize {
        0
    }
}

/// A step that a loom model leaves out, to show that the model would notice.
///
/// In ordinary builds [`omitted`] is a constant `false` and costs nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Following a rebuild's new level after writing into the old one.
    FollowRebuild = 1,
    /// Checking that a record still lives after its word was written.
    RecheckAfterInsert,
    /// Waiting two epochs before an id is used again.
    GracePeriod,
    /// The fence between a holder's death and the look at its neighbours.
    FenceBeforeSweep,
    /// Refusing to add a holder to a content that has ended.
    LeaveTheDead,
    /// Comparing other holders of a key before claiming a slot for it.
    LookBeforeClaim,
    /// Marking a registration complete only after its content is in the table.
    PublishLast,
    /// Refusing a strike while a registration is in flight.
    SpareInFlight,
}

#[cfg(not(loom))]
#[inline]
pub(crate) fn omitted(_: Step) -> bool {
    false
}

#[cfg(loom)]
pub(crate) use fault::omitted;

/// Chooses the step that loom models leave out.
#[cfg(loom)]
pub(crate) mod fault {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::Step;

    static OMITTED: AtomicU32 = AtomicU32::new(0);

    /// Leaves `step` out of everything that runs from here on in this process.
    #[cfg(test)]
    pub(crate) fn omit(step: Option<Step>) {
        OMITTED.store(step.map_or(0, |step| step as u32), Ordering::Relaxed);
    }

    pub(crate) fn omitted(step: Step) -> bool {
        OMITTED.load(Ordering::Relaxed) == step as u32
    }
}
