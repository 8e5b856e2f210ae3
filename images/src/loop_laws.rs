//! Tests of everything around the pages: pace, gaps, placement, lines, and the file that the guest
//! boots from.

use proptest::prelude::*;

use crate::workload::{
    BATCH, ERROR_LINES, PAGE_SIZE, Pacer, PageMemory, Pattern, PayloadSpec, Runner, SLICE_NS,
    TABLE_BASE, TickGap, TickOutcome, WS_BASE, WorkingSetPlacement, WriteRate, ready_line,
};
use crate::{PAYLOAD_ELF, PayloadMessage, PayloadReport};

const SECOND: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;

proptest! {
    #[test]
    fn the_pace_is_exact_over_time(
        rate in 4096u64..1 << 34, ticks in prop::collection::vec(1u64..90_000_000, 1..200)
    ) {
        let mut pacer = Pacer::new(&paced(rate), 1, 0);
        let (mut now, mut pages) = (0, 0);
        for tick in ticks {
            now += tick;
            let due = pacer.due(now);
            pacer.take(due);
            pages += due;
        }
        let exact = u128::from(now) * u128::from(rate) / u128::from(PAGE_SIZE * SECOND);
        prop_assert!(u128::from(pages).abs_diff(exact) <= 1, "{pages} for {exact}");
    }

    #[test]
    fn long_pause_is_not_made_up_for(rate in 4096u64..1 << 36, stop in SECOND..SECOND * 1_000_000) {
        let mut pacer = Pacer::new(&paced(rate), 1, 0);
        prop_assert!(pacer.due(stop) <= rate / 10 / PAGE_SIZE + 1);
    }

    #[test]
    fn sleep_ends_when_pages_are_due(rate in 4096u64..1 << 34, start in 0u64..1 << 60) {
        let mut pacer = Pacer::new(&paced(rate), 1, start);
        let mut now = start;
        for _ in 0..100 {
            let due = pacer.due(now);
            pacer.take(due);
            let wake = pacer.wake_ns(now);
            prop_assert!(wake > now && wake <= now + 50 * SLICE_NS, "{}", wake - now);
            now = wake;
        }
    }

    #[test]
    fn vcpus_share_the_rate(vcpus in 1u32..=32) {
        let pages: u64 = (0..vcpus)
            .map(|_| Pacer::new(&paced(320 << 20), vcpus, 0).due(SECOND / 10))
            .sum();
        prop_assert!(pages.abs_diff(8192) <= u64::from(vcpus));
    }

    #[test]
    fn working_set_lies_in_ram_without_overlap(
        pages in 1u64..2000, low in 17u64..24, high in 0u64..8, random: bool
    ) {
        let pattern = if random { Pattern::Random } else { Pattern::Seq };
        let spec = PayloadSpec { ws_bytes: pages * PAGE_SIZE, pattern, ..PayloadSpec::default() };
        let ram = [(0, 640 << 10), (MIB, (low - 1) * MIB), (4 << 30, high * MIB)];
        let room = (low - 16 + high) * MIB / PAGE_SIZE;
        let Ok(placement) = WorkingSetPlacement::new(&spec, ram) else {
            prop_assert!(pages > room);
            return Ok(());
        };
        prop_assert!(pages <= room);
        let gfns: Vec<u64> = (0..pages).map(|page| placement.gfn(page)).collect();
        prop_assert!(gfns.windows(2).all(|pair| pair[0] < pair[1]));
        for gfn in gfns {
            let address = gfn * PAGE_SIZE;
            prop_assert!(address >= WS_BASE);
            let holds = |&(start, bytes): &(u64, u64)| {
                address >= start && address + PAGE_SIZE <= start + bytes
            };
            prop_assert!(ram.iter().any(holds));
        }
    }
}

#[test]
fn a_large_table_moves_the_working_set_up() {
    let spec = PayloadSpec { ws_bytes: 64 << 30, pattern: Pattern::Zipf, ..PayloadSpec::default() };
    assert_eq!(WorkingSetPlacement::base(&spec), TABLE_BASE + 64 * MIB);
    assert_eq!(WorkingSetPlacement::base(&PayloadSpec { pattern: Pattern::Seq, ..spec }), WS_BASE);
}

#[test]
fn pause_during_sleep_is_a_gap() {
    let mut gap = TickGap::new(0);
    gap.tick(300_000);
    assert_eq!((gap.max_us(), gap.take_us()), (300, 300));
    gap.sleep_until(1_000_000);
    gap.tick(1_050_000);
    assert_eq!((gap.max_us(), gap.take_us()), (300, 50));
    // Asleep until 2 ms; the machine was paused from 1.5 ms to 41.5 ms.
    gap.sleep_until(2_000_000);
    gap.tick(41_500_000);
    assert_eq!((gap.max_us(), gap.take_us()), (39_500, 39_500));
    // An early wake-up is not a gap.
    gap.sleep_until(42_500_000);
    gap.tick(42_000_000);
    assert_eq!((gap.max_us(), gap.take_us()), (39_500, 0));
}

#[test]
fn slow_printing_is_no_gap() {
    let mut gap = TickGap::new(0);
    gap.sleep_until(1_000_000);
    // A byte at each of these times. The machine was paused from 1.2 to 1.7 ms. Before 1 ms the
    // sleep hides any delay.
    for at_us in [100, 600, 950, 1_100, 1_200, 1_700, 1_800] {
        gap.progress(at_us * 1_000);
    }
    gap.tick(1_850_000);
    assert_eq!(gap.take_us(), 500);
    // The rest of a sleep after a byte is no gap.
    gap.sleep_until(3_000_000);
    gap.progress(2_000_000);
    gap.tick(3_050_000);
    assert_eq!(gap.take_us(), 50);
}

fn paced(rate: u64) -> PayloadSpec {
    PayloadSpec { rate: WriteRate::BytesPerSecond(rate), ..PayloadSpec::default() }
}

/// Memory that is correct, or that has an error in every page that is read back.
struct TestMemory {
    words: Vec<u64>,
    broken: bool,
}

impl PageMemory for TestMemory {
    fn gfn(&self, page: u64) -> u64 {
        page
    }

    fn read_u64(&self, page: u64, word: usize) -> u64 {
        self.words[page as usize * 512 + word] ^ u64::from(self.broken)
    }

    fn write_u64(&mut self, page: u64, word: usize, value: u64) {
        self.words[page as usize * 512 + word] = value;
    }
}

/// Runs a loop on a clock that advances `tick_ns` at each tick. Returns its lines.
fn run(spec: &str, broken: bool, tick_ns: u64) -> Vec<PayloadMessage> {
    let spec: PayloadSpec = spec.parse().unwrap();
    let mut memory = TestMemory { words: vec![0; (spec.ws_bytes / 8) as usize], broken };
    let mut now = 5 * SECOND;
    let mut runner = Runner::new(&spec, 1, 0, now);
    let mut table = vec![0; runner.workload().table_len()];
    let mut messages = Vec::new();
    loop {
        let mut print = |line: &[u8]| {
            let line = std::str::from_utf8(line).unwrap();
            assert!(line.ends_with('\n'));
            messages.push(PayloadMessage::parse(line).expect(line));
        };
        match runner.tick(now, &mut memory, &mut table, &mut print) {
            TickOutcome::TickAgain => now += tick_ns,
            TickOutcome::SleepUntil(wake) => now = wake.max(now + tick_ns),
            TickOutcome::Done => return messages,
        }
    }
}

fn reports(messages: &[PayloadMessage]) -> Vec<PayloadReport> {
    messages
        .iter()
        .filter_map(
            |message| {
                if let PayloadMessage::Report(report) = message { Some(*report) } else { None }
            },
        )
        .collect()
}

#[test]
fn timed_run_reports_each_second_at_its_rate() {
    let reports = reports(&run("payload,ws=1M,rate=40M,seconds=5", false, 20_000));
    let times: Vec<u64> = reports.iter().map(|report| report.t_ms / 10).collect();
    assert_eq!(times, [100, 200, 300, 400, 500]);
    assert!(reports.iter().enumerate().all(|(index, report)| report.done == (index == 4)));
    let last = reports[4];
    assert_eq!(last.errors, 0);
    assert!(last.pages.abs_diff(5 * 40 * 256) < 60, "{last:?}");
    assert_eq!(last.passes, last.pages / 256);
    assert!(last.max_gap_us <= 20, "{last:?}");
}

#[test]
fn report_interval_is_that_of_the_specification() {
    let reports = reports(&run("payload,ws=1M,rate=40M,seconds=1,report=200", false, 20_000));
    let times: Vec<u64> = reports.iter().map(|report| report.t_ms / 10).collect();
    assert_eq!(times, [20, 40, 60, 80, 100]);
}

#[test]
fn run_of_passes_ends_after_them() {
    for pattern in ["seq", "random", "zipf", "stride:4", "once"] {
        let spec = format!("payload,ws=1M,rate=max,pattern={pattern},passes=3");
        let last = *reports(&run(&spec, false, 1_000)).last().unwrap();
        assert!(last.done && last.passes == 3 && last.errors == 0, "{last:?}");
    }
}

#[test]
fn all_errors_are_counted_ten_are_described() {
    let messages = run("payload,ws=1M,rate=max,passes=4", true, 1_000);
    let errors =
        messages.iter().filter(|message| matches!(message, PayloadMessage::Error { .. })).count()
            as u64;
    let last = *reports(&messages).last().unwrap();
    assert_eq!(errors, ERROR_LINES);
    assert!(last.errors >= last.pages, "{last:?}");
}

#[test]
fn damaged_loop_is_not_taken_for_the_guests() {
    let spec: PayloadSpec = "payload,ws=1M,rate=4M,pattern=zipf".parse().unwrap();
    let mut memory = TestMemory { words: vec![0; 512 * 256], broken: false };
    let mut runner = Runner::new(&spec, 2, 1, 0);
    let mut table = vec![0; runner.workload().table_len()];
    for now in 0..100 {
        runner.tick(now * 1_000_000, &mut memory, &mut table, &mut |_| ());
        assert!(runner.is_state_of(&spec, 2, 1));
    }
    assert!(!runner.is_state_of(&spec, 2, 0), "another share");
    assert!(!runner.is_state_of(&"payload,ws=1M,rate=8M,pattern=zipf".parse().unwrap(), 2, 1));
    let saved = serde_json::to_value(&runner).unwrap();
    for (field, value) in [
        ("/workload/cursor", 128),
        ("/workload/sweep_cursor", 128),
        ("/workload/until_sweep", 0),
        ("/workload/zipf/pages", 0),
        ("/pacer/credit", u64::MAX),
        ("/pacer/rate", 0),
        ("/batch", u64::MAX),
        ("/report_ns", u64::MAX),
        ("/end_passes", 0),
        ("/pacer/last_ns", u64::MAX),
        ("/pacer/slice_end_ns", u64::MAX),
        ("/next_report_ns", u64::MAX),
        ("/spin_until_ns", u64::MAX),
        ("/error_lines", ERROR_LINES + 1),
        ("/workload/passes", u64::MAX),
        ("/workload/pages", u64::MAX),
        ("/workload/errors", u64::MAX),
        ("/workload/swept", u64::MAX),
    ] {
        let mut damaged = saved.clone();
        *damaged.pointer_mut(field).unwrap() = value.into();
        let damaged: Runner = serde_json::from_value(damaged).unwrap();
        assert!(!damaged.is_state_of(&spec, 2, 1), "{field} {value}");
    }
}

#[test]
fn a_tick_is_at_most_one_batch() {
    let spec: PayloadSpec = "payload,ws=1M,rate=max".parse().unwrap();
    let mut memory = TestMemory { words: vec![0; 512 * 256], broken: false };
    let mut runner = Runner::new(&spec, 1, 0, 0);
    assert_eq!(runner.tick(SECOND / 2, &mut memory, &mut [], &mut |_| ()), TickOutcome::TickAgain);
    assert_eq!(runner.workload().pages(), BATCH);
}

#[test]
fn bare_visits_are_checked_once_at_the_end() {
    for pattern in ["seq", "random", "zipf", "stride:4", "once"] {
        let spec = format!("payload,ws=1M,rate=max,pattern={pattern},passes=3,check=end");
        let last = *reports(&run(&spec, false, 1_000)).last().unwrap();
        assert!(last.done && last.passes >= 3 && last.errors == 0, "{pattern}: {last:?}");
        let last = *reports(&run(&spec, true, 1_000)).last().unwrap();
        assert!(last.done && last.errors > 0, "{pattern}: {last:?}");
    }
}

#[test]
fn bare_visits_store_one_word() {
    let spec: PayloadSpec = "payload,ws=1M,rate=max,check=end".parse().unwrap();
    let mut memory = TestMemory { words: vec![0; 512 * 256], broken: false };
    let mut runner = Runner::new(&spec, 1, 0, 0);
    while runner.workload().passes() < 1 {
        runner.tick(1, &mut memory, &mut [], &mut |_| ());
    }
    let before = memory.words.clone();
    while runner.workload().passes() < 2 {
        runner.tick(1, &mut memory, &mut [], &mut |_| ());
    }
    let changed = memory.words.iter().zip(&before).filter(|(now, was)| now != was).count();
    assert_eq!(changed, 256);
}

#[test]
fn idle_spinner_never_sleeps_and_keeps_its_rate() {
    let spec: PayloadSpec = "payload,ws=1M,rate=32M,burst=64,idle=spin".parse().unwrap();
    let mut memory = TestMemory { words: vec![0; 512 * 256], broken: false };
    let mut runner = Runner::new(&spec, 1, 0, 0);
    let (mut now, mut bursts, mut before) = (0, Vec::new(), 0);
    while now < SECOND {
        now += 10_000;
        assert_eq!(runner.tick(now, &mut memory, &mut [], &mut |_| ()), TickOutcome::TickAgain);
        let pages = runner.workload().pages();
        if pages > before && bursts.last().is_none_or(|at| now - at > 1_000_000) {
            bursts.push(now);
        }
        before = pages;
    }
    assert!(before.abs_diff(32 * 256) <= 128, "{before}");
    assert!(bursts.len().abs_diff(128) <= 3, "64 pages each 7.8 ms, so {}", bursts.len());
}

#[test]
fn the_ready_line_is_read_back() {
    let spec: PayloadSpec =
        "payload,rate=1000000,pattern=stride:3,seed=18446744073709551615".parse().unwrap();
    let line = ready_line(&spec, 32);
    let message = PayloadMessage::parse(std::str::from_utf8(line.as_bytes()).unwrap());
    let Some(PayloadMessage::Ready { vcpus, ws_pages, pattern, rate, seed }) = message else {
        panic!("{message:?}")
    };
    assert_eq!(
        (vcpus, ws_pages, pattern.as_str(), rate.as_str(), seed),
        (32, 16384, "stride:3", "1000000", u64::MAX)
    );
}

/// Tests the guest's code as the compiler emitted it, see `build.rs`. The next test covers the
/// linked parts of `core`, which was compiled with vector instructions.
#[test]
fn the_guest_uses_no_vector_registers() {
    let assembly = include_str!(concat!(env!("OUT_DIR"), "/payload.s"));
    assert!(assembly.contains("fault_main"));
    for line in assembly.lines().filter(|line| !line.trim_start().starts_with('.')) {
        let code = line.split('#').next().unwrap();
        for register in ["%xmm", "%ymm", "%zmm", "%mm", "%st"] {
            assert!(!code.contains(register), "{line}");
        }
    }
}

#[test]
fn guest_links_only_panic_code_of_core() {
    let names = PAYLOAD_ELF.split(|&byte| byte == 0).filter_map(|name| str::from_utf8(name).ok());
    let of_core: Vec<&str> = names
        .filter(|name| name.starts_with("_R") || name.starts_with("_ZN"))
        .filter(|name| name.contains("4core"))
        .collect();
    for name in of_core {
        // `str::count` belongs to padding, which the panic handler does not use: it prints only the
        // place.
        let known = ["panicking", "3fmt", "3str5count"].iter().any(|part| name.contains(part));
        assert!(
            known,
            "{name} is linked into the guest and may use instructions that an emulator lacks"
        );
    }
}

#[test]
fn guest_is_elf_with_a_pvh_entry() {
    let word = |at: usize, bytes: usize| {
        PAYLOAD_ELF[at..at + bytes]
            .iter()
            .rev()
            .fold(0u64, |value, &byte| value << 8 | u64::from(byte))
    };
    assert_eq!(&PAYLOAD_ELF[..6], b"\x7fELF\x02\x01");
    assert_eq!(word(18, 2), 62, "x86-64");
    let (headers, size, count) = (word(32, 8) as usize, word(54, 2) as usize, word(56, 2) as usize);
    let mut entry = None;
    for at in (0..count).map(|index| headers + index * size) {
        let (kind, offset) = (word(at, 4), word(at + 8, 8) as usize);
        let (address, length, memory) = (word(at + 24, 8), word(at + 32, 8), word(at + 40, 8));
        match kind {
            1 => assert!(address >= MIB && address + memory < TABLE_BASE && length <= memory),
            4 => {
                assert_eq!((word(offset, 4), word(offset + 4, 4), word(offset + 8, 4)), (4, 8, 18));
                assert_eq!(&PAYLOAD_ELF[offset + 12..offset + 16], b"Xen\0");
                entry = Some(word(offset + 16, 8));
            }
            _ => {}
        }
    }
    assert_eq!(entry, Some(word(24, 8)));
}
