//! A VMM of one vCPU that shows which pages its guest writes: /dev/kvm, a dirty ring, and this
//! crate.
//!
//! `cargo run -p driftline-dirty-tracker --features vm-memory --example dirty_pages`
//!
//! The guest is 26 bytes of 16-bit code that writes to four pages and halts. The VMM writes one
//! page itself: the code. x86-64 only.
#![allow(unsafe_code, reason = "memory that KVM shares")]

use std::error::Error;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use driftline_dirty_tracker::ring::{Harvester, RingEntry, RingFull};
use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, TrackedBitmap, Tracker};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_DIRTY_LOG_PAGE_OFFSET,
    KVM_EXIT_DIRTY_RING_FULL, KVM_MEM_LOG_DIRTY_PAGES, kvm_enable_cap, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// Guest memory in pages, and entries of the ring.
const PAGES: u64 = 256;
const ENTRIES: usize = 1024;
const CODE_AT: u64 = 0x1000;
/// `KVM_RESET_DIRTY_RINGS`, which kvm-ioctls does not have.
const RESET_DIRTY_RINGS: libc::c_ulong = 0xaec7;

/// What the guest runs, again after each halt.
const CODE: [u8; 26] = [
    0xb8, 0x00, 0x20, // mov ax, 0x2000
    0x8e, 0xd8, // mov ds, ax
    0xc6, 0x06, 0x00, 0x00, 1, // mov byte [0x0000], 1: page 0x20
    0xc6, 0x06, 0xff, 0x3f, 1, // mov byte [0x3fff], 1: page 0x23
    0xb8, 0x00, 0x70, // mov ax, 0x7000
    0x8e, 0xd8, // mov ds, ax
    0xa3, 0xff, 0x0f, // mov [0x0fff], ax: the end of page 0x70, and page 0x71
    0xf4, // hlt
    0xeb, 0xe6, // jmp to the first
];

/// A KVM guest and its memory, in which writes by the VMM mark the trees.
struct ExampleVm {
    fd: VmFd,
    vcpu: VcpuFd,
    ring: &'static [RingEntry],
    memory: GuestMemoryMmap<TrackedBitmap>,
}

impl ExampleVm {
    fn new(tracker: &Arc<Tracker>) -> Result<Self, Box<dyn Error>> {
        let slot = *tracker.layout().slots().next().ok_or("a layout has a slot")?;
        let bitmap = TrackedBitmap::new(tracker.clone(), slot.base);
        let region = MmapRegionBuilder::new_with_bitmap(slot.run().bytes() as usize, bitmap)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
            .build()?;
        let host = region.as_ptr() as u64;
        let region = GuestRegionMmap::new(region, GuestAddress(slot.base.gpa()));
        let memory = GuestMemoryMmap::from_regions(vec![region.ok_or("memory past 2^64")?])?;

        let fd = Kvm::new()?.create_vm()?;
        enable_ring(&fd)?; // before the first vCPU
        let kvm_slot = kvm_userspace_memory_region {
            slot: slot.id.0,
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            guest_phys_addr: slot.base.gpa(),
            memory_size: slot.run().bytes(),
            userspace_addr: host,
        };
        // SAFETY: the mapping lives in `memory`, as long as the VM.
        unsafe { fd.set_user_memory_region(kvm_slot)? };
        let vcpu = fd.create_vcpu(0)?;
        let ring = map_ring(&vcpu)?;
        let mut sregs = vcpu.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs)?;
        let mut regs = vcpu.get_regs()?;
        (regs.rip, regs.rflags) = (CODE_AT, 2);
        vcpu.set_regs(&regs)?;
        Ok(Self { fd, vcpu, ring, memory })
    }

    /// Runs the guest until it halts. Whenever its ring is full, `collect` empties it.
    fn run(
        &mut self,
        full: &RingFull,
        mut collect: impl FnMut(&Self) -> io::Result<()>,
    ) -> Result<(), Box<dyn Error>> {
        loop {
            match self.vcpu.run()? {
                VcpuExit::Hlt => return Ok(()),
                VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL) => {}
                other => return Err(format!("the guest ended with {other:?}").into()),
            }
            full.report();
            collect(self)?;
        }
    }
}

fn enable_ring(vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
    let enable = |cap| {
        let mut enable = kvm_enable_cap { cap, ..Default::default() };
        enable.args[0] = (ENTRIES * size_of::<RingEntry>()) as u64;
        vm.enable_cap(&enable)
    };
    enable(KVM_CAP_DIRTY_LOG_RING_ACQ_REL).or_else(|_| enable(KVM_CAP_DIRTY_LOG_RING))
}

fn map_ring(vcpu: &VcpuFd) -> io::Result<&'static [RingEntry]> {
    let bytes = ENTRIES * size_of::<RingEntry>();
    let (prot, offset) = (libc::PROT_READ | libc::PROT_WRITE, KVM_DIRTY_LOG_PAGE_OFFSET * 4096);
    let (null, fd) = (std::ptr::null_mut(), vcpu.as_raw_fd());
    // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing of ours.
    let map = unsafe { libc::mmap(null, bytes, prot, libc::MAP_SHARED, fd, offset.into()) };
    if map == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping has so many entries, which are atomics, and is never unmapped.
    Ok(unsafe { std::slice::from_raw_parts(map.cast(), ENTRIES) })
}

/// Harvests, reprotects, inserts: the types allow no other order.
fn collect(vm: &ExampleVm, harvester: &mut Harvester, tracker: &Tracker) -> io::Result<()> {
    let harvest = harvester.harvest([vm.ring]);
    // SAFETY: the call takes no argument and touches only the kernel's side of the rings.
    let count = unsafe { libc::ioctl(vm.fd.as_raw_fd(), RESET_DIRTY_RINGS) };
    let count = u32::try_from(count).map_err(|_| io::Error::last_os_error())?;
    let readable = harvest.reprotected(count);
    if !readable.is_trusted() {
        // A real VMM now stops and starts the logging of every slot, see `Harvester`.
        return Err(io::Error::other("the ring was overrun"));
    }
    readable.insert_into(tracker);
    Ok(())
}

/// Loads the guest and runs it twice. Returns what changed: by the VMM, then in each run.
///
/// # Errors
///
/// Returns an error if there is no /dev/kvm, or no dirty ring.
pub fn track() -> Result<[Vec<FrameRun>; 3], Box<dyn Error>> {
    let slot = Slot { id: SlotId(0), base: Gfn(0), frames: PAGES };
    let tracker = Arc::new(Tracker::new(Layout::new([slot])?));
    let mut vm = ExampleVm::new(&tracker)?;
    let mut harvester = Harvester::new(1, ENTRIES);
    let full = harvester.ring_full(0).ok_or("there is one vCPU")?;
    let mut subscription = tracker.subscribe("example")?;
    let mut drain = || {
        let dirty = subscription.drain();
        let runs = dirty.runs().collect();
        dirty.commit(); // the pages were sent or saved
        runs
    };

    vm.memory.write_slice(&CODE, GuestAddress(CODE_AT))?;
    let by_vmm = drain();
    let mut run = || -> Result<Vec<FrameRun>, Box<dyn Error>> {
        vm.run(&full, |vm| collect(vm, &mut harvester, &tracker))?;
        collect(&vm, &mut harvester, &tracker)?;
        Ok(drain())
    };
    Ok([by_vmm, run()?, run()?])
}

#[allow(dead_code, reason = "the test of this example calls `track`")]
fn main() -> Result<(), Box<dyn Error>> {
    for (runs, writer) in track()?.iter().zip(["the VMM", "the guest", "the guest, again"]) {
        let runs: Vec<String> = runs.iter().map(|run| run.to_string()).collect();
        println!("{writer} wrote {}", runs.join(", "));
    }
    Ok(())
}
