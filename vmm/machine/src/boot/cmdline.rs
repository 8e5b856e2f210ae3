//! The kernel's command line: the user's line and the machine's additions.
//!
//! Virtio devices are named here for kernels without ACPI. A kernel with ACPI finds the devices in
//! the DSDT first. If the kernel also reads them here (`VIRTIO_MMIO_CMDLINE_DEVICES`), it reports
//! for each device that the registers are taken, which does no harm. A bare line avoids these
//! reports.

use linux_loader::cmdline::Cmdline;
use vm_memory::GuestAddress;

use super::error::BootError;
use crate::devices::{DevicePlacement, REGISTERS_LEN};

/// Maximum length of an assembled line, in bytes. Linux itself takes 2,047 bytes.
const MAX_BYTES: usize = 1 << 20;
/// Longest command line of Linux on x86, in bytes, with the final 0: its `COMMAND_LINE_SIZE`.
pub const LINUX_CMDLINE_BYTES: usize = 2048;
/// Defaults for Linux unless the line sets them: use COM1, the only console; end after a panic; and
/// reset by the keyboard controller, which cannot be mistaken for a crash.
const DEFAULTS: [(&str, &str); 3] = [("console", "ttyS0"), ("panic", "-1"), ("reboot", "k")];

/// Returns the whole line: `given`, the defaults whose keys it does not have, and each virtio
/// device. A `bare` line stays as it is. Arguments for init, after ` -- `, stay last.
pub(super) fn assemble(
    given: &str,
    bare: bool,
    devices: &[DevicePlacement],
) -> Result<String, BootError> {
    if given.bytes().any(|b| b == 0) {
        return Err(BootError::NulInCmdline);
    }
    if bare {
        return Ok(given.to_owned());
    }
    let mut line = Cmdline::try_from(given, MAX_BYTES).map_err(BootError::Cmdline)?;
    for (key, value) in DEFAULTS {
        if !has_key(given, key) {
            line.insert(key, value).map_err(BootError::Cmdline)?;
        }
    }
    let line = finish(line, devices)?;
    if line.len() >= LINUX_CMDLINE_BYTES {
        let bytes = line.len();
        tracing::warn!("the kernel's command line has {bytes} bytes; Linux truncates it to 2047");
    }
    Ok(line)
}

/// Returns `given` with `parameters` and each virtio device, and nothing else: the line of a guest
/// whose client knows what it boots. Arguments for init, after ` -- `, stay last.
pub(crate) fn with_parameters(
    given: &str,
    parameters: &[String],
    devices: &[DevicePlacement],
) -> Result<String, BootError> {
    let mut line = Cmdline::try_from(given, MAX_BYTES).map_err(BootError::Cmdline)?;
    for parameter in parameters {
        line.insert_str(parameter).map_err(BootError::Cmdline)?;
    }
    finish(line, devices)
}

/// Adds each virtio device.
fn finish(mut line: Cmdline, devices: &[DevicePlacement]) -> Result<String, BootError> {
    for device in devices {
        let base = GuestAddress(device.base);
        line.add_virtio_mmio_device(REGISTERS_LEN, base, device.irq, None)
            .map_err(BootError::Cmdline)?;
    }
    let line = line.as_cstring().map_err(BootError::Cmdline)?;
    Ok(line.to_string_lossy().into_owned())
}

/// Returns whether the boot part of `line` sets `key`.
fn has_key(line: &str, key: &str) -> bool {
    let boot = line.split(" -- ").next().unwrap_or_default();
    boot.split_whitespace().any(|word| word.split('=').next() == Some(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_never_override_the_user() {
        let line = |given| assemble(given, false, &[]).unwrap();
        assert_eq!(line(""), "console=ttyS0 panic=-1 reboot=k");
        assert_eq!(line("quiet panic=5"), "quiet panic=5 console=ttyS0 reboot=k");
        assert_eq!(
            line("console=hvc0 reboot=t panic=-1 -- console=x"),
            "console=hvc0 reboot=t panic=-1 -- console=x"
        );
        assert_eq!(line("a -- b"), "a console=ttyS0 panic=-1 reboot=k -- b");
        assert_eq!(assemble(" as it  is", true, &[]).unwrap(), " as it  is");
        assert!(assemble("a\0b", true, &[]).unwrap_err().to_string().contains("NUL"));
    }

    #[test]
    fn devices_are_named_before_inits_arguments() {
        let placements = [
            DevicePlacement { base: 0xd000_0000, irq: 5 },
            DevicePlacement { base: 0xd000_1000, irq: 16 },
        ];
        assert_eq!(
            assemble("console=x panic=1 reboot=k -- sh", false, &placements).unwrap(),
            "console=x panic=1 reboot=k virtio_mmio.device=4K@0xd0000000:5 \
             virtio_mmio.device=4K@0xd0001000:16 -- sh"
        );
        assert_eq!(assemble("x", true, &placements).unwrap(), "x");
    }

    #[test]
    fn given_parameters_precede_the_devices() {
        let placements = [DevicePlacement { base: 0xd000_0000, irq: 5 }];
        let line =
            |given| with_parameters(given, &["pci=off".to_owned(), "ro".to_owned()], &placements);
        let devices = "pci=off ro virtio_mmio.device=4K@0xd0000000:5";
        assert_eq!(line("").unwrap(), devices);
        assert_eq!(line("quiet -- sh").unwrap(), format!("quiet {devices} -- sh"));
        assert!(line("a\0b").is_err());
    }
}
