//! Snapshots.

use std::path::PathBuf;

use serde::Deserialize;

/// Pages that a snapshot's memory file receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
pub enum SnapshotType {
    /// Those written since the last snapshot.
    Diff,
    /// All.
    #[default]
    Full,
}

/// Body of `PUT /snapshot/create`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshotParams {
    /// Pages that the memory file receives.
    #[serde(default)]
    pub snapshot_type: SnapshotType,
    /// File that receives the machine's state.
    pub snapshot_path: PathBuf,
    /// File that receives the guest's memory.
    pub mem_file_path: PathBuf,
    /// Driftline's own: whether a guest that runs is accepted. It is paused for as long as for a
    /// checkpoint, and resumes.
    #[serde(default)]
    pub live: bool,
}

/// Where a snapshot's memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub enum MemBackendType {
    /// A file.
    File,
    /// A process that handles page faults and listens on a unix socket.
    Uffd,
}

/// A snapshot's memory.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemBackendConfig {
    /// The file, or the socket.
    pub backend_path: PathBuf,
    /// Where the memory comes from.
    pub backend_type: MemBackendType,
}

/// Another tap for an interface of the snapshot. Firecracker ignores unknown fields here.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct NetworkOverride {
    /// The interface's name.
    pub iface_id: String,
    /// The tap.
    pub host_dev_name: String,
}

/// Another socket for the vsock device. Firecracker ignores unknown fields here.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct VsockOverride {
    /// The socket.
    pub uds_path: String,
}

/// Pages of the host that back the memory of a loaded guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
pub enum SnapshotLoadHugePageConfig {
    /// Those that the snapshot names.
    #[default]
    Snapshot,
    /// 4 KiB.
    None,
    /// Transparent huge pages.
    Transparent,
    /// 2 MiB pages of the host's pool.
    #[serde(rename = "2M")]
    Hugetlbfs2M,
}

/// Body of `PUT /snapshot/load`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadSnapshotConfig {
    /// File of the machine's state.
    pub snapshot_path: PathBuf,
    /// Deprecated: file of the guest's memory, instead of `mem_backend`.
    pub mem_file_path: Option<PathBuf>,
    /// The guest's memory.
    pub mem_backend: Option<MemBackendConfig>,
    /// Deprecated name of `track_dirty_pages`.
    #[serde(default)]
    pub enable_diff_snapshots: bool,
    /// Whether writes are tracked.
    #[serde(default)]
    pub track_dirty_pages: bool,
    /// Whether the guest runs immediately.
    #[serde(default)]
    pub resume_vm: bool,
    /// Other taps.
    #[serde(default)]
    pub network_overrides: Vec<NetworkOverride>,
    /// Another socket.
    pub vsock_override: Option<VsockOverride>,
    /// Whether the guest's clock advances by the time since the snapshot.
    #[serde(default)]
    pub clock_realtime: bool,
    /// Pages that back the memory.
    #[serde(default)]
    pub huge_pages: SnapshotLoadHugePageConfig,
}

/// A snapshot to load: the body of `PUT /snapshot/load` without its deprecated fields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadSnapshotParams {
    /// File of the machine's state.
    pub snapshot_path: PathBuf,
    /// The guest's memory.
    pub mem_backend: MemBackendConfig,
    /// Whether writes are tracked.
    pub track_dirty_pages: bool,
    /// Whether the guest runs immediately.
    pub resume_vm: bool,
    /// Other taps.
    pub network_overrides: Vec<NetworkOverride>,
    /// Another socket.
    pub vsock_override: Option<VsockOverride>,
    /// Whether the guest's clock advances by the time since the snapshot.
    pub clock_realtime: bool,
    /// Pages that back the memory.
    pub huge_pages: SnapshotLoadHugePageConfig,
}
