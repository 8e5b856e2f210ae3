//! Memory that is mapped privately from a file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_store::MemoryFileLayout;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::{Discarder, HOLE_END, HugePages, Memory, MemoryOptions, PrivateFile, layout};

/// Memory on both sides of the hole.
const BYTES: u64 = 5 << 30;
/// The first frame above the hole.
const HIGH: u64 = HOLE_END / PAGE_SIZE;

fn run(start: u64, count: u64) -> FrameRun {
    FrameRun { start: Gfn(start), count }
}

/// A file with data in a few frames, and memory that is mapped from it.
struct FileMemory {
    file: File,
    memory: Memory,
}

impl FileMemory {
    fn new(data: &[FrameRun]) -> Self {
        let file = tempfile::tempfile().unwrap();
        let places = MemoryFileLayout::new(&layout(BYTES).unwrap());
        file.set_len(places.bytes()).unwrap();
        for (part, offset) in data.iter().flat_map(|run| places.parts(*run)) {
            file.write_all_at(&vec![0xa5; part.bytes() as usize], offset).unwrap();
        }
        let of = PrivateFile::from(file.try_clone().unwrap());
        let memory = Memory::of_file(BYTES, &MemoryOptions::default(), &of).unwrap();
        Self { file, memory }
    }

    fn byte(&self, gfn: u64) -> u8 {
        self.memory.ram().read_obj(GuestAddress(Gfn(gfn).gpa() + 77)).unwrap()
    }

    fn write(&self, gfn: u64, byte: u8) {
        self.memory.ram().write_obj(byte, GuestAddress(Gfn(gfn).gpa() + 77)).unwrap();
    }

    /// Returns the frame at page `n` of the file.
    fn page_of_file(&self, n: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE_SIZE as usize];
        self.file.read_exact_at(&mut page, n * PAGE_SIZE).unwrap();
        page
    }
}

#[test]
fn memory_has_the_file_and_keeps_writes() {
    let of = FileMemory::new(&[run(3, 2), run(HIGH + 1, 1)]);
    let mut writes = of.memory.tracker().subscribe("test").unwrap();
    assert_eq!([2, 3, 4, 5, HIGH, HIGH + 1].map(|gfn| of.byte(gfn)), [0, 0xa5, 0xa5, 0, 0, 0xa5]);
    of.write(3, 1);
    of.write(100, 2);
    of.write(HIGH + 5, 3);
    assert_eq!([3, 100, HIGH + 5].map(|gfn| of.byte(gfn)), [1, 2, 3]);
    let written: Vec<_> = writes.drain().runs().collect();
    assert_eq!(written, [run(3, 1), run(100, 1), run(HIGH + 5, 1)]);
    assert_eq!(of.page_of_file(3), [0xa5; 4096], "the file gets no writes");
    assert_eq!(of.page_of_file(100), [0; 4096]);
    // Other memory of the same file.
    let other = PrivateFile::from(of.file.try_clone().unwrap());
    let memory = Memory::of_file(BYTES, &MemoryOptions::default(), &other).unwrap();
    let other = FileMemory { memory, file: of.file.try_clone().unwrap() };
    assert_eq!([3, 100].map(|gfn| other.byte(gfn)), [0xa5, 0]);
}

#[test]
fn resident_frames_are_data_and_writes() {
    let of = FileMemory::new(&[run(3, 2), run(0xbffff, 1), run(HIGH, 2)]);
    of.write(9, 1);
    of.write(4, 1);
    of.write(HIGH + 7, 1);
    let resident = of.memory.resident().unwrap();
    let has =
        |run: &FrameRun| resident.iter().any(|r| r.start <= run.start && r.end() >= run.end());
    let expected = [run(3, 2), run(9, 1), run(0xbffff, 1), run(HIGH, 2), run(HIGH + 7, 1)];
    assert!(expected.iter().all(has), "{resident:?}");
    // The kernel may map pages around those that were touched, but not all of the file.
    assert!(resident.iter().map(|run| run.count).sum::<u64>() < 1000, "{resident:?}");
    assert!(resident.iter().all(|run| run.start.0 >= HIGH || run.end().0 <= 0xc0000));
}

#[test]
fn discarded_frame_does_not_show_the_file() {
    let of = FileMemory::new(&[run(16, 64)]);
    let mut writes = of.memory.tracker().subscribe("test").unwrap();
    of.write(20, 1);
    writes.drain().commit();
    let mut discarder = Discarder::default();
    // Written, only read, and never touched.
    assert_eq!(of.byte(21), 0xa5);
    assert_eq!(discarder.discard(of.memory.ram(), run(20, 4)).unwrap(), 4);
    assert_eq!((19..25).map(|gfn| of.byte(gfn)).collect::<Vec<_>>(), [0xa5, 0, 0, 0, 0, 0xa5]);
    assert_eq!(writes.drain().runs().collect::<Vec<_>>(), [run(20, 4)]);
    assert_eq!(of.page_of_file(20), [0xa5; 4096]);
    of.write(22, 9);
    assert_eq!(discarder.discard(of.memory.ram(), run(22, 1)).unwrap(), 1, "once more");
    assert_eq!(of.byte(22), 0);
    // Frames that neither the file nor the guest has.
    assert_eq!(discarder.discard(of.memory.ram(), run(0x1_0000, 8)).unwrap(), 0);
}

#[test]
fn file_memory_is_neither_protected_nor_filled() {
    let of = FileMemory::new(&[]);
    assert!(of.memory.write_protection().unwrap().is_none());
    assert!(of.memory.memory_loader().is_none());
}

#[test]
fn file_that_is_too_short_is_refused() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES - 1).unwrap();
    let refused = Memory::of_file(BYTES, &MemoryOptions::default(), &file.into());
    let message = refused.err().unwrap().to_string();
    assert!(message.starts_with("the file of guest memory has 5368709119 bytes"), "{message}");
}

#[test]
fn transparent_huge_pages_are_asked_for() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES).unwrap();
    let file = PrivateFile::from(file);
    let has_advice = |huge_pages| {
        let options = MemoryOptions { huge_pages, ..MemoryOptions::default() };
        let memory = Memory::of_file(BYTES, &options, &file).unwrap();
        let mappings = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = memory.ram().iter().next().unwrap().as_ptr();
        let mut ours = mappings.split_once(&format!("\n{:08x}-", start.addr())).unwrap().1.lines();
        ours.find(|line| line.starts_with("VmFlags:")).unwrap().contains(" hg")
    };
    assert!(has_advice(Some(HugePages::Thp)));
    assert!(![None, Some(HugePages::Hugetlbfs)].into_iter().any(has_advice));
}
