//! Owns the program's version.

/// Returns the version, with the commit if the build was told it in `DRIFTLINE_COMMIT`.
pub(crate) fn version() -> &'static str {
    const PLAIN: &str = env!("CARGO_PKG_VERSION");
    static FULL: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    match option_env!("DRIFTLINE_COMMIT") {
        Some(commit) if !commit.is_empty() => FULL.get_or_init(|| format!("{PLAIN} ({commit})")),
        _ => PLAIN,
    }
}
