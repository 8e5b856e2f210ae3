//! The commands of `docs/src/operating/certificates.md`, as a person types them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use driftline_guest::testing::MemoryConfig;
use driftline_migrate::{ReceiveOptions, ReceiveTls, SendOptions, SendTls};

use crate::common::{HostPair, Sender, exactly_one_runs, quick_send};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/operating/certificates.md");
/// The directory of the page, on each of its two hosts.
const TLS_DIR: &str = "/etc/driftline/tls";
/// The prompts of the page. The VMMs' own commands are tried by the migration.
const PROMPTS: [(&str, &str); 3] = [("ca$ ", "ca"), ("dst# ", "dst"), ("src# ", "src")];

/// A command of the page, and the host on which it is typed.
struct TypedCommand {
    host: &'static str,
    text: String,
}

/// Returns the commands of the page's console blocks.
fn commands(page: &str) -> Vec<TypedCommand> {
    let mut all: Vec<TypedCommand> = Vec::new();
    let mut is_console = false;
    for line in page.lines() {
        let prompt = PROMPTS
            .iter()
            .find_map(|(prompt, host)| Some((*host, line.strip_prefix(prompt)?.to_owned())));
        match (line, prompt) {
            ("```console", _) => is_console = true,
            ("```", _) => is_console = false,
            (_, Some((host, text))) if is_console => all.push(TypedCommand { host, text }),
            (_, None) if is_console => {
                let last = all.last_mut().expect("a command precedes its further lines");
                // A here-document, or a command that continues. Others are output.
                if last.text.ends_with('\\') || last.text.contains("<<") {
                    last.text += "\n";
                    last.text += line;
                }
            }
            _ => {}
        }
    }
    all.retain(|command| !command.text.starts_with("driftline "));
    all
}

/// Types a command on its host, whose directory is the one of that name in `hosts`.
fn type_on(hosts: &Path, command: &TypedCommand) {
    let at = |host: &str| hosts.join(host).display().to_string();
    let mut text = command.text.replace(&format!("root@dst:{TLS_DIR}"), &at("dst"));
    text = text.replace(&format!("root@src:{TLS_DIR}"), &at("src"));
    text = text.replace(" admin@ca:", &format!(" {}", at("ca")));
    text = text.replace(TLS_DIR, &at(command.host)).replace("scp ", "cp ");
    let done = Command::new("sh").args(["-ec", &text]).current_dir(at(command.host)).output();
    let done = done.unwrap();
    assert!(done.status.success(), "{text}: {}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn runbook_makes_certificates_that_migrate() {
    let tmp = tempfile::tempdir().unwrap();
    for (_, host) in PROMPTS {
        fs::create_dir(tmp.path().join(host)).unwrap();
    }
    let commands = commands(&fs::read_to_string(PAGE).unwrap());
    assert_eq!(commands.len(), 19, "the page's commands, without those of the VMMs");
    commands.iter().for_each(|command| type_on(tmp.path(), command));

    let tls_dir = |host: &str| -> PathBuf { tmp.path().join(host) };
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let tls = ReceiveTls { dir: tls_dir("dst"), allow: vec!["src".parse().unwrap()] };
    let receiving = ReceiveOptions { tls: Some(tls), ..hosts.receive_options() };
    let there = hosts.receiver_with(receiving);
    // As through a tunnel: the host that is dialled is not the certificate's.
    let tls = SendTls { dir: tls_dir("src"), peer: Some("dst".parse().unwrap()) };
    let sending = SendOptions { tls: Some(tls), ..quick_send(&hosts) };
    let sent = Sender::start(&guest, &there.to, &sending).result();
    exactly_one_runs(&hosts, &guest, &sent, there, "with the page's certificates");
    sent.unwrap();
}
