//! Rows and a report for tests. The report's figures grow as expected, and one row has none.

use super::answer;
use super::host::HostDescription;
use super::matrix::{GuestKind, LIGHT, MatrixCell, default_cells};
use super::report::{CellReport, ComparisonReport, RowFigures};
use super::settings::CompareSettings;
use super::stats::RunSpread;
use super::way::TrackingWay;

/// Returns the way of this name.
pub(super) fn way(name: &str) -> TrackingWay {
    name.parse().unwrap()
}

/// Returns a row of the light guest with these epochs, without a missed page.
pub(super) fn row(way: TrackingWay, mem_bytes: u64, epoch_us: [f64; 3]) -> CellReport {
    CellReport {
        way,
        source: way.source().to_string(),
        sink: way.sink(),
        guest: GuestKind::Payload(LIGHT.to_owned()),
        mem_bytes,
        figures: Some(RowFigures {
            epoch_us: RunSpread::of(epoch_us),
            dirty_frames: RunSpread::of([100.0]),
            missed_frames: Some(0),
            strict_checks: Some(3),
            written_frames: Some(10),
            ..RowFigures::default()
        }),
        why: None,
    }
}

/// Returns invented figures of `cell`, whose way is this one of the matrix.
fn invented(cell: MatrixCell, place: f64) -> CellReport {
    let gib = (cell.mem_bytes >> 30) as f64;
    let frames = match cell.guest.spec() {
        name if name.contains("max") => 24_000.0,
        name if name.contains("320M") => 820.0,
        _ => 102.0,
    };
    let around = |v: f64| RunSpread::of([v * 0.8, v, v * 1.3]);
    let epoch = match cell.way.to_string().contains("bitmap") {
        true => 50.0 * gib + frames / 20.0,
        false => 4.0 + frames / 25.0 + place,
    };
    let tracks = cell.way.tracks();
    let lacks = cell.way.to_string() == "dirty-ring+list" && frames < 200.0;
    let figures = RowFigures {
        writes_per_s: around(frames * 100.0),
        slow_down_percent: around(frames / 1500.0 * (place + 1.0)).filter(|_| tracks),
        dirty_frames: around(frames).filter(|_| tracks),
        epoch_us: around(epoch).filter(|_| tracks),
        pause_us: around(epoch + 80.0),
        pauses_us: (0..40).map(|n| epoch + 60.0 + f64::from(n * n) / 10.0).collect(),
        written_frames: Some(10_000),
        missed_frames: tracks.then_some(0),
        strict_checks: tracks.then_some(40),
        extra_frames: tracks.then_some(3),
        tracking_bytes: tracks.then_some(1 << 20),
        ..RowFigures::default()
    };
    CellReport {
        way: cell.way,
        source: cell.way.source().to_string(),
        sink: cell.way.sink(),
        guest: cell.guest,
        mem_bytes: cell.mem_bytes,
        figures: (!lacks).then_some(figures),
        why: lacks.then(|| "this host's KVM has no <dirty rings> & more".to_owned()),
    }
}

/// Returns a report of the default matrix.
pub(super) fn report() -> ComparisonReport {
    let ways: Vec<TrackingWay> = TrackingWay::usual().collect();
    let row = |cell: MatrixCell| {
        let place = ways.iter().position(|way| *way == cell.way).unwrap_or(0);
        invented(cell, place as f64)
    };
    let cells: Vec<CellReport> = default_cells(&ways).into_iter().map(row).collect();
    ComparisonReport {
        version: "0.0.0".to_owned(),
        date: "2026-11-23 02:29".to_owned(),
        host: HostDescription {
            processor: "<i>a host</i> & its KVM".to_owned(),
            ..HostDescription::describe()
        },
        settings: CompareSettings {
            interval: std::time::Duration::from_millis(10),
            duration: std::time::Duration::from_secs(2),
            repeat: 5,
            vcpus: 1,
            ring_entries: 16_384,
            boot_time: std::time::Duration::ZERO,
        },
        command: Some("driftline compare --html <page>".to_owned()),
        answer: answer::answer(&cells),
        cells,
    }
}
