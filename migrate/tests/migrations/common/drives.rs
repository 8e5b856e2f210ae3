//! A guest that writes to its disks while it runs, and a factory that makes copies of disks.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::HostPair;
use driftline_dirty_tracker::{FrameRun, Gfn, Layout, NoMemory, Subscription, Tracker};
use driftline_guest::testing::{MemoryGuest, MemoryGuestFactory};
use driftline_guest::{
    Clock, CollectionReport, CopyBeforeWrite, DirtyLog, DriveCopy, DriveHead, GuestContents,
    GuestDrive, GuestError, GuestFactory, GuestIdentity, GuestRam, GuestWithCopies, HandOver,
    Lifecycle, Line, Origin, Populate, RunState, SavedPause, SavedState, Section, SharedGuest,
    Stateful, VcpuPauses, VmId, WriteProtection, WriteThrottle, block_layout,
};

const SECTOR: u64 = 512;

/// A disk, with its file and a model of its content.
pub struct TestDrive {
    pub head: DriveHead,
    path: PathBuf,
    tracker: Option<Arc<Tracker>>,
    model: Mutex<Vec<u8>>,
    /// Whether opening its file hangs.
    pub open_hangs: AtomicBool,
    /// Number of opens that began to hang.
    pub hung: AtomicU64,
}

impl TestDrive {
    /// Writes as a disk of a virtual machine: first the file, then the mark. `slowly` delays the
    /// mark.
    fn write(&self, offset: u64, bytes: &[u8], hole: bool, slowly: bool) {
        let file = OpenOptions::new().write(true).open(&self.path).unwrap();
        let mut model = self.model.lock().unwrap();
        if hole {
            let flags =
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, flags, offset, bytes.len() as u64).unwrap();
        } else {
            file.write_all_at(bytes, offset).unwrap();
        }
        model[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        if slowly {
            // The time between a device's write and its mark, in which a pass may begin.
            std::thread::sleep(Duration::from_millis(2));
        }
        let (start, end) =
            (Gfn::containing(offset), Gfn::containing(offset + bytes.len() as u64 - 1));
        let run = FrameRun { start, count: end.0 - start.0 + 1 };
        self.tracker.as_ref().unwrap().mark(run).unwrap();
    }
}

struct TestDriveHandle(Arc<TestDrive>);

impl GuestDrive for TestDriveHandle {
    fn head(&self) -> DriveHead {
        self.0.head.clone()
    }
    fn subscribe(&self, name: &str) -> Result<Option<Subscription>, NoMemory> {
        self.0.tracker.as_ref().map(|tracker| tracker.subscribe(name)).transpose()
    }
    fn open(&self) -> io::Result<File> {
        hang(&self.0.open_hangs, &self.0.hung);
        File::open(&self.0.path)
    }
    fn copy_before_write(&self) -> Option<Arc<CopyBeforeWrite>> {
        // A migration does not use copy-before-write.
        None
    }
}

/// A guest with disks. A thread writes to the disks while the guest runs.
pub struct GuestWithDrives {
    guest: Arc<MemoryGuest>,
    pub drives: Vec<Arc<TestDrive>>,
    runs: Arc<RwLock<bool>>,
    over: Arc<AtomicBool>,
    pub writes: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// xorshift64*.
struct XorShiftRng(u64);

impl XorShiftRng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

impl GuestWithDrives {
    /// Returns a running guest with disks of these sizes in bytes. The first half of each has
    /// content. The last of several disks is read-only. `seed` determines the writes.
    pub fn start(guest: Arc<MemoryGuest>, dir: &Path, sizes: &[u64], seed: u64) -> Arc<Self> {
        let drives: Vec<_> = sizes
            .iter()
            .enumerate()
            .map(|(i, bytes)| {
                let readonly = i > 0 && i == sizes.len() - 1;
                let head = DriveHead { id: format!("disk{i}"), bytes: *bytes, readonly };
                let path = dir.join(&head.id);
                let mut model = vec![0; *bytes as usize];
                let half = (*bytes / 2) as usize;
                model[..half].iter_mut().enumerate().for_each(|(at, b)| *b = (at / 4096) as u8 | 1);
                let file = File::create_new(&path).unwrap();
                // Longer than the disk, with content past its end.
                file.set_len(*bytes + 8192).unwrap();
                file.write_all_at(&model[..half], 0).unwrap();
                file.write_all_at(&[0xee; 8192], *bytes).unwrap();
                let layout = block_layout(*bytes).unwrap();
                let tracker = (!readonly).then(|| Arc::new(Tracker::new(layout)));
                let (open_hangs, hung) = Default::default();
                let model = Mutex::new(model);
                Arc::new(TestDrive { head, path, tracker, model, open_hangs, hung })
            })
            .collect();
        let (runs, over, writes) = (Arc::new(RwLock::new(true)), Arc::default(), Arc::default());
        let mut disked = Self { guest, drives, runs, over, writes, thread: None };
        disked.thread = Some(disked.start_writer(seed));
        Arc::new(disked)
    }

    fn start_writer(&self, seed: u64) -> JoinHandle<()> {
        let drives: Vec<_> = self.drives.iter().filter(|d| d.tracker.is_some()).cloned().collect();
        let (runs, over, writes) = (self.runs.clone(), self.over.clone(), self.writes.clone());
        std::thread::spawn(move || {
            let mut random = XorShiftRng(seed | 1);
            while !over.load(Ordering::SeqCst) {
                let guard = runs.read().unwrap();
                if *guard {
                    let drive = &drives[random.below(drives.len() as u64) as usize];
                    let sectors = drive.head.bytes / SECTOR;
                    let at = random.below(sectors);
                    let len = (1 + random.below(24)).min(sectors - at) * SECTOR;
                    let kind = random.below(8);
                    let byte = if kind < 2 { 0 } else { random.below(256) as u8 };
                    let slowly = random.below(16) == 0;
                    drive.write(at * SECTOR, &vec![byte; len as usize], kind == 0, slowly);
                    writes.fetch_add(1, Ordering::SeqCst);
                }
                drop(guard);
                // The pace of the guest's writes.
                std::thread::sleep(Duration::from_millis(1));
            }
        })
    }

    pub fn guest(&self) -> &Arc<MemoryGuest> {
        &self.guest
    }

    /// Compares a copy of disk `i` with the model.
    pub fn compare(&self, i: usize, copy: &Path) {
        let (model, copy) = (self.drives[i].model.lock().unwrap(), std::fs::read(copy).unwrap());
        assert_eq!(copy.len(), model.len(), "disk{i}");
        let wrong = model.chunks(512).zip(copy.chunks(512)).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "disk{i}: the first wrong sector");
        let own = std::fs::read(&self.drives[i].path).unwrap();
        assert_eq!(&own[..model.len()], &model[..], "disk{i}: the file of the guest");
    }
}

impl Drop for GuestWithDrives {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || std::thread::panicking());
        }
    }
}

driftline_guest::delegate!(
    GuestWithDrives as disked => *disked.guest;
    GuestIdentity, Populate, DirtyLog, WriteThrottle, Stateful, HandOver,
);

impl GuestContents for GuestWithDrives {
    fn ram(&self) -> &GuestRam {
        self.guest.ram()
    }
    fn memory_right(&self) -> &driftline_guest::MemoryRight {
        self.guest.memory_right()
    }
    fn populated(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.guest.populated()
    }
    fn resident(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.guest.resident()
    }
    fn fetch(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
        self.guest.fetch(frames)
    }
    fn write_protection(&self) -> Result<Option<Box<dyn WriteProtection>>, GuestError> {
        self.guest.write_protection()
    }
    fn drives(&self) -> Vec<Box<dyn GuestDrive>> {
        self.drives
            .iter()
            .map(|d| Box::new(TestDriveHandle(d.clone())) as Box<dyn GuestDrive>)
            .collect()
    }
}

impl Lifecycle for GuestWithDrives {
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn pause(&self) -> Result<RunState, GuestError> {
        let before = self.guest.pause()?;
        *self.runs.write().unwrap() = false;
        Ok(before)
    }
    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        let since = Instant::now();
        let before = self.pause()?;
        Ok(SavedPause { before, since, saved: self.save_state() })
    }
    fn resume(&self) -> Result<(), GuestError> {
        self.guest.resume()?;
        *self.runs.write().unwrap() = true;
        Ok(())
    }
    fn stop(&self, why: &str) {
        *self.runs.write().unwrap() = false;
        self.guest.stop(why);
    }
    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        self.guest.vcpu_pauses()
    }
}

/// Faults of copies.
#[derive(Default)]
pub struct CopyFaults {
    /// Bytes after which writing fails with ENOSPC; 0: never.
    pub room: AtomicU64,
    /// Whether making a copy durable fails.
    pub sync_fails: AtomicBool,
    /// Whether making a copy hangs.
    pub make_hangs: AtomicBool,
    /// Whether writing hangs.
    pub write_hangs: AtomicBool,
    /// Whether making a copy durable hangs.
    pub sync_hangs: AtomicBool,
    /// Number of operations that began to hang.
    pub hung: AtomicU64,
    /// Number of writes that are not durable yet.
    pub unsynced: AtomicU64,
}

/// Builds guests without disks, and makes copies in `dir` under the disks' names.
pub struct DriveCopyFactory {
    pub guests: MemoryGuestFactory,
    pub dir: PathBuf,
    pub faults: Arc<CopyFaults>,
}

impl DriveCopyFactory {
    /// Returns a factory for receivers of `hosts`.
    pub fn new(hosts: &HostPair, dir: &Path) -> Self {
        Self { guests: hosts.factory(), dir: dir.to_owned(), faults: Arc::default() }
    }
}

struct FaultyCopy {
    file: File,
    path: PathBuf,
    faults: Arc<CopyFaults>,
    written: AtomicU64,
    kept: AtomicBool,
}

/// Returns once `hangs` is false.
fn hang(hangs: &AtomicBool, hung: &AtomicU64) {
    if hangs.load(Ordering::SeqCst) {
        hung.fetch_add(1, Ordering::SeqCst);
    }
    while hangs.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl DriveCopy for FaultyCopy {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        hang(&self.faults.write_hangs, &self.faults.hung);
        let room = self.faults.room.load(Ordering::SeqCst);
        let written = self.written.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        if room > 0 && written + bytes.len() as u64 > room {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.faults.unsynced.fetch_add(1, Ordering::SeqCst);
        self.file.write_all_at(bytes, offset)
    }
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.faults.unsynced.fetch_add(1, Ordering::SeqCst);
        self.file.write_all_at(&vec![0; len as usize], offset)
    }
    fn make_durable(&self) -> io::Result<()> {
        hang(&self.faults.sync_hangs, &self.faults.hung);
        if self.faults.sync_fails.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.faults.unsynced.store(0, Ordering::SeqCst);
        Ok(())
    }
    fn yield_to_guest(&self) -> io::Result<()> {
        Ok(())
    }
    fn keep(&self) {
        assert_eq!(self.faults.unsynced.load(Ordering::SeqCst), 0, "all writes are durable");
        self.kept.store(true, Ordering::SeqCst);
    }
}

impl Drop for FaultyCopy {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::SeqCst) {
            let removed = std::fs::remove_file(&self.path);
            // The directory may be gone if a test has failed.
            assert!(removed.is_ok() || !self.path.exists(), "{removed:?}");
        }
    }
}

impl GuestFactory for DriveCopyFactory {
    type Guest = MemoryGuest;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<MemoryGuest>, GuestError> {
        if !drives.is_empty() {
            hang(&self.faults.make_hangs, &self.faults.hung);
        }
        let copy = |head: &DriveHead| {
            let path = self.dir.join(&head.id);
            let made = File::create_new(&path).and_then(|file| {
                file.set_len(head.bytes)?;
                Ok(file)
            });
            let failed =
                |e: io::Error| GuestError::System { what: "making a copy", cause: e.into() };
            let file = made.map_err(failed)?;
            let (faults, written) = (self.faults.clone(), AtomicU64::new(0));
            let copy = FaultyCopy { file, path, faults, written, kept: AtomicBool::new(false) };
            Ok(Box::new(copy) as Box<dyn DriveCopy>)
        };
        let copies: Result<Vec<_>, GuestError> = drives.iter().map(copy).collect();
        Ok((self.guests.create(vm_id, config)?, copies?))
    }

    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        shared: &SharedGuest,
    ) -> Result<Arc<MemoryGuest>, GuestError> {
        self.guests.create_on(vm_id, config, shared)
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<MemoryGuest>, GuestError> {
        self.guests.create_with_drives(from, config, drives)
    }
}
