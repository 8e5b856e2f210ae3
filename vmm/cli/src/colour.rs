//! Whether the user wants colours, from the environment (<https://no-color.org>).

use std::env;

/// Returns whether `NO_COLOR` is set, and is not empty.
pub(super) fn is_refused() -> bool {
    env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}
