//! Turns the file of `--config-file` into the requests that do the same, and their refusals into
//! the texts that Firecracker has for the file.

use std::io;
use std::path::Path;

use super::fault::ApiFault;
use super::model::{ConfigFile, CpuTemplateSource, MachineConfigUpdate};
use super::operation::Operation;

/// Why a configuration file is refused before any of its requests.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileFault {
    /// It is not the JSON of a configuration.
    #[error("Invalid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The file of its CPU template cannot be read.
    #[error("File operation error: {0}")]
    Template(#[from] io::Error),
}

/// Returns the requests of a configuration file in Firecracker's order, with the start at the end.
/// `read_template` reads the file of a CPU template that it names.
///
/// # Errors
///
/// One of the files cannot be used.
pub fn config_file_operations(
    json: &[u8],
    read_template: impl FnOnce(&Path) -> io::Result<Vec<u8>>,
) -> Result<Vec<Operation>, ConfigFileFault> {
    let file: ConfigFile = serde_json::from_slice(json)?;
    let mut operations = Vec::new();
    operations.extend(file.logger.map(Operation::PutLogger));
    operations.extend(file.metrics.map(Operation::PutMetrics));
    let machine = file.machine_config.map(MachineConfigUpdate::from);
    operations.extend(machine.map(Operation::UpdateMachine));
    let template = file.cpu_config.map(|source| match source {
        CpuTemplateSource::Template(template) => Ok(template),
        CpuTemplateSource::Path(path) => {
            Ok::<_, ConfigFileFault>(serde_json::from_slice(&read_template(&path)?)?)
        }
    });
    operations.extend(template.transpose()?.map(Operation::PutCpuTemplate));
    operations.push(Operation::PutBootSource(file.boot_source));
    operations.extend(file.drives.into_iter().map(Operation::PutDrive));
    operations.extend(file.network_interfaces.into_iter().map(Operation::PutInterface));
    operations.extend(file.vsock.map(Operation::PutVsock));
    operations.extend(file.balloon.map(Operation::PutBalloon));
    operations.extend(file.mmds_config.map(Operation::PutMmds));
    operations.extend(file.entropy.map(Operation::PutEntropy));
    operations.extend(file.pmem.into_iter().map(Operation::PutPmem));
    operations.extend(file.memory_hotplug.map(Operation::PutMemoryHotplug));
    operations.push(Operation::Start);
    Ok(operations)
}

/// Returns Firecracker's text for a part of a configuration file that is refused, which differs
/// from that for the same request.
pub fn config_file_text(fault: &ApiFault) -> String {
    match fault {
        ApiFault::Balloon(cause) => format!("Balloon device error: {cause}"),
        ApiFault::Drive(cause) => format!("Block device error: {cause}"),
        ApiFault::Machine(cause) => format!("VM config error: {cause}"),
        ApiFault::Net(cause) => format!("Network device error: {cause}"),
        ApiFault::Mmds(cause) => format!("MMDS config error: {cause}"),
        // The start has a text of its own.
        ApiFault::Start(cause) => cause.to_string(),
        other => other.to_string().replacen("Vsock config error", "Vsock device error", 1),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::firecracker::{Answer, MicroVm, MicroVmAction, MicroVmEvent};

    fn operations(json: Value) -> Result<Vec<Operation>, ConfigFileFault> {
        config_file_operations(json.to_string().as_bytes(), |path| std::fs::read(path))
    }

    #[test]
    fn parts_have_firecrackers_order_and_end_with_start() {
        let all = json!({
            "memory-hotplug": { "total_size_mib": 1024 },
            "pmem": [{ "id": "p", "path_on_host": "p" }],
            "entropy": {},
            "mmds-config": { "network_interfaces": ["e"] },
            "balloon": { "amount_mib": 1, "deflate_on_oom": true },
            "vsock": { "guest_cid": 3, "uds_path": "v" },
            "network-interfaces": [{ "iface_id": "e", "host_dev_name": "t" }],
            "drives": [{ "drive_id": "a", "is_root_device": true, "path_on_host": "a" },
                { "drive_id": "b", "is_root_device": false, "path_on_host": "b" }],
            "boot-source": { "kernel_image_path": "k" },
            "cpu-config": {},
            "machine-config": { "vcpu_count": 1, "mem_size_mib": 64 },
            "metrics": { "metrics_path": "m" },
            "logger": { "level": "Info" },
            "something": "new",
        });
        let operations = operations(all).unwrap();
        let order = operations.iter().map(|operation| match operation {
            Operation::PutLogger(_) => "logger",
            Operation::PutMetrics(_) => "metrics",
            Operation::UpdateMachine(_) => "machine",
            Operation::PutCpuTemplate(_) => "cpu",
            Operation::PutBootSource(_) => "boot",
            Operation::PutDrive(drive) => &drive.drive_id,
            Operation::PutInterface(_) => "net",
            Operation::PutVsock(_) => "vsock",
            Operation::PutBalloon(_) => "balloon",
            Operation::PutMmds(_) => "mmds",
            Operation::PutEntropy(_) => "entropy",
            Operation::PutPmem(_) => "pmem",
            Operation::PutMemoryHotplug(_) => "hotplug",
            Operation::Start => "start",
            other => panic!("{other:?}"),
        });
        let expected = [
            "logger", "metrics", "machine", "cpu", "boot", "a", "b", "net", "vsock", "balloon",
            "mmds", "entropy", "pmem", "hotplug", "start",
        ];
        assert_eq!(order.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn template_is_read_from_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("template");
        let file = |path: &Path| {
            let source = json!({ "kernel_image_path": "k" });
            json!({ "drives": [], "boot-source": source, "cpu-config": path })
        };
        std::fs::write(&path, r#"{"kvm_capabilities": ["171"]}"#).unwrap();
        let Operation::PutCpuTemplate(template) = &operations(file(&path)).unwrap()[0] else {
            panic!("no template");
        };
        assert_eq!(template.kvm_capabilities.len(), 1);
        let none = operations(file(&dir.path().join("none"))).unwrap_err().to_string();
        assert_eq!(none, "File operation error: No such file or directory (os error 2)");
        std::fs::write(&path, "{").unwrap();
        let wrong = operations(file(&path)).unwrap_err().to_string();
        assert!(wrong.starts_with("Invalid JSON: EOF while parsing"), "{wrong}");
    }

    #[test]
    fn missing_parts_are_named() {
        let refusal = |file| operations(file).unwrap_err().to_string();
        let text = refusal(json!({ "drives": [] }));
        assert!(text.starts_with("Invalid JSON: missing field `boot-source`"), "{text}");
        let text = refusal(json!({ "boot-source": { "kernel_image_path": "k" } }));
        assert!(text.starts_with("Invalid JSON: missing field `drives`"), "{text}");
    }

    #[test]
    fn refusals_have_the_files_texts() {
        let refusal = |part: &str, value: Value| {
            let mut file =
                json!({ "drives": [], "boot-source": { "kernel_image_path": "k" }, "entropy": {} });
            file[part] = value;
            let mut vm = MicroVm::new("a".to_owned(), "Firecracker", 100);
            for operation in operations(file).unwrap() {
                let mut actions = vm.step(MicroVmEvent::Request((), operation));
                if let [MicroVmAction::Perform(_)] = actions[..] {
                    actions = vm.step(MicroVmEvent::Finished(Ok(())));
                }
                if let Some(MicroVmAction::Reply((), Answer::Fault(fault))) = actions.first() {
                    return config_file_text(fault);
                }
            }
            panic!("{part} is accepted");
        };
        for (part, value, text) in [
            (
                "machine-config",
                json!({ "vcpu_count": 0, "mem_size_mib": 8 }),
                "VM config error: The number of vCPUs must be greater than 0, less than 32 and \
                 must be 1 or an even number if SMT is enabled.",
            ),
            (
                "drives",
                json!([{ "drive_id": "a", "is_root_device": true }]),
                "Block device error: Unable to create the virtio block device: Invalid block \
                 config.",
            ),
            (
                "balloon",
                json!({ "amount_mib": 999, "deflate_on_oom": true }),
                "Balloon device error: Amount of pages requested is too large.",
            ),
            (
                "mmds-config",
                json!({ "network_interfaces": [] }),
                "MMDS config error: The list of network interface IDs that allow forwarding MMDS \
                 requests is empty.",
            ),
        ] {
            assert_eq!(refusal(part, value), text);
        }
    }
}
