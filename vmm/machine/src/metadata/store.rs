//! The store that the operator's requests write and the guest's requests read.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Map, Value};

use super::counters::{MetadataCounters, MetadataCounts};
use super::token::{LIFETIMES_S, TokenIssuer};

/// Longest metadata of a store whose owner sets no limit, in bytes. Firecracker's default.
const DEFAULT_LIMIT: usize = 51_200;

/// Why the metadata does not change.
#[derive(Debug, thiserror::Error)]
pub enum MetadataError {
    /// It was never set, so there is nothing to patch.
    #[error("the guest's metadata was never set")]
    Unset,
    /// Its JSON would exceed the limit.
    #[error("the guest's metadata would have {bytes} bytes, more than {limit}")]
    TooLong {
        /// Bytes of the JSON.
        bytes: usize,
        /// Most bytes that the store takes.
        limit: usize,
    },
    /// It cannot be written as JSON.
    #[error("the guest's metadata cannot be written as JSON: {0}")]
    Encode(#[from] serde_json::Error),
}

/// Why no session begins.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenError {
    /// The lifetime is out of bounds.
    #[error(
        "Invalid time to live value provided for token: {0}. Please provide a value between {min} \
         and {max}.",
        min = LIFETIMES_S.start(),
        max = LIFETIMES_S.end()
    )]
    Lifetime(u32),
    /// The host has no randomness.
    #[error("Failed to generate a key")]
    Key(#[source] io::Error),
}

/// The metadata of one guest. Clones share it.
#[derive(Clone)]
pub struct MetadataStore(Arc<StoredMetadata>);

struct StoredMetadata {
    /// `None` until it is set for the first time.
    value: Mutex<Option<Value>>,
    /// Longest JSON, in bytes.
    limit: usize,
    issuer: Mutex<TokenIssuer>,
    counters: MetadataCounters,
    /// Origin of the times of connections and tokens.
    start: Instant,
}

impl MetadataStore {
    /// Creates an empty store that takes JSON of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(StoredMetadata {
            value: Mutex::default(),
            limit,
            issuer: Mutex::default(),
            counters: MetadataCounters::default(),
            start: Instant::now(),
        }))
    }

    /// Returns the metadata; an empty object if there is none.
    pub fn shown(&self) -> Value {
        match &*self.0.value.lock() {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(value) => value.clone(),
        }
    }

    /// Replaces the metadata.
    ///
    /// # Errors
    ///
    /// The metadata is too long.
    pub fn put(&self, value: Value) -> Result<(), MetadataError> {
        self.check(&value)?;
        *self.0.value.lock() = Some(value);
        Ok(())
    }

    /// Merges a patch into the metadata (RFC 7396). The guest sees either all of it or nothing.
    ///
    /// # Errors
    ///
    /// The metadata was never set, or becomes too long.
    pub fn patch(&self, patch: &Value) -> Result<(), MetadataError> {
        let mut current = self.0.value.lock();
        let mut value = current.clone().ok_or(MetadataError::Unset)?;
        merge(&mut value, patch);
        self.check(&value)?;
        *current = Some(value);
        Ok(())
    }

    fn check(&self, value: &Value) -> Result<(), MetadataError> {
        let (bytes, limit) = (serde_json::to_vec(value)?.len(), self.0.limit);
        match bytes <= limit {
            true => Ok(()),
            false => Err(MetadataError::TooLong { bytes, limit }),
        }
    }

    /// Returns what was counted.
    pub fn counts(&self) -> MetadataCounts {
        self.0.counters.read()
    }

    pub(crate) fn counters(&self) -> &MetadataCounters {
        &self.0.counters
    }

    /// Returns the time that connections and tokens count in.
    pub(crate) fn now(&self) -> Duration {
        self.0.start.elapsed()
    }

    /// Returns what `read` makes of the value at a JSON pointer, if there is one. The metadata does
    /// not change meanwhile.
    pub(crate) fn at<T>(&self, pointer: &str, read: impl FnOnce(&Value) -> T) -> Option<T> {
        let value = self.0.value.lock();
        value.as_ref().unwrap_or(&Value::Null).pointer(pointer).map(read)
    }

    /// Begins a session of this many seconds. Returns its token.
    pub(crate) fn begin_session(
        &self,
        lifetime_s: u32,
        now: Duration,
    ) -> Result<String, TokenError> {
        if !LIFETIMES_S.contains(&lifetime_s) {
            return Err(TokenError::Lifetime(lifetime_s));
        }
        let lifetime = Duration::from_secs(lifetime_s.into());
        self.0.issuer.lock().issue(lifetime, now).map_err(TokenError::Key)
    }

    /// Returns whether `token` is that of a session.
    pub(crate) fn is_valid(&self, token: &str, now: Duration) -> bool {
        self.0.issuer.lock().is_valid(token, now)
    }
}

impl Default for MetadataStore {
    fn default() -> Self {
        Self::new(DEFAULT_LIMIT)
    }
}

/// Without the metadata, which may be secret.
impl fmt::Debug for MetadataStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetadataStore").field("limit", &self.0.limit).finish_non_exhaustive()
    }
}

/// Compares the metadata and the limits.
impl PartialEq for MetadataStore {
    fn eq(&self, other: &Self) -> bool {
        if Arc::ptr_eq(&self.0, &other.0) {
            return true;
        }
        let value = self.0.value.lock().clone();
        self.0.limit == other.0.limit && value == *other.0.value.lock()
    }
}

impl Eq for MetadataStore {}

/// Merges `patch` into `target`: null removes, objects are merged, anything else replaces. The
/// parser bounds the depth.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(fields) = target else { return };
    for (name, value) in patch {
        match value {
            Value::Null => _ = fields.remove(name),
            value => merge(fields.entry(name.as_str()).or_insert(Value::Null), value),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patch_merges_replaces_and_removes() {
        let store = MetadataStore::new(1000);
        store.put(json!({ "a": { "b": 1, "c": 2 }, "d": [1, 2] })).unwrap();
        store.patch(&json!({ "a": { "b": null, "e": { "f": null } }, "d": "x" })).unwrap();
        assert_eq!(store.shown(), json!({ "a": { "c": 2, "e": {} }, "d": "x" }));
    }

    #[test]
    fn refused_change_leaves_metadata_as_it_was() {
        let store = MetadataStore::new(9);
        assert!(matches!(store.patch(&json!({})), Err(MetadataError::Unset)));
        store.put(json!({ "a": 12 })).unwrap();
        let too_long = MetadataError::TooLong { bytes: 10, limit: 9 }.to_string();
        assert_eq!(store.put(json!({ "a": 1234 })).unwrap_err().to_string(), too_long);
        assert!(matches!(store.patch(&json!({ "b": 3 })), Err(MetadataError::TooLong { .. })));
        assert_eq!(store.shown(), json!({ "a": 12 }));
    }

    #[test]
    fn null_metadata_is_shown_as_an_object() {
        let store = MetadataStore::new(100);
        assert_eq!(store.shown(), json!({}));
        store.put(Value::Null).unwrap();
        assert_eq!(store.shown(), json!({}));
        store.patch(&json!({ "a": 1 })).unwrap();
        assert_eq!(store.shown(), json!({ "a": 1 }));
    }

    #[test]
    fn clones_share_what_is_stored() {
        let store = MetadataStore::default();
        let other = store.clone();
        store.put(json!({ "a": { "b": 7 } })).unwrap();
        assert_eq!(other.at("/a/b", Value::clone), Some(json!(7)));
        assert_eq!(other.at("/a/c", Value::clone), None);
        assert!(other == store && other != MetadataStore::default());
        assert!(!format!("{store:?}").contains('7'));
    }
}
