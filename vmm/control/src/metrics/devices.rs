//! Metrics of a guest's devices.

use std::fmt;

use driftline_machine::config::{BackendKind, DeviceConfig};
use driftline_machine::devices::{
    BalloonStats, DeviceStats, MachineCounts, RngCounts, SerialCounts, VsockCounts,
};
use driftline_machine::vm::Vm;

use super::page::{MetricsPage, bytes, number};

/// What devices have done besides their [`DeviceStats`].
#[derive(Debug)]
pub(super) struct DeviceFigures {
    pub(super) balloon: Option<BalloonStats>,
    /// `None` if the backend does not count.
    pub(super) serial: Option<SerialCounts>,
    /// `None` if the guest has no such device.
    pub(super) entropy: Option<RngCounts>,
    /// `None` if the guest has no such device.
    pub(super) vsock: Option<VsockCounts>,
    /// By name of the device: the number of times that each of its rate limits made a queue wait.
    pub(super) throttles: Vec<(String, Vec<u64>)>,
}

impl DeviceFigures {
    pub(super) fn read(vm: &dyn Vm) -> Self {
        let MachineCounts { serial, rng, vsock, throttles } = vm.counts();
        let config = vm.machine_config();
        let devices = &config.devices;
        let has_rng = devices.iter().any(|device| matches!(device, DeviceConfig::Rng(_)));
        let has_vsock = devices.iter().any(|device| matches!(device, DeviceConfig::Vsock(_)));
        Self {
            balloon: vm.balloon().map(|balloon| balloon.stats()),
            serial: (config.backend == BackendKind::Kvm).then_some(serial),
            entropy: has_rng.then_some(rng),
            vsock: has_vsock.then_some(vsock),
            throttles,
        }
    }
}

pub(super) fn write(
    page: &mut MetricsPage<'_>,
    devices: &[DeviceStats],
    figures: &DeviceFigures,
) -> fmt::Result {
    write_disks(page, devices)?;
    write_interfaces(page, devices)?;
    write_vsock(page, figures.vsock)?;
    write_serial(page, figures.serial)?;
    write_entropy(page, figures.entropy)?;
    write_balloon(page, figures.balloon)?;
    let waits = figures
        .throttles
        .iter()
        .map(|(device, waits)| ([("device", device.as_str())], waits.iter().sum::<u64>()));
    page.counters(
        number("driftline_rate_limit_waits", "How often a rate limit made a queue wait."),
        waits,
    )
}

fn write_disks(page: &mut MetricsPage<'_>, devices: &[DeviceStats]) -> fmt::Result {
    let (mut requests, mut moved) = (Vec::new(), Vec::new());
    let (mut failed, mut stalled) = (Vec::new(), Vec::new());
    for device in devices {
        let DeviceStats::Disk {
            id,
            reads,
            read_bytes,
            writes,
            written_bytes,
            flushes,
            errors,
            stalls,
        } = device
        else {
            continue;
        };
        let labels = |operation| [("device", id.as_str()), ("operation", operation)];
        requests.extend([
            (labels("read"), *reads),
            (labels("write"), *writes),
            (labels("flush"), *flushes),
        ]);
        moved.extend([(labels("read"), *read_bytes), (labels("write"), *written_bytes)]);
        failed.push(([("device", id.as_str())], *errors));
        stalled.push(([("device", id.as_str())], *stalls));
    }
    page.counters(number("driftline_disk_requests", "Requests to a disk."), requests)?;
    page.counters(bytes("driftline_disk", "Bytes of the requests to a disk."), moved)?;
    page.counters(
        number("driftline_disk_errors", "Requests that the disk's file failed."),
        failed,
    )?;
    page.counters(
        number("driftline_disk_stalls", "How often a queue waited for requests under way."),
        stalled,
    )
}

fn write_interfaces(page: &mut MetricsPage<'_>, devices: &[DeviceStats]) -> fmt::Result {
    let (mut packets, mut moved) = (Vec::new(), Vec::new());
    let (mut lost, mut stalled) = (Vec::new(), Vec::new());
    for device in devices {
        let DeviceStats::Net {
            id,
            received_frames,
            received_bytes,
            sent_frames,
            sent_bytes,
            lost_frames,
            stalls,
        } = device
        else {
            continue;
        };
        let labels = |direction| [("device", id.as_str()), ("direction", direction)];
        packets.extend([(labels("receive"), *received_frames), (labels("send"), *sent_frames)]);
        moved.extend([(labels("receive"), *received_bytes), (labels("send"), *sent_bytes)]);
        lost.push(([("device", id.as_str())], *lost_frames));
        stalled.push(([("device", id.as_str())], *stalls));
    }
    page.counters(number("driftline_net_packets", "Packets of an interface."), packets)?;
    page.counters(bytes("driftline_net", "Bytes of those packets."), moved)?;
    page.counters(
        number("driftline_net_lost_packets", "Packets that neither the guest nor the tap took."),
        lost,
    )?;
    page.counters(
        number("driftline_net_stalls", "How often a packet waited for a buffer of the guest."),
        stalled,
    )
}

fn write_balloon(page: &mut MetricsPage<'_>, balloon: Option<BalloonStats>) -> fmt::Result {
    page.gauge(
        bytes("driftline_balloon_target", "Size of the balloon that the operator wants."),
        balloon.map(|b| b.target_bytes),
    )?;
    page.gauge(
        bytes("driftline_balloon_actual", "Size of the balloon that the guest reports."),
        balloon.map(|b| b.actual_bytes),
    )?;
    page.counter(
        bytes("driftline_balloon_discarded", "Memory given back to the host."),
        balloon.map(|b| b.discarded_bytes),
    )
}

fn write_vsock(page: &mut MetricsPage<'_>, vsock: Option<VsockCounts>) -> fmt::Result {
    let Some(vsock) = vsock else { return Ok(()) };
    let both =
        |receive, send| [([("direction", "receive")], receive), ([("direction", "send")], send)];
    page.counters(
        number("driftline_vsock_packets", "Packets of the vsock."),
        both(vsock.given_packets, vsock.taken_packets),
    )?;
    page.counters(
        bytes("driftline_vsock", "Bytes of data in those packets."),
        both(vsock.given_bytes, vsock.taken_bytes),
    )?;
    page.counter(
        number("driftline_vsock_connections", "Connections that have begun."),
        Some(vsock.connections_begun),
    )?;
    page.gauge(
        number("driftline_vsock_open_connections", "Connections that have not ended."),
        Some(vsock.connections_begun.saturating_sub(vsock.connections_ended)),
    )
}

fn write_serial(page: &mut MetricsPage<'_>, serial: Option<SerialCounts>) -> fmt::Result {
    let Some(serial) = serial else { return Ok(()) };
    page.counters(
        bytes("driftline_serial", "Bytes of the serial port."),
        [
            ([("direction", "receive")], serial.read_bytes),
            ([("direction", "send")], serial.written_bytes),
        ],
    )?;
    page.counter(
        bytes("driftline_serial_limited", "Bytes that the rate limit of the output discarded."),
        Some(serial.limited_bytes),
    )?;
    page.counter(
        bytes("driftline_serial_lost", "Bytes that the destination of the output did not take."),
        Some(serial.lost_bytes),
    )
}

fn write_entropy(page: &mut MetricsPage<'_>, entropy: Option<RngCounts>) -> fmt::Result {
    page.counter(
        number("driftline_entropy_requests", "Requests for random bytes."),
        entropy.map(|entropy| entropy.requests),
    )?;
    page.counter(
        bytes("driftline_entropy", "Random bytes given to the guest."),
        entropy.map(|entropy| entropy.bytes),
    )?;
    page.counter(
        number("driftline_entropy_errors", "Requests for which the host had no randomness."),
        entropy.map(|entropy| entropy.failures),
    )
}
