//! The atomics, fences and locks of this crate, in one place, so that model checkers can run the
//! real code: `--cfg driftline_shuttle` or `--cfg driftline_loom` (see `tests/model/main.rs`).

use std::ops::DerefMut;

#[cfg(driftline_loom)]
mod imp {
    pub(crate) use loom::sync::Mutex as BriefMutex;
    pub(crate) use loom::sync::atomic::{
        AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use loom::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub(crate) use std::sync::{Arc, PoisonError, TryLockError};
}

#[cfg(driftline_shuttle)]
mod imp {
    pub(crate) use shuttle::sync::Mutex as BriefMutex;
    pub(crate) use shuttle::sync::atomic::{
        AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use shuttle::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub(crate) use std::sync::{Arc, PoisonError, TryLockError};
}

#[cfg(not(any(driftline_loom, driftline_shuttle)))]
mod imp {
    pub(crate) use std::sync::atomic::{
        AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use std::sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        TryLockError,
    };

    /// A lock that is held for about a microsecond. Only a change of the subscribers or of the
    /// layout holds it longer. Releasing it is a plain store, half the cost of a [`Mutex`]. A
    /// thread that waits for it yields its processor. Model checkers see a [`Mutex`].
    pub(crate) type BriefMutex<T> = spin::mutex::SpinMutex<T, spin::Yield>;
}

pub(crate) use imp::*;

/// Locks `m`; poison as in [`lock`].
pub(crate) fn lock_brief<T>(m: &BriefMutex<T>) -> impl DerefMut<Target = T> + '_ {
    #[cfg(not(any(driftline_loom, driftline_shuttle)))]
    {
        m.lock()
    }
    #[cfg(any(driftline_loom, driftline_shuttle))]
    {
        lock(m)
    }
}

/// Locks `m` if it is free; poison as in [`lock`].
#[inline]
pub(crate) fn try_lock_brief<T>(m: &BriefMutex<T>) -> Option<impl DerefMut<Target = T> + '_> {
    #[cfg(not(any(driftline_loom, driftline_shuttle)))]
    {
        m.try_lock()
    }
    #[cfg(any(driftline_loom, driftline_shuttle))]
    {
        try_lock(m)
    }
}

/// Locks `m`. No code of this crate panics while it holds a lock, so the data of a poisoned lock is
/// consistent.
pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `m` if it is free; poison as in [`lock`].
pub(crate) fn try_lock<T>(m: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match m.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Returns the content of an exclusively borrowed mutex.
pub(crate) fn get_mut<T>(m: &mut Mutex<T>) -> &mut T {
    m.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `l` for reading; poison as in [`lock`].
pub(crate) fn read<T>(l: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    l.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `l` for writing; poison as in [`lock`].
pub(crate) fn write<T>(l: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    l.write().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates `len` zeroed words; `None` if there is no memory for them. The system provides zeroed
/// memory, so words that are never accessed are never backed.
pub(crate) fn zeroed_words(len: usize) -> Option<Vec<AtomicU64>> {
    #[cfg(not(any(driftline_loom, driftline_shuttle)))]
    {
        use zerocopy::FromZeros;
        AtomicU64::new_vec_zeroed(len).ok()
    }
    #[cfg(any(driftline_loom, driftline_shuttle))]
    {
        Some((0..len).map(|_| AtomicU64::new(0)).collect())
    }
}

/// Sets bits of an exclusively borrowed word and returns its previous value.
#[inline]
pub(crate) fn or_mut(word: &mut AtomicU64, mask: u64) -> u64 {
    #[cfg(not(any(driftline_loom, driftline_shuttle)))]
    {
        let word = word.get_mut();
        std::mem::replace(word, *word | mask)
    }
    #[cfg(any(driftline_loom, driftline_shuttle))]
    {
        word.fetch_or(mask, Ordering::SeqCst)
    }
}

/// Takes an exclusively borrowed word and leaves zero.
#[inline]
pub(crate) fn take_mut(word: &mut AtomicU64) -> u64 {
    #[cfg(not(any(driftline_loom, driftline_shuttle)))]
    {
        std::mem::take(word.get_mut())
    }
    #[cfg(any(driftline_loom, driftline_shuttle))]
    {
        word.swap(0, Ordering::SeqCst)
    }
}
