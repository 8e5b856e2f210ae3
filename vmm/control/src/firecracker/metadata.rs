//! The metadata that `/mmds` sets and shows.

use serde_json::{Map, Value};

use super::fault::ApiFault;

/// The metadata and its limit.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct MetadataStore {
    /// `None` until it is set for the first time.
    value: Option<Value>,
    /// Longest JSON, in bytes.
    limit: usize,
}

impl MetadataStore {
    pub(crate) fn new(limit: usize) -> Self {
        Self { value: None, limit }
    }

    /// Returns whether there is any.
    pub(crate) fn is_set(&self) -> bool {
        self.value.is_some()
    }

    /// Returns what `GET /mmds` shows.
    pub(crate) fn shown(&self) -> Value {
        match &self.value {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(value) => value.clone(),
        }
    }

    /// Replaces the metadata.
    ///
    /// # Errors
    ///
    /// The metadata is too long.
    pub(crate) fn put(&mut self, value: Value) -> Result<(), ApiFault> {
        if serde_json::to_vec(&value)?.len() > self.limit {
            return Err(ApiFault::MetadataLimit);
        }
        self.value = Some(value);
        Ok(())
    }

    /// Merges a patch into the metadata (RFC 7396).
    ///
    /// # Errors
    ///
    /// The metadata was never set, or becomes too long.
    pub(crate) fn patch(&mut self, patch: &Value) -> Result<(), ApiFault> {
        let mut value = self.value.clone().ok_or(ApiFault::NoMetadata)?;
        merge(&mut value, patch);
        self.put(value)
    }
}

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
        let mut store = MetadataStore::new(1000);
        store.put(json!({ "a": { "b": 1, "c": 2 }, "d": [1, 2] })).unwrap();
        store.patch(&json!({ "a": { "b": null, "e": { "f": null } }, "d": "x" })).unwrap();
        assert_eq!(store.shown(), json!({ "a": { "c": 2, "e": {} }, "d": "x" }));
    }

    #[test]
    fn refused_change_leaves_metadata_as_it_was() {
        let mut store = MetadataStore::new(9);
        assert!(matches!(store.patch(&json!({})), Err(ApiFault::NoMetadata)));
        store.put(json!({ "a": 12 })).unwrap();
        assert!(matches!(store.put(json!({ "a": 1234 })), Err(ApiFault::MetadataLimit)));
        assert!(matches!(store.patch(&json!({ "b": 3 })), Err(ApiFault::MetadataLimit)));
        assert_eq!(store.shown(), json!({ "a": 12 }));
    }

    #[test]
    fn null_metadata_is_shown_as_an_object() {
        let mut store = MetadataStore::new(100);
        assert_eq!(store.shown(), json!({}));
        store.put(Value::Null).unwrap();
        assert_eq!(store.shown(), json!({}));
        store.patch(&json!({ "a": 1 })).unwrap();
        assert_eq!(store.shown(), json!({ "a": 1 }));
    }
}
