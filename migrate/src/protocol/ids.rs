//! The token of a migration.

use uuid::Uuid;

/// The token that identifies a migration. The source makes it. It cannot be guessed, and every
/// message of the hand-over carries it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Token(pub Uuid);

impl Token {
    /// Returns a new random token.
    pub(crate) fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
