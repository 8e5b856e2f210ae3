//! vCPUs and memory.

use driftline_machine::limits::MAX_VCPUS;
use serde::{Deserialize, Serialize};

use super::super::fault::MachineFault;

/// Pages of the host that back guest memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum HugePageConfig {
    /// 4 KiB.
    #[default]
    None,
    /// Transparent huge pages.
    Transparent,
    /// 2 MiB pages of the host's pool.
    #[serde(rename = "2M")]
    Hugetlbfs2M,
}

impl HugePageConfig {
    /// Returns whether guest memory of this size consists of whole pages.
    pub fn divides(self, mem_size_mib: usize) -> bool {
        match self {
            Self::None => true,
            Self::Transparent | Self::Hugetlbfs2M => mem_size_mib.is_multiple_of(2),
        }
    }
}

/// A named CPU template.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub enum StaticCpuTemplate {
    /// Intel C3.
    C3,
    /// Intel T2.
    T2,
    /// Intel T2S.
    T2S,
    /// No template.
    None,
    /// Intel T2CL.
    T2CL,
    /// AMD T2A.
    T2A,
}

/// Body of `PUT /machine-config`, and the answer to `GET /machine-config`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "struct MachineConfig")]
pub struct MachineConfiguration {
    /// Number of vCPUs.
    pub vcpu_count: u8,
    /// Size of guest memory, in MiB.
    pub mem_size_mib: usize,
    /// Whether each two vCPUs are threads of one core.
    #[serde(default)]
    pub smt: bool,
    /// The named CPU template. Never shown, because Driftline accepts only `None`.
    #[serde(default, skip_serializing)]
    pub cpu_template: Option<StaticCpuTemplate>,
    /// Whether writes are tracked, so that snapshots can have the changed pages only.
    #[serde(default)]
    pub track_dirty_pages: bool,
    /// Pages that back guest memory.
    #[serde(default)]
    pub huge_pages: HugePageConfig,
}

impl Default for MachineConfiguration {
    fn default() -> Self {
        Self {
            vcpu_count: 1,
            mem_size_mib: 128,
            smt: false,
            cpu_template: None,
            track_dirty_pages: false,
            huge_pages: HugePageConfig::None,
        }
    }
}

/// Body of `PATCH /machine-config`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineConfigUpdate {
    /// Number of vCPUs.
    pub vcpu_count: Option<u8>,
    /// Size of guest memory, in MiB.
    pub mem_size_mib: Option<usize>,
    /// Whether each two vCPUs are threads of one core.
    pub smt: Option<bool>,
    /// The named CPU template.
    pub cpu_template: Option<StaticCpuTemplate>,
    /// Whether writes are tracked.
    pub track_dirty_pages: Option<bool>,
    /// Pages that back guest memory.
    pub huge_pages: Option<HugePageConfig>,
}

impl From<MachineConfiguration> for MachineConfigUpdate {
    fn from(config: MachineConfiguration) -> Self {
        Self {
            vcpu_count: Some(config.vcpu_count),
            mem_size_mib: Some(config.mem_size_mib),
            smt: Some(config.smt),
            cpu_template: config.cpu_template,
            track_dirty_pages: Some(config.track_dirty_pages),
            huge_pages: Some(config.huge_pages),
        }
    }
}

impl MachineConfiguration {
    /// Returns this configuration with the values of `update`.
    ///
    /// # Errors
    ///
    /// The first value that is out of range.
    pub(crate) fn updated(&self, update: &MachineConfigUpdate) -> Result<Self, MachineFault> {
        let vcpu_count = update.vcpu_count.unwrap_or(self.vcpu_count);
        let smt = update.smt.unwrap_or(self.smt);
        let is_odd = vcpu_count > 1 && !vcpu_count.is_multiple_of(2);
        if vcpu_count == 0 || vcpu_count > MAX_VCPUS || (smt && is_odd) {
            return Err(MachineFault::Vcpus);
        }
        let mem_size_mib = update.mem_size_mib.unwrap_or(self.mem_size_mib);
        let huge_pages = update.huge_pages.unwrap_or(self.huge_pages);
        if mem_size_mib == 0 || !huge_pages.divides(mem_size_mib) {
            return Err(MachineFault::Memory);
        }
        let track_dirty_pages = update.track_dirty_pages.unwrap_or(self.track_dirty_pages);
        let cpu_template = None;
        Ok(Self { vcpu_count, mem_size_mib, smt, cpu_template, track_dirty_pages, huge_pages })
    }
}
