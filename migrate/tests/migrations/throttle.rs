//! Guests that outrun the link are throttled during pre-copy, and never after it.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{HostPair, LONG, Sender, exactly_one_runs, quick_send, within};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, Op};
use driftline_guest::{Lifecycle, RunState, WriteThrottle};
use driftline_migrate::{MIN_BANDWIDTH, SendControl, SendOptions, send};

/// Starts a guest whose two threads write 2 MiB as fast as they can.
fn fast_writer(hosts: &HostPair) -> Arc<MemoryGuest> {
    hosts.start(MemoryConfig { writes_per_s: 0, ..MemoryConfig::small() })
}

/// Returns options by which 2 MiB take a quarter of a second, and 40 frames fit into the pause.
fn slow_send(hosts: &HostPair) -> SendOptions {
    SendOptions {
        max_bandwidth: Some(8 * MIN_BANDWIDTH),
        downtime: Duration::from_millis(20),
        ..quick_send(hosts)
    }
}

#[test]
fn fast_writer_converges_when_throttled() {
    let hosts = HostPair::new();
    let guest = fast_writer(&hosts);
    let there = hosts.receiver();
    let forbidden = SendOptions { throttle: false, max_passes: 5, ..slow_send(&hosts) };
    let error = send(&*guest, &there.to, &forbidden, &SendControl::new()).unwrap_err().to_string();
    assert!(error.contains("outruns the link"), "{error}");
    assert!(error.contains("its vCPUs were not throttled (--no-throttle)"), "{error}");
    let throttled = || guest.vcpu_writes().iter().map(|v| v.throttled).sum::<Duration>();
    assert_eq!((guest.run_state(), throttled()), (RunState::Running, Duration::ZERO));
    there.failure();

    let there = hosts.receiver();
    let sent = Sender::start(&guest, &there.to, &slow_send(&hosts)).result();
    let report = sent.as_ref().unwrap();
    // A short pass may see no writes at all, because both vCPUs are stopped during it.
    let fits = ["within the downtime target", "wrote nothing"];
    assert!(fits.iter().any(|fits| report.converged.contains(fits)), "{report:?}");
    assert_eq!(report.throttle.len(), 2, "{report:?}");
    for vcpu in &report.throttle {
        assert!(vcpu.throttled_ms > 0.0 && vcpu.throttled_percent > 0.0, "{report:?}");
        assert!(vcpu.most_bytes_per_s.is_some_and(|most| most < 8 * MIN_BANDWIDTH), "{report:?}");
    }
    assert_eq!(guest.throttled(), None);
    exactly_one_runs(&hosts, &guest, &sent, there, "throttled");
}

#[test]
fn converging_guest_is_not_throttled() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig { writes_per_s: 200, ..MemoryConfig::small() });
    let there = hosts.receiver();
    let sent = Sender::start(&guest, &there.to, &slow_send(&hosts)).result();
    let report = sent.as_ref().unwrap();
    assert_eq!(report.throttle.len(), 2, "{report:?}");
    assert!(report.throttle.iter().all(|v| v.throttled_ms == 0.0), "{report:?}");
    exactly_one_runs(&hosts, &guest, &sent, there, "not throttled");
}

#[test]
fn every_end_of_a_migration_ends_the_throttle() {
    let ends = ["cancelled here", "cancelled there", "it cannot be paused", "it cannot be saved"];
    for ends in ends {
        let hosts = HostPair::new();
        let guest = fast_writer(&hosts);
        let there = hosts.receiver();
        let sender = Sender::start(&guest, &there.to, &slow_send(&hosts));
        within(LONG, "a throttle", || guest.throttled().is_some());
        match ends {
            "cancelled here" => sender.control.cancel().unwrap(),
            "cancelled there" => there.control.cancel().unwrap(),
            "it cannot be paused" => hosts.here.fail_next(Op::Pause, 1),
            _ => hosts.here.fail_next(Op::Save, 1),
        }
        let error = sender.result().unwrap_err();
        assert_eq!(guest.throttled(), None, "{ends}: {error}");
        assert_eq!(guest.run_state(), RunState::Running, "{ends}: {error}");
        let before = guest.writes();
        within(LONG, "more writes", || guest.writes() > before + 5000);
    }
}
