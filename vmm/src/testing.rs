//! For tests that need this host's KVM: a guard that skips them loudly where there is none.

use std::fs::OpenOptions;
use std::io::Write;

use kvm_ioctls::Kvm;

use crate::kvm::Capabilities;

/// Names a file to which each skipped test adds a line, for whoever counts them.
pub const SKIP_LOG: &str = "DRIFTLINE_SKIP_LOG";

/// Whether machines can be built here. If not, says on standard error, and in the file that
/// [`SKIP_LOG`] names, that `test` is skipped and why.
///
/// ```
/// if !vmm::testing::kvm_or_skip("a test of something") {
///     return;
/// }
/// ```
pub fn kvm_or_skip(test: &str) -> bool {
    let Some(why) = why_no_kvm() else { return true };
    let line = format!("SKIPPED: {test}: needs /dev/kvm: {why}");
    // Past the test harness, which would keep it to itself: the point is that it is seen.
    let _ = writeln!(std::io::stderr(), "{line}");
    if let Some(path) = std::env::var_os(SKIP_LOG) {
        let log = OpenOptions::new().create(true).append(true).open(path);
        if let Err(e) = log.and_then(|mut f| writeln!(f, "{line}")) {
            let _ = writeln!(std::io::stderr(), "the skip log cannot be written: {e}");
        }
    }
    false
}

fn why_no_kvm() -> Option<String> {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(e) => return Some(e.to_string()),
    };
    let capabilities = Capabilities::probe(&kvm);
    let missing = capabilities.missing().next()?;
    Some(format!("KVM_CAP_{} is missing", missing.name))
}
