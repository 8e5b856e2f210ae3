//! Firecracker's operations, as parsed from method, path and body.

use serde_json::Value;

use super::model::{
    BalloonDeviceConfig, BalloonUpdateConfig, BalloonUpdateStatsConfig, BlockDeviceConfig,
    BlockDeviceUpdateConfig, BootSourceConfig, CreateSnapshotParams, CustomCpuTemplate,
    EntropyDeviceConfig, LoadSnapshotParams, LoggerConfig, MachineConfigUpdate,
    MemoryHotplugConfig, MemoryHotplugSizeUpdate, MetricsConfig, MmdsConfig,
    NetworkInterfaceConfig, NetworkInterfaceUpdateConfig, PmemConfig, PmemDeviceUpdateConfig,
    SerialConfig, StartHintingCmd, VsockDeviceConfig,
};

/// A request of Firecracker's API.
#[derive(Clone, PartialEq, Debug)]
pub enum Operation {
    /// `GET /`
    GetInstance,
    /// `GET /version`
    GetVersion,
    /// `GET /machine-config`
    GetMachine,
    /// `GET /vm/config`
    GetConfig,
    /// `GET /balloon`
    GetBalloon,
    /// `GET /balloon/statistics`
    GetBalloonStatistics,
    /// `GET /balloon/hinting/status`
    GetHinting,
    /// `GET /mmds`
    GetMetadata,
    /// `GET /hotplug/memory`
    GetMemoryHotplug,
    /// `PUT /actions` with `InstanceStart`
    Start,
    /// `PUT /actions` with `FlushMetrics`
    FlushMetrics,
    /// `PUT /actions` with `SendCtrlAltDel`
    SendCtrlAltDel,
    /// `PUT /balloon`
    PutBalloon(BalloonDeviceConfig),
    /// `PUT /boot-source`
    PutBootSource(BootSourceConfig),
    /// `PUT /cpu-config`
    PutCpuTemplate(CustomCpuTemplate),
    /// `PUT /drives/{id}`
    PutDrive(BlockDeviceConfig),
    /// `PUT /entropy`
    PutEntropy(EntropyDeviceConfig),
    /// `PUT /hotplug/memory`
    PutMemoryHotplug(MemoryHotplugConfig),
    /// `PUT /logger`
    PutLogger(LoggerConfig),
    /// `PUT /metrics`
    PutMetrics(MetricsConfig),
    /// `PUT /mmds`
    PutMetadata(Value),
    /// `PUT /mmds/config`
    PutMmds(MmdsConfig),
    /// `PUT /network-interfaces/{id}`
    PutInterface(NetworkInterfaceConfig),
    /// `PUT /pmem/{id}`
    PutPmem(PmemConfig),
    /// `PUT /serial`
    PutSerial(SerialConfig),
    /// `PUT /snapshot/create`
    CreateSnapshot(CreateSnapshotParams),
    /// `PUT /snapshot/load`
    LoadSnapshot(LoadSnapshotParams),
    /// `PUT /vsock`
    PutVsock(VsockDeviceConfig),
    /// `PUT /machine-config` or `PATCH /machine-config`
    UpdateMachine(MachineConfigUpdate),
    /// `PATCH /balloon`
    PatchBalloon(BalloonUpdateConfig),
    /// `PATCH /balloon/statistics`
    PatchBalloonStatistics(BalloonUpdateStatsConfig),
    /// `PATCH /balloon/hinting/start`
    StartHinting(StartHintingCmd),
    /// `PATCH /balloon/hinting/stop`
    StopHinting,
    /// `PATCH /drives/{id}`
    PatchDrive(BlockDeviceUpdateConfig),
    /// `PATCH /hotplug/memory`
    PatchMemoryHotplug(MemoryHotplugSizeUpdate),
    /// `PATCH /mmds`
    PatchMetadata(Value),
    /// `PATCH /network-interfaces/{id}`
    PatchInterface(NetworkInterfaceUpdateConfig),
    /// `PATCH /pmem/{id}`
    PatchPmem(PmemDeviceUpdateConfig),
    /// `PATCH /vm` with `Paused`
    Pause,
    /// `PATCH /vm` with `Resumed`
    Resume,
    /// `DELETE /drives/{id}`, `DELETE /network-interfaces/{id}` or `DELETE /pmem/{id}`, which
    /// Firecracker does not document
    Unplug(String),
}
