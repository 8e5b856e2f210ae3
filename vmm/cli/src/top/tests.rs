//! Tests what `screen` draws for which page, on terminals of several sizes.

use std::time::Duration;

use driftline_control::api::ClientError;
use driftline_control::model::{
    ArrivingInfo, CheckpointSummary, EpochLine, EpochOutcome, GuestLocation, GuestState, Info,
    MemoryRange, MigrationFailure, MigrationPage, MigrationState, VcpuWindow, WatchPage,
};
use driftline_dirty_tracker::TrackerStats;
use driftline_machine::config::BackendKind;
use driftline_machine::tracking::TrackingMode;
use driftline_machine::vm::{EndReason, VcpuInfo};
use driftline_migrate::{Phase, Progress, VcpuThrottle};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;

use super::feed::Update;
use super::heat::{HeatCells, Palette};
use super::screen::Screen;
use super::view::TopView;
use super::{closing_message, terminal, text_of};

/// A guest of 1 GiB whose bins have 64 frames, with these figures for each vCPU. In half a second
/// it wrote all frames from 256 to 272 MiB, and four frames in the last bin.
fn page(vcpu: Vec<VcpuWindow>) -> WatchPage {
    let mut bin_frames = vec![0; 4096];
    bin_frames[1024..1088].fill(64);
    bin_frames[4095] = 4;
    let frames = bin_frames.iter().sum();
    let infos = vec![VcpuInfo { ring_full_exits: 7, ..VcpuInfo::default() }; vcpu.len()];
    WatchPage {
        watch: 1,
        info: Info {
            state: GuestState::Running,
            vm_id: serde_json::from_str("\"7a0c1e5c-3f51-4fd2-8d1b-0a9d6f0c2b11\"").unwrap(),
            name: None,
            lineage: None,
            vcpus: vcpu.len() as u8,
            mem_bytes: 1 << 30,
            tracking: TrackingMode::DirtyRing,
            backend: BackendKind::Kvm,
            uptime_ms: 3_725_000,
            checkpointing: false,
            migration: None,
            ring_overruns: 0,
            vcpu: infos,
            dirty: TrackerStats { subscribers: 1, ..TrackerStats::default() },
            devices: Vec::new(),
            store: None,
            every_ms: None,
            pid: 4711,
            version: "0.1.0".to_owned(),
        },
        end: None,
        moved_to: None,
        window_ms: 500.0,
        frames,
        dirty_rate_bytes_per_s: frames * 4096 * 2,
        memory: vec![MemoryRange { gpa: 0, bytes: 1 << 30 }],
        bin_bytes: 64 * 4096,
        bin_frames,
        vcpu,
        ring_entries: Some(65_536),
        migration: None,
        checkpoints: None,
    }
}

fn vcpu(dirtied: u64) -> VcpuWindow {
    VcpuWindow {
        dirtied_frames: Some(dirtied),
        exits: 50,
        ring_full_exits: 0,
        ring_peak_entries: Some(16_384),
        throttled_ms: 0,
    }
}

fn view(page: WatchPage) -> TopView {
    let mut view = TopView::new(Duration::from_secs(1), Palette::Signs);
    view.take(Update::Page(Box::new(page)));
    view
}

/// Returns the screen of a terminal of this size.
fn drawn(view: &TopView, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| frame.render_widget(Screen { view, keys: true }, frame.area())).unwrap();
    terminal.backend().buffer().clone()
}

/// Returns the lines of a screen.
fn lines(buffer: &Buffer) -> Vec<String> {
    let area = buffer.area;
    let line = |y| (0..area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..area.height).map(|y| line(y).trim_end().to_owned()).collect()
}

#[track_caller]
fn one<'a>(lines: &'a [String], with: &str) -> &'a str {
    let found: Vec<_> = lines.iter().filter(|line| line.contains(with)).collect();
    assert_eq!(found.len(), 1, "{with:?} in {lines:#?}");
    found[0]
}

/// Returns the signs of the map, row by row, without addresses.
fn map(lines: &[String]) -> String {
    let rows = lines.iter().filter(|line| line.starts_with("0x"));
    rows.map(|row| row.split_once("  ").unwrap().1).collect()
}

#[test]
fn only_written_cells_are_hot() {
    let view = view(page(vec![vcpu(4000), vcpu(100)]));
    for (width, height, size) in [(80, 24, "2 MiB"), (120, 40, "512 KiB")] {
        let lines = lines(&drawn(&view, width, height));
        let map = map(&lines);
        let cells: Vec<char> = map.chars().collect();
        // A power of two of cells covers all of memory.
        let cell_kib = (1 << 20) / cells.len();
        assert_eq!(cells.len() * cell_kib, 1 << 20, "{lines:#?}");
        assert!(one(&lines, "each cell").starts_with(&format!("each cell {size};")));
        let hot = (256 << 10) / cell_kib..(272 << 10) / cell_kib;
        for (at, sign) in cells.iter().enumerate() {
            let expected = match at {
                at if hot.contains(&at) => '@',
                at if at + 1 == cells.len() => *sign,
                _ => '\u{b7}',
            };
            assert_eq!(*sign, expected, "cell {at} of {lines:#?}");
        }
        // Four frames in half a second: more than nothing, and far from all.
        assert!(":-=+".contains(cells[cells.len() - 1]), "{lines:#?}");
        assert_eq!(lines.iter().filter(|l| l.starts_with("0x00000000  ")).count(), 1);
    }
}

#[test]
fn figures_are_under_their_headings() {
    let mut page =
        page(vec![vcpu(4000), VcpuWindow { ring_full_exits: 2, throttled_ms: 125, ..vcpu(100) }]);
    page.info.dirty.subscribers = 2;
    let view = view(page);
    let lines = lines(&drawn(&view, 80, 24));
    assert_eq!(lines[0], "guest 7a0c1e5c-3f51-4fd2-8d1b-0a9d6f0c2b11 running");
    let machine = "1 GiB, 2 vCPUs, kvm, dirty-ring, here for 1 h 2 min; 1 other subscriber";
    assert_eq!(lines[1], machine);
    // All but four frames are in bins that were written completely: 256 KiB in half a second.
    assert_eq!(lines[2], "writes 32 MiB/s, 4100 pages in 500 ms; most at 0x10000000, 512 KiB/s");
    let head = one(&lines, "ring full");
    let [first, second] = ["     0 ", "     1 "].map(|number| {
        lines.iter().find(|line| line.starts_with(number)).unwrap_or_else(|| panic!("{lines:#?}"))
    });
    for (name, in_first, in_second) in [
        ("pages/s", "8000", "200"),
        ("bytes/s", "31.2 MiB", "800 KiB"),
        ("ring ", "25 % ", "25 % "),
        ("ring full", "7", "7 (+2)"),
        ("exits/s", "100", "100"),
        ("throttled", "0 %", "25 %"),
    ] {
        let end = head.find(name).unwrap() + name.len();
        for (line, figure) in [(first, in_first), (second, in_second)] {
            assert!(line[..end.min(line.len())].ends_with(figure), "{name} {figure}: {line:?}");
        }
    }
    assert!(one(&lines, "no migration").contains("no checkpoints"));
    assert!(
        one(&lines, "watching slows the guest's writes as a migration does")
            .ends_with("at any interval")
    );
    assert!(one(&lines, "q quits").ends_with("(every 1 s)"), "{lines:#?}");
    // The text for a pipe is the same without keys.
    let text = text_of(&view, 80, 24);
    assert!(text.contains(machine) && !text.contains("q quits"), "{text}");
}

#[test]
fn unknown_figures_are_dashes() {
    let mut page =
        page(vec![VcpuWindow { dirtied_frames: None, ring_peak_entries: None, ..vcpu(0) }]);
    page.ring_entries = None;
    page.info.tracking = TrackingMode::DirtyBitmap;
    let lines = lines(&drawn(&view(page), 80, 24));
    let words: Vec<_> =
        lines.iter().find(|l| l.starts_with("     0 ")).unwrap().split(' ').collect();
    let words: Vec<_> = words.into_iter().filter(|word| !word.is_empty()).collect();
    assert_eq!(words, ["0", "-", "-", "-", "-", "100", "0", "%"]);
}

#[test]
fn any_screen_size_and_vcpu_count_is_drawn() {
    let mut view = view(page(vec![vcpu(10); 64]));
    for width in [1, 2, 3, 7, 9, 12, 20, 21, 40, 79, 200, 500] {
        for height in [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 20, 100] {
            drawn(&view, width, height);
        }
    }
    let screen = lines(&drawn(&view, 80, 24));
    assert!(!map(&screen).is_empty(), "{screen:#?}");
    let others = one(&screen, "others");
    let shown =
        screen.iter().filter(|line| line.trim_start().starts_with(char::is_numeric)).count();
    assert!(shown > 1, "{screen:#?}");
    // The vCPUs that are not shown: each dirties twenty frames per second.
    let listed = screen.iter().filter(|l| l.ends_with("0 %") && !l.contains("others")).count();
    assert!(others.contains(&format!(" {} ", (64 - listed) * 20)), "{listed}: {screen:#?}");
    // Hostile figures must not panic either.
    let Some(super::view::LastAnswer::Page(page)) = &mut view.last_answer else { panic!("a page") };
    page.bin_frames = vec![u64::MAX; 4096];
    page.bin_bytes = u64::MAX;
    page.memory = vec![MemoryRange { gpa: u64::MAX, bytes: 1 }];
    page.window_ms = 0.0;
    let most = u64::MAX;
    page.vcpu.fill(VcpuWindow {
        dirtied_frames: Some(most),
        exits: most,
        ring_full_exits: most,
        ring_peak_entries: Some(most),
        throttled_ms: most,
    });
    page.info.vcpu.fill(VcpuInfo { ring_full_exits: most, ..VcpuInfo::default() });
    for (width, height) in [(1, 1), (80, 24), (300, 90)] {
        drawn(&view, width, height);
    }
    for now in [None, Some(arriving())] {
        view.last_answer = now;
        for (width, height) in [(1, 1), (2, 5), (80, 24)] {
            drawn(&view, width, height);
        }
    }
}

fn arriving() -> super::view::LastAnswer {
    let migration = Progress { phase: Phase::Precopy, pass: 3, ..Progress::default() };
    super::view::LastAnswer::Arriving(Box::new(ArrivingInfo::new(migration)))
}

#[test]
fn arriving_guest_has_its_own_screen() {
    let mut view = TopView::new(Duration::from_millis(500), Palette::Few);
    assert_eq!(lines(&drawn(&view, 40, 2))[0], "driftline top: waiting for the first win");
    view.last_answer = Some(arriving());
    let lines = lines(&drawn(&view, 80, 24));
    assert_eq!(lines[0], "driftline top: there is no guest yet");
    assert!(one(&lines, "receiving a guest: pass 3").contains("received"));
    assert!(one(&lines, "asking every").ends_with("every 500 ms"));
}

fn migrating(state: MigrationState, phase: Phase) -> MigrationPage {
    let throttled = VcpuThrottle {
        vcpu: 0,
        most_bytes_per_s: Some(9 << 20),
        throttled_percent: 91.0,
        ..VcpuThrottle::default()
    };
    let progress = Progress {
        phase,
        pass: 3,
        sent_bytes: 193 << 20,
        remaining_frames: 9728,
        dirty_rate_bytes_per_s: 17 << 20,
        link_rate_bytes_per_s: 30 << 20,
        expected_downtime_ms: 1261.0,
        throttle: vec![throttled],
        ..Progress::default()
    };
    let (to, report, failure) = ("10.0.0.2:7000".to_owned(), None, None);
    MigrationPage { job: 1, state, to, progress, report, failure }
}

#[test]
fn migration_has_the_figures_of_send_migration() {
    let mut window = page(vec![vcpu(1)]);
    window.migration = Some(migrating(MigrationState::Sending, Phase::Precopy));
    window.info.state = GuestState::Migrating;
    let text = text_of(&view(window.clone()), 80, 24).replace('\n', " ");
    for figure in [
        "migration to 10.0.0.2:7000: pre-copy, pass 3: 193 MiB sent, 38 MiB left",
        "guest writes 17 MiB/s, link carries 30 MiB/s",
        "pause now about 1261.0 ms",
        "vCPU 0 throttled 91 %",
    ] {
        assert!(text.contains(figure), "{figure} in {text}");
    }
    window.migration = Some(migrating(MigrationState::InDoubt, Phase::InDoubt));
    let text = text_of(&view(window.clone()), 80, 24).replace('\n', " ");
    assert!(text.contains("in doubt: the guest is paused here and may run there"), "{text}");
    let message = "the connection was cut".to_owned();
    let failure = MigrationFailure {
        message,
        cancelled: false,
        phase: Phase::Precopy,
        guest: GuestLocation::Here,
    };
    window.migration = Some(MigrationPage {
        failure: Some(failure),
        ..migrating(MigrationState::Failed, Phase::Finished)
    });
    let text = text_of(&view(window), 80, 24);
    assert!(text.contains("has failed: the connection was cut"), "{text}");
}

#[test]
fn checkpoints_show_pauses_and_failures() {
    let line = EpochLine {
        report: driftline_checkpoint::EpochReport {
            epoch: 812,
            frames: 4100,
            disk_blocks: 0,
            pause_us: 900,
            copied_after_frames: 0,
            waits: 0,
            waited_us: 0,
            write_ms: 1.3,
            written_bytes: 1 << 20,
            durable: true,
        },
        late_ms: 0,
        early: false,
        skipped: 0,
    };
    let mut window = page(vec![vcpu(1)]);
    let mut summary = CheckpointSummary {
        job: 1,
        running: true,
        store: "/var/store".into(),
        achieved: driftline_checkpoint::CadenceTotals { epochs: 813, ..Default::default() },
        last: Some(EpochOutcome::Stored(line)),
    };
    summary.achieved.pause =
        driftline_checkpoint::Percentiles { p50_us: 910, p99_us: 4400, ..Default::default() };
    summary.achieved.write.p50_us = 1300;
    summary.achieved.interval.p50_us = 100_000;
    window.checkpoints = Some(summary);
    let text = text_of(&view(window.clone()), 80, 24).replace('\n', " ");
    for figure in [
        "checkpoints: checkpoint 812 is durable (4100 pages); pause p50 0.9 p99 4.4 ms, durable",
        "every 100 ms; 813 taken, in /var/store",
    ] {
        assert!(text.contains(figure), "{figure} in {text}");
    }
    if let Some(summary) = &mut window.checkpoints {
        summary.last = Some(EpochOutcome::Failed("the disk is full".into()));
        summary.achieved.failed = 2;
    }
    let mut view = view(window);
    view.palette = Palette::Few;
    let buffer = drawn(&view, 80, 24);
    let y = lines(&buffer).iter().position(|l| l.contains("the disk is full")).unwrap() as u16;
    assert_eq!(buffer[(0, y)].fg, Color::Red);
    assert!(text_of(&view, 80, 24).replace('\n', " ").contains("2 failed"));
}

#[test]
fn only_hot_cells_have_colours() {
    let mut view = view(page(vec![vcpu(4000)]));
    let coloured = |buffer: &Buffer| {
        let cells = buffer.content().iter();
        cells.filter(|cell| cell.bg != Color::Reset).count()
    };
    let plain = drawn(&view, 80, 24);
    assert!(plain.content().iter().all(|c| (c.fg, c.bg) == (Color::Reset, Color::Reset)));
    for palette in [Palette::Few, Palette::Many] {
        view.palette = palette;
        let buffer = drawn(&view, 80, 24);
        // Eight cells of 2 MiB, the last cell of memory, and the nine of the legend.
        assert_eq!(coloured(&buffer), 8 + 1 + 9, "{palette:?}");
    }
}

#[test]
fn addresses_account_for_memory_holes() {
    let mut window = page(vec![vcpu(1)]);
    window.memory = vec![
        MemoryRange { gpa: 0, bytes: 512 << 20 },
        MemoryRange { gpa: 4 << 30, bytes: 512 << 20 },
    ];
    window.bin_frames = vec![0; 4096];
    window.bin_frames[2049] = 64;
    let lines = lines(&drawn(&view(window.clone()), 80, 24));
    assert!(lines[2].ends_with("most at 0x100040000, 512 KiB/s"), "{}", lines[2]);
    let row =
        lines.iter().find(|l| l.starts_with("0x100000000  ")).expect("the row behind the hole");
    assert!(!row["0x100000000  ".len()..].starts_with('\u{b7}'), "{row}");
    // If there are fewer bins than there is room for, each is one cell.
    assert_eq!(HeatCells::new(&window, 100_000).bytes, window.bin_bytes);
}

#[test]
fn keys_quit_pause_and_change_the_interval() {
    let mut view = view(page(vec![vcpu(1)]));
    let key = |code| KeyEvent::new(code, KeyModifiers::NONE);
    for code in [KeyCode::Char('q'), KeyCode::Esc] {
        assert!(!terminal::press(&mut view, &key(code)));
    }
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert!(!terminal::press(&mut view, &interrupt));
    assert!(terminal::press(&mut view, &key(KeyCode::Char('c'))));
    assert!(terminal::press(&mut view, &key(KeyCode::Char('p'))) && view.paused);
    assert!(lines(&drawn(&view, 80, 24))[0].contains("view paused"));
    let mut later = page(vec![vcpu(1)]);
    later.info.state = GuestState::Stopped;
    view.take(Update::Page(Box::new(later)));
    assert!(lines(&drawn(&view, 80, 24))[0].contains("running"), "what comes is not shown");
    assert!(terminal::press(&mut view, &key(KeyCode::Char('p'))) && !view.paused);
    for _ in 0..10 {
        assert!(terminal::press(&mut view, &key(KeyCode::Char('+'))));
    }
    assert_eq!(view.interval, crate::args::SHORTEST_INTERVAL);
    for _ in 0..20 {
        assert!(terminal::press(&mut view, &key(KeyCode::Char('-'))));
    }
    assert_eq!(view.interval, crate::args::LONGEST_INTERVAL);
    view.silent = Some(Duration::from_secs(70));
    assert!(lines(&drawn(&view, 80, 24))[0].ends_with("NO ANSWER for 70 s"));
}

#[test]
fn closing_message_names_the_guests_place() {
    let mut window = page(Vec::new());
    window.end = Some(EndReason::Stopped("it has moved to there:1".into()));
    window.moved_to = Some("there:1".into());
    assert_eq!(closing_message(&window), "the guest has moved to there:1");
    window.moved_to = None;
    window.end = Some(EndReason::PowerOff);
    assert_eq!(closing_message(&window), "the guest powered itself off");
}

#[test]
fn lost_vmm_leaves_the_last_guest_state() {
    let lost = |view: &TopView| {
        let cause = "it has ended".into();
        view.lost(ClientError::Broken { socket: "s".into(), cause }).message().to_owned()
    };
    let mut window = page(vec![vcpu(1)]);
    window.migration = Some(migrating(MigrationState::Failed, Phase::Precopy));
    window.info.state = GuestState::Paused;
    let mut view = view(window);
    let message = lost(&view);
    assert!(message.ends_with("at its last answer the guest was paused"), "{message}");
    // The state is known even if it is not shown.
    view.paused = true;
    let mut doubtful = page(vec![vcpu(1)]);
    doubtful.migration = Some(migrating(MigrationState::InDoubt, Phase::InDoubt));
    doubtful.info.state = GuestState::InDoubt;
    assert!(view.take(Update::Page(Box::new(doubtful))).is_none());
    let message = lost(&view);
    assert!(message.ends_with("the guest was in-doubt, to 10.0.0.2:7000"), "{message}");
}
