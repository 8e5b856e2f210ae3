//! Suggests the right command or option for a name that other programs use.

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, Error};

use super::command::Cli;

/// Commands by names that other programs have for them.
pub(super) const COMMANDS: &[(&[&str], &[&str])] = &[
    (&["start", "boot", "launch", "create"], &["run"]),
    (&["ps", "status", "show", "inspect", "ls", "list"], &["info", "store ls"]),
    (&["kill", "shutdown", "poweroff", "halt", "quit", "rm", "delete", "destroy"], &["stop"]),
    (&["suspend", "freeze"], &["pause"]),
    (&["unpause", "continue", "thaw"], &["resume"]),
    (&["snapshot", "save", "backup", "dump"], &["checkpoint"]),
    (&["load", "recover", "clone", "fork"], &["restore"]),
    (&["migrate", "migration", "move"], &["send-migration", "receive-migration"]),
    (&["send", "migrate-to"], &["send-migration"]),
    (&["receive", "recv", "incoming", "listen"], &["receive-migration"]),
    (&["cancel", "abort"], &["cancel-migration"]),
    (&["forecast", "predict", "estimate"], &["plan"]),
    (&["watch", "monitor", "heatmap"], &["top"]),
    (&["bench", "benchmark"], &["compare"]),
    (&["check", "capabilities", "caps"], &["doctor"]),
    (&["verify", "fsck"], &["store verify"]),
    (&["repair", "salvage"], &["store repair"]),
    (&["compact", "gc", "prune"], &["store compact"]),
    (&["export"], &["store export"]),
];

/// Options by names that other programs have for them.
pub(super) const OPTIONS: &[(&[&str], &str)] = &[
    (&["--memory", "--ram", "--memory-size", "-m"], "--mem"),
    (&["--cpus", "--smp", "--vcpu", "--ncpus", "-c"], "--vcpus"),
    (&["--drive", "--image", "--rootfs", "--hda", "--block"], "--disk"),
    (&["--network", "--tap", "--nic", "--netdev"], "--net"),
    (&["--append", "--boot-args", "--kernel-args"], "--cmdline"),
    (&["--ramdisk", "--initramfs"], "--initrd"),
    (&["--socket", "--sock", "--api-socket", "--api", "-s"], "--api-sock"),
    (&["--interval", "--period"], "--every"),
    (&["--dir", "--directory", "--path"], "--store"),
    (&["--snapshot", "--number", "--epoch"], "--checkpoint"),
    (&["--retain", "--max"], "--keep"),
    (&["--bwlimit", "--rate-limit"], "--max-bandwidth"),
    (&["--max-downtime", "--downtime"], "--downtime-ms"),
    (&["--format-json"], "--json"),
    (&["-o", "--out", "--file"], "--output"),
    (&["--debug"], "--verbose"),
];

/// Adds to the error the command or option that was probably meant.
pub(crate) fn with_hint(mut e: Error) -> Error {
    let wrong = |e: &Error, kind| match e.get(kind) {
        Some(ContextValue::String(wrong)) => Some(wrong.clone()),
        _ => None,
    };
    if let Some(wrong) = wrong(&e, ContextKind::InvalidSubcommand) {
        let meant = commands_for(&wrong);
        if !meant.is_empty() {
            e.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(meant));
        }
    } else if let Some(wrong) = wrong(&e, ContextKind::InvalidArg)
        && let Some((_, meant)) = OPTIONS.iter().find(|(names, _)| names.contains(&&*wrong))
    {
        let meant = ContextValue::String((*meant).to_owned());
        e.insert(ContextKind::SuggestedArg, meant);
    }
    e
}

/// Returns the commands that `wrong` may mean: by the table, or with its letters in another order.
fn commands_for(wrong: &str) -> Vec<String> {
    let known = COMMANDS.iter().find(|(names, _)| names.contains(&wrong));
    if let Some((_, meant)) = known {
        return meant.iter().map(ToString::to_string).collect();
    }
    let letters = |name: &str| {
        let mut letters: Vec<char> = name.chars().collect();
        letters.sort_unstable();
        letters
    };
    let names = Cli::command();
    let names = names.get_subcommands().map(clap::Command::get_name);
    names.filter(|name| letters(name) == letters(wrong)).map(str::to_owned).collect()
}
