//! Pages that KVM itself shares with a guest are damaged in a checkpoint. A lazy restore must end,
//! whichever page it is.
//!
//! Four of them belong to paravirtual features, which a guest enables by writing the address of a
//! page: kvmclock, steal time, PV EOI and asynchronous page faults. A guest sees all of these
//! features that KVM has; with `--cpu baseline` it sees only kvmclock. KVM reads and writes the
//! page of kvmclock when the MSR is restored, those of steal time and asynchronous page faults when
//! the vCPU first runs, and that of PV EOI when an interrupt is injected. The VMM writes the fifth
//! page, which belongs to the generation ID.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::common::{TestDir, Vmm, wait_for};
use driftline_dirty_tracker::PAGE_SIZE;
use driftline_machine::testing::{Elf, kvm_or_skip};
use kvm_ioctls::Kvm;

/// Offset of the mark that identifies a page. KVM and the VMM use only bytes below it.
const MARK_AT: u64 = 0x800;

/// A page that the kernel or the VMM uses, and the MSR writes with which the guest enables it.
struct SharedPage {
    name: &'static str,
    gpa: u32,
    /// MSRs and their values; empty for a page that is always used.
    msrs: Vec<(u32, u32)>,
}

impl SharedPage {
    fn mark(&self) -> u32 {
        0x5a5a_0000 | self.gpa >> 12
    }
}

/// A feature's name, its CPUID bits, and the MSR writes that enable it.
type Feature = (&'static str, &'static [u32], Vec<(u32, u32)>);

/// Returns the pages of this host's features.
fn shared_pages() -> Vec<SharedPage> {
    let cpuid = Kvm::new().unwrap().get_supported_cpuid(80).unwrap();
    let leaf = cpuid.as_slice().iter().find(|entry| entry.function == 0x4000_0001).unwrap();
    let offered = |bits: &[u32]| bits.iter().all(|bit| leaf.eax >> bit & 1 == 1);
    let mut pages = vec![SharedPage { name: "the generation ID", gpa: 0xf_f000, msrs: Vec::new() }];
    let at = |i: u32| 0x20_0000 + i * PAGE_SIZE as u32;
    let features: [Feature; 4] = [
        ("kvmclock", &[3], vec![(0x4b56_4d01, at(0) | 1)]),
        ("steal time", &[5], vec![(0x4b56_4d03, at(1) | 1)]),
        ("PV EOI", &[6], vec![(0x4b56_4d04, at(2) | 1)]),
        // Signals an arrived page by an interrupt, whose vector is written first.
        ("async page faults", &[4, 14], vec![(0x4b56_4d06, 0x40), (0x4b56_4d02, at(3) | 1 | 8)]),
    ];
    for ((name, bits, msrs), i) in features.into_iter().zip(0..) {
        match offered(bits) {
            true => pages.push(SharedPage { name, gpa: at(i), msrs }),
            false => println!("not offered by this host: {name}"),
        }
    }
    pages
}

/// Returns a kernel that marks and enables all of `pages`, prints an R, and then loops forever.
fn kernel(pages: &[SharedPage]) -> Vec<u8> {
    let mut code = Vec::new();
    for page in pages {
        // mov dword [gpa + MARK_AT], mark
        code.extend([0xc7, 0x05]);
        code.extend((page.gpa + MARK_AT as u32).to_le_bytes());
        code.extend(page.mark().to_le_bytes());
        for (msr, value) in &page.msrs {
            // mov ecx, msr; mov eax, value; xor edx, edx; wrmsr
            code.push(0xb9);
            code.extend(msr.to_le_bytes());
            code.push(0xb8);
            code.extend(value.to_le_bytes());
            code.extend([0x31, 0xd2, 0x0f, 0x30]);
        }
    }
    // mov dx, 0x3f8; mov al, 'R'; out dx, al; jmp $
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'R', 0xee, 0xeb, 0xfe]);
    Elf::new(&code).bytes()
}

/// Returns the offsets of `page`'s mark in the page file. There are several if the page changed
/// while the guest's memory was copied.
fn marks(file: &File, page: &SharedPage) -> Vec<u64> {
    let slots = file.metadata().unwrap().len() / PAGE_SIZE;
    let is_there = |at: &u64| {
        let mut mark = [0; 4];
        file.read_exact_at(&mut mark, *at).unwrap();
        mark == page.mark().to_le_bytes()
    };
    let found: Vec<u64> =
        (0..slots).map(|slot| slot * PAGE_SIZE + MARK_AT).filter(is_there).collect();
    assert!(!found.is_empty(), "the checkpoint has no page of {}", page.name);
    found
}

#[test]
fn lazy_restore_ends_whichever_shared_page_is_damaged() {
    if !kvm_or_skip("lazy_restore_ends_whichever_shared_page_is_damaged") {
        return;
    }
    let tmp = TestDir::new();
    let pages = shared_pages();
    std::fs::write(tmp.path("kernel"), kernel(&pages)).unwrap();
    let (kernel, store) = (tmp.text("kernel"), tmp.text("store"));
    let mut guest = Vmm::run(&tmp, "guest", &["--mem", "32M", "--kernel", &kernel]);
    wait_for("the guest", || (tmp.read("guest.serial") == "R").then_some(()));
    guest.tell(&["checkpoint", "--store", &store]);
    guest.kill();

    let restore = ["restore", "--lazy", "--store", &store];
    let mut whole = Vmm::start(&tmp, "whole", &restore);
    whole.await_message(" pages follow on demand");
    whole.tell(&["stop", "--wait"]);
    let file = tmp.path("store").join("pages-1");
    let file = File::options().read(true).write(true).open(file).unwrap();
    for page in &pages {
        let marks = marks(&file, page);
        let write = |mark: u32| {
            marks.iter().for_each(|at| file.write_all_at(&mark.to_le_bytes(), *at).unwrap());
        };
        write(!page.mark());
        let mut damaged = Vmm::start(&tmp, "damaged", &restore);
        assert_eq!(damaged.wait(), Some(1), "{}: {}", page.name, damaged.stderr());
        let lost = format!("page {:#x} of checkpoint 1 is lost", page.gpa >> 12);
        assert!(damaged.stderr().contains(&lost), "{}: {}", page.name, damaged.stderr());
        write(page.mark());
    }
}
