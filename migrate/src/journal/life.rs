//! How long what is written to the directory stays found: a boot of the host and a mount.

use std::fs;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use uuid::Uuid;

/// Where Linux names the host's boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Has a file's mount told, by the number that is not used again: `STATX_MNT_ID_UNIQUE`.
const MOUNT: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// The time in which every process finds in the directory what any of them has put there, durable
/// or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Life {
    /// The host's boot.
    pub(super) boot: Uuid,
    /// The mount that the directory is on, by a number that is not used again in that boot; of
    /// Linux before 6.8 it is not known.
    pub(super) mount: Option<u64>,
}

impl Life {
    /// The present one of `dir`, where it can be told.
    pub(super) fn of(dir: &Path) -> Option<Self> {
        let boot = fs::read_to_string(BOOT).ok()?;
        let boot = Uuid::parse_str(boot.trim()).ok()?;
        let stat = statx(CWD, dir, AtFlags::empty(), MOUNT).ok();
        let told = stat.filter(|stat| stat.stx_mask & MOUNT.bits() != 0);
        Some(Self { boot, mount: told.map(|stat| stat.stx_mnt_id) })
    }
}
