//! The boot of the host, and the mount of the journal's directory.

use std::fs;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use uuid::Uuid;

/// File with the id of the host's boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Requests a mount id that is never reused: `STATX_MNT_ID_UNIQUE`.
const MOUNT: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// Identifies a period in which every process sees what any other has written to the directory,
/// synced or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BootAndMount {
    /// The host's boot.
    pub(super) boot: Uuid,
    /// Id of the directory's mount, never reused in that boot; unknown before Linux 6.8.
    pub(super) mount: Option<u64>,
}

impl BootAndMount {
    /// Returns the current boot, and the mount of `dir`; `None` if the host has no boot id.
    pub(super) fn of(dir: &Path) -> Option<Self> {
        let boot = fs::read_to_string(BOOT).ok()?;
        let boot = Uuid::parse_str(boot.trim()).ok()?;
        let stat = statx(CWD, dir, AtFlags::empty(), MOUNT).ok();
        let known = stat.filter(|stat| stat.stx_mask & MOUNT.bits() != 0);
        Some(Self { boot, mount: known.map(|stat| stat.stx_mnt_id) })
    }
}
