//! Limits how many lines a guest can cause: a device or a vCPU may log each of its accesses.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::Metadata;
use tracing::callsite::Identifier;

/// Largest number of lines of one call site in one [`INTERVAL`]. Both values are Firecracker's,
/// whose users size their logs by them.
const MOST: u32 = 10;
/// See [`MOST`].
const INTERVAL: Duration = Duration::from_secs(5);

/// The modules whose lines a guest can cause.
const LIMITED: [&str; 2] = ["driftline_machine::devices", "driftline_machine::vcpu"];

/// Limits the lines of each call site of [`LIMITED`].
#[derive(Default)]
pub(super) struct CallSiteLimits {
    /// The call sites that have logged: at most all of the program.
    sites: Mutex<HashMap<Identifier, CallSite>>,
    /// Number of lines that were not logged.
    suppressed: AtomicU64,
}

/// What a call site has logged in the interval that began with its first line.
struct CallSite {
    begun: Instant,
    lines: u32,
    /// Number of lines that were not logged since the last line that was.
    suppressed: u64,
}

/// What becomes of a line.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum LineAdmission {
    /// It is logged, after the report that this number of earlier ones were not.
    Logged { suppressed: u64 },
    /// It is not logged.
    Suppressed,
}

impl CallSiteLimits {
    /// Decides about a line, and counts it.
    pub(super) fn admit(&self, metadata: &Metadata<'_>, now: Instant) -> LineAdmission {
        if !is_limited(metadata.target()) {
            return LineAdmission::Logged { suppressed: 0 };
        }
        let mut sites = self.sites.lock();
        let site = sites.entry(metadata.callsite()).or_insert(CallSite {
            begun: now,
            lines: 0,
            suppressed: 0,
        });
        if now.saturating_duration_since(site.begun) >= INTERVAL {
            (site.begun, site.lines) = (now, 0);
        }
        if site.lines == MOST {
            site.suppressed += 1;
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            return LineAdmission::Suppressed;
        }
        site.lines += 1;
        LineAdmission::Logged { suppressed: std::mem::take(&mut site.suppressed) }
    }

    /// Returns the number of lines that were not logged so far.
    pub(super) fn suppressed(&self) -> u64 {
        self.suppressed.load(Ordering::Relaxed)
    }
}

fn is_limited(target: &str) -> bool {
    LIMITED.iter().any(|module| {
        let below = target.strip_prefix(module);
        below.is_some_and(|below| below.is_empty() || below.starts_with("::"))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use tracing::{Event, Subscriber};
    use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

    use super::*;

    /// The metadata of the events of a device.
    static DEVICE: OnceLock<&'static Metadata<'static>> = OnceLock::new();

    struct KeepMetadata;

    impl<S: Subscriber> Layer<S> for KeepMetadata {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            DEVICE.set(event.metadata()).unwrap();
        }
    }

    #[test]
    fn next_interval_reports_what_was_suppressed() {
        let subscriber = tracing_subscriber::registry().with(KeepMetadata);
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!(target: "driftline_machine::devices", "a");
        });
        let (limits, begun) = (CallSiteLimits::default(), Instant::now());
        let admit =
            |after_ms| limits.admit(DEVICE.get().unwrap(), begun + Duration::from_millis(after_ms));
        for _ in 0..10 {
            assert_eq!(admit(0), LineAdmission::Logged { suppressed: 0 });
        }
        assert_eq!(admit(1), LineAdmission::Suppressed);
        assert_eq!(admit(4999), LineAdmission::Suppressed);
        assert_eq!(limits.suppressed(), 2);
        assert_eq!(admit(5000), LineAdmission::Logged { suppressed: 2 });
        assert_eq!(admit(5000), LineAdmission::Logged { suppressed: 0 });
        assert_eq!(limits.suppressed(), 2);
    }

    #[test]
    fn modules_of_devices_and_vcpus_are_limited() {
        for (target, limited) in [
            ("driftline_machine::devices", true),
            ("driftline_machine::devices::virtio::mmio", true),
            ("driftline_machine::vcpu", true),
            ("driftline_machine::vcpus", false),
            ("driftline_machine::memory", false),
            ("driftline_control::api", false),
        ] {
            assert_eq!(is_limited(target), limited, "{target}");
        }
    }
}
