//! The data that the VMM passes at boot: the command line and the memory map, read once.

use core::cell::UnsafeCell;

use crate::workload::{LineBuffer, PayloadSpec, WorkingSetPlacement, parse_number};

const MAGIC: u32 = 0x336e_c578;
const RAM: u32 = 1;
const MAX_RANGES: usize = 32;
/// Largest number of vCPUs, limited by the size of the tables.
pub const MAX_VCPUS: u32 = 32;

/// Start of the structure that EBX points to.
#[repr(C)]
struct StartInfo {
    magic: u32,
    version: u32,
    flags: u32,
    modules: u32,
    modules_at: u64,
    cmdline_at: u64,
    rsdp_at: u64,
    memmap_at: u64,
    memmap_entries: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MapEntry {
    addr: u64,
    size: u64,
    kind: u32,
    reserved: u32,
}

/// The configuration of this boot.
pub struct BootSetup {
    pub spec: PayloadSpec,
    pub vcpus: u32,
    pub placement: Option<WorkingSetPlacement>,
    /// The reason why the payload cannot run. The line passed to [`read`] has the beginning of the
    /// sentence.
    pub refusal: Option<&'static str>,
    ranges: [(u64, u64); MAX_RANGES],
    count: usize,
}

impl BootSetup {
    /// Returns RAM as (address, bytes), ascending.
    pub fn ram(&self) -> impl Iterator<Item = (u64, u64)> + Clone {
        self.ranges.iter().take(self.count).copied()
    }

    pub fn ram_end(&self) -> u64 {
        self.ram().map(|(start, bytes)| start + bytes).max().unwrap_or(0)
    }

    fn refuse(&mut self, reason: &'static str) {
        if self.refusal.is_none() {
            self.refusal = Some(reason);
        }
    }

    /// Inserts a range at its place in the ascending list.
    fn add(&mut self, range: (u64, u64)) {
        if self.count == MAX_RANGES {
            return;
        }
        let mut place = self.count;
        while place > 0 && self.ranges[place - 1].0 > range.0 {
            self.ranges[place] = self.ranges[place - 1];
            place -= 1;
        }
        self.ranges[place] = range;
        self.count += 1;
    }
}

/// Reads all data before any of it is overwritten. The beginning of a refusal goes into `line`.
pub fn read(start_info: u64, line: &mut LineBuffer) -> BootSetup {
    let mut setup = BootSetup {
        spec: PayloadSpec::default(),
        vcpus: 1,
        placement: None,
        refusal: None,
        ranges: [(0, 0); MAX_RANGES],
        count: 0,
    };
    // SAFETY: PVH passes the physical address of this structure, and the first 4 GiB are
    // identity-mapped.
    let info = unsafe { &*(start_info as *const StartInfo) };
    if info.magic != MAGIC || info.version < 1 || info.memmap_at == 0 {
        line.text("payload fatal: ");
        setup.refuse("no PVH start info with a memory map was passed in EBX");
        return setup;
    }
    let entries = info.memmap_at as *const MapEntry;
    for index in 0..info.memmap_entries as usize {
        // SAFETY: the map has `memmap_entries` entries.
        let entry = unsafe { *entries.add(index) };
        if entry.kind == RAM {
            setup.add((entry.addr, entry.size));
        }
    }
    if info.cmdline_at != 0 {
        read_cmdline(&mut setup, info.cmdline_at as *const u8, line);
    }
    setup
}

fn read_cmdline(setup: &mut BootSetup, text: *const u8, line: &mut LineBuffer) {
    let mut len = 0;
    // SAFETY: the command line is a string that ends with a zero byte. (The read is volatile, or
    // the compiler turns the loop into a call of `strlen`.)
    while unsafe { text.add(len).read_volatile() } != 0 {
        len += 1;
    }
    // SAFETY: the bytes were just read.
    let text = unsafe { core::slice::from_raw_parts(text, len) };
    for item in text.split(|&byte| byte == b' ') {
        let mut halves = item.splitn(2, |&byte| byte == b'=');
        let (Some(key), Some(value)) = (halves.next(), halves.next()) else {
            continue;
        };
        // For example `virtio_mmio.device=` and `pci=off`, which a VMM adds for Linux.
        if key.iter().any(|&byte| byte == b'.') || key == b"pci" || key == b"root" {
            continue;
        }
        let refusal = if key == b"vcpus" {
            match parse_number(value) {
                Some(vcpus) if (1..=u64::from(MAX_VCPUS)).contains(&vcpus) => {
                    setup.vcpus = vcpus as u32;
                    None
                }
                _ => Some("is not a number of vCPUs from 1 to 32"),
            }
        } else {
            setup.spec.set(key, value).err().map(|reason| reason.0)
        };
        if let Some(reason) = refusal {
            if setup.refusal.is_none() {
                line.text("payload fatal: ");
                for &byte in item {
                    line.byte(byte);
                }
                line.byte(b' ');
            }
            setup.refuse(reason);
        }
    }
}

struct PublishedSetup(UnsafeCell<Option<BootSetup>>);

// SAFETY: the boot processor writes it once before it starts the others; afterwards it is only
// read.
unsafe impl Sync for PublishedSetup {}

static SETUP: PublishedSetup = PublishedSetup(UnsafeCell::new(None));

/// Makes the setup visible to all vCPUs; called once, before the others start.
pub fn publish(setup: BootSetup) {
    // SAFETY: only the boot processor runs.
    unsafe { *SETUP.0.get() = Some(setup) }
}

/// Returns the published setup.
pub fn setup() -> &'static BootSetup {
    // SAFETY: there are no more writes.
    match unsafe { &*SETUP.0.get() } {
        Some(setup) => setup,
        None => crate::cpu::power_off(),
    }
}
