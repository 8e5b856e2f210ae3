//! The name of a migration.

use uuid::Uuid;

/// The name of a migration. The source makes it; it cannot be guessed, and is in every message that
/// decides something.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Token(pub Uuid);

impl Token {
    /// Makes a new token.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
