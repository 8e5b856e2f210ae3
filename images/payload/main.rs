//! The payload guest: writes its memory in a known pattern and detects reads that differ from its
//! writes.
//!
//! This file has the sequence: boot, the other vCPUs, ring 3, the loop, the end. The loop's work is
//! in `workload`, which host threads run, too.
#![no_std]
#![no_main]

mod apic;
mod builtins;
mod clock;
mod console;
mod cpu;
mod fault;
mod heap;
mod memory;
mod pvh;
mod virtio;
#[allow(dead_code, unused_imports)] // The host uses more of it.
#[path = "../src/workload/mod.rs"]
mod workload;

use core::arch::global_asm;
use core::sync::atomic::{AtomicU32, Ordering};

use cpu::Cpu;
use workload::{LineBuffer, PayloadRing, Runner, TickOutcome, WorkingSetPlacement, ready_line};

global_asm!(include_str!("boot.s"), options(att_syntax, raw));

/// Number of vCPUs that are ready to enter their loop.
static READY: AtomicU32 = AtomicU32::new(0);
/// Set when the first page may be written.
static GO: AtomicU32 = AtomicU32::new(0);
/// Number of vCPUs that have printed their last line.
static DONE: AtomicU32 = AtomicU32::new(0);

const START_NS: u64 = 20_000_000_000;

/// Entry of the boot processor, in ring 0, with the first 4 GiB mapped.
#[unsafe(no_mangle)]
extern "C" fn boot_main(start_info: u64) -> ! {
    console::enable_fifo();
    let mut line = LineBuffer::new();
    let mut setup = pvh::read(start_info, &mut line);
    heap::start(setup.ram());
    let features = cpu::features();
    apic::choose(&features);
    cpu::load_tables(0);
    heap::map_above_4g(setup.ram_end());
    if let Some(reason) = setup.refusal {
        end_with(line.text(reason));
    }
    let Some(cpu) = Cpu::start(0, &features) else {
        end_with(line.text(
            "payload fatal: this host offers no kvmclock, and the payload has no other clock",
        ));
    };
    match WorkingSetPlacement::new(&setup.spec, setup.ram()) {
        Ok(placement) => setup.placement = Some(placement),
        Err(error) => {
            line.text("payload fatal: the working set takes ").number(error.wanted);
            line.text(" pages, but there are only ").number(error.available);
            end_with(
                line.text(" pages of RAM at or above ").hex(WorkingSetPlacement::base(&setup.spec)),
            );
        }
    }
    if setup.spec.ws_pages() < u64::from(setup.vcpus) {
        end_with(line.text("payload fatal: the working set has fewer pages than there are vCPUs"));
    }
    heap::clear_table(&setup.spec);
    if let Some(io_ms) = setup.spec.io_ms {
        cpu.devices = Some(virtio::Devices::start(io_ms, setup.spec.report_ms));
    }
    if apic::start_timer(&cpu.clock).is_none() {
        end_with(line.text("payload fatal: the APIC timer does not count"));
    }
    pvh::publish(setup);
    for vcpu in 1..pvh::setup().vcpus {
        apic::start_ap(vcpu, &cpu.clock);
    }
    let deadline = cpu.clock.now() + START_NS;
    while READY.load(Ordering::Acquire) + 1 < pvh::setup().vcpus {
        core::hint::spin_loop();
        if cpu.clock.now() > deadline {
            line.text("payload fatal: only ").number(u64::from(READY.load(Ordering::Acquire)) + 1);
            end_with(
                line.text(" of ").number(u64::from(pvh::setup().vcpus)).text(" vCPUs have started"),
            );
        }
    }
    enter(cpu)
}

/// Entry of the other processors, each on its own stack.
#[unsafe(no_mangle)]
extern "C" fn ap_main(index: u32) -> ! {
    cpu::load_tables(index);
    match Cpu::start(index, &cpu::features()) {
        Some(cpu) if apic::start_timer(&cpu.clock).is_some() => {
            READY.fetch_add(1, Ordering::AcqRel);
            enter(cpu)
        }
        _ => cpu::park(),
    }
}

/// Enters the loop in the configured ring.
fn enter(cpu: &'static mut Cpu) -> ! {
    let stack = cpu.user_stack;
    match pvh::setup().spec.ring {
        PayloadRing::Zero => run(cpu),
        PayloadRing::Three => cpu::to_ring3(cpu, run, stack),
    }
}

/// The loop. It uses nothing that ring 3 cannot access.
extern "C" fn run(cpu: &'static mut Cpu) -> ! {
    let setup = pvh::setup();
    if cpu.index == 0 {
        console::print_now(ready_line(&setup.spec, setup.vcpus).as_bytes());
        GO.store(1, Ordering::Release);
    }
    while GO.load(Ordering::Acquire) == 0 {
        let now = cpu.clock.now();
        apic::sleep(&cpu.clock, now, now + workload::SLICE_NS);
    }
    let start = cpu.clock.now();
    let mut runner = Runner::new(&setup.spec, setup.vcpus, cpu.index, start);
    let mut memory = memory::WorkingSet::new(setup);
    let table = heap::table(runner.workload().share().first, runner.workload().table_len());
    loop {
        let now = cpu.clock.now();
        let (console, clock) = (&mut cpu.console, &cpu.clock);
        if let Some(devices) = &mut cpu.devices {
            devices.poll(now, &mut |line| console.print(line));
        }
        match runner.tick(now, &mut memory, table, &mut |line| console.print(line)) {
            TickOutcome::TickAgain => {
                console.pump(console::BUSY_BYTES, || runner.progress(clock.now()));
            }
            TickOutcome::SleepUntil(wake) => {
                console.pump(console::IDLE_BYTES, || runner.progress(clock.now()));
                let now = clock.now();
                if now < wake {
                    apic::sleep(clock, now, wake);
                }
            }
            TickOutcome::Done => break,
        }
    }
    cpu.console.flush();
    DONE.fetch_add(1, Ordering::AcqRel);
    if cpu.index != 0 {
        cpu::park();
    }
    while DONE.load(Ordering::Acquire) < setup.vcpus {
        let now = cpu.clock.now();
        apic::sleep(&cpu.clock, now, now + workload::SLICE_NS);
    }
    cpu::power_off()
}

/// Prints an error and ends the machine; only before the loop.
fn end_with(line: &mut LineBuffer) -> ! {
    console::print_now(line.byte(b'\n').as_bytes());
    cpu::give_up()
}
