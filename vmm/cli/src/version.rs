//! Owns the program's version.

/// Returns the version, with the commit if `DRIFTLINE_COMMIT` named it at build time.
pub(crate) fn version() -> &'static str {
    const PLAIN: &str = env!("CARGO_PKG_VERSION");
    static FULL: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    match option_env!("DRIFTLINE_COMMIT") {
        Some(commit) if !commit.is_empty() => FULL.get_or_init(|| format!("{PLAIN} ({commit})")),
        _ => PLAIN,
    }
}
