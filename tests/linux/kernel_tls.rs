//! Kernel TLS, which hosts of these tests may not have: a Linux guest is the host of a source and
//! of a receiver. They run the static program that `DRIFTLINE_STATIC` names, with a guest of the
//! threads backend.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use driftline_machine::testing::skip;
use serde_json::json;
use tests::{LINUX_CMDLINE, LinuxImage, ScratchDir, driftline};

use super::firecracker::FirecrackerProcess;
use super::text;
use certificates::{NOW, TestCa};

#[allow(dead_code, clippy::unwrap_used, reason = "only `migrations` tests dates and twins")]
#[path = "../../migrate/tests/migrations/tls/certificates.rs"]
mod certificates;

/// Sends a guest once, and prints the result, the kernel's sessions, and what encrypted, in a line.
/// `$1` and `$2` are `DRIFTLINE_KERNEL_TLS` of source and receiver, `$3` is the source's folder of
/// certificates. With a `$4`, the receiver is killed in pre-copy.
const MIGRATE: &str = r#"
cd /tmp 2>/dev/null || { mkdir /tmp; cd /tmp; }
ifconfig lo 127.0.0.1 up
await() { n=0; while [ $n -lt 600 ] && ! eval "$1"; do sleep 0.1; n=$((n + 1)); done; }
sessions() { sed -n 's/^TlsTxSw[^0-9]*//p; s/^TlsRxSw[^0-9]*//p' /proc/net/tls_stat | xargs; }
rm -f *.sock *.log *.out
# The image's kernel has neither.
options="--no-seccomp --no-landlock"
export RUST_LOG=driftline_migrate=debug
DRIFTLINE_KERNEL_TLS=$1 /mnt/driftline run --backend threads --guest payload,ws=512K,rate=4K \
    --mem 18M --api-sock a.sock $options >a.out 2>a.log &
source=$!
DRIFTLINE_KERNEL_TLS=$2 /mnt/driftline receive-migration tcp:127.0.0.1:7000 --tls-dir /mnt/tls \
    --api-sock b.sock --once $options >b.out 2>b.log &
receiver=$!
await '[ -S a.sock ] && grep -q "waiting for a migration" b.log'
before=$(sessions)
/mnt/driftline send-migration tcp:127.0.0.1:7000 --tls-dir /mnt/$3 --verify --api-sock a.sock \
    >s.out 2>s.log &
send=$!
[ -z "$4" ] || { await 'grep -q phase=Precopy b.log'; kill -9 $receiver; }
wait $send
echo "exit=$? before=$before after=$(sessions)" \
    "by=$(sed -n 's/.*encrypted and decrypted by="\([a-z ]*\)".*/\1/p' a.log b.log | xargs)" \
    "a=$(/mnt/driftline info --api-sock a.sock 2>&1 | sed -n 's/^state *//p')" \
    "b=$(/mnt/driftline info --api-sock b.sock 2>&1 | sed -n 's/^state *//p')" \
    "said=$(tr '\n' ' ' <s.log)"
kill -9 $source $receiver 2>/dev/null
"#;

/// Makes an ext4 disk with the program, the certificates and the script.
fn disk(scratch: &ScratchDir, program: &str) -> PathBuf {
    let (content, disk) = (scratch.path("host"), scratch.path("disk.img"));
    let [tls, other] = ["tls", "other"].map(|name| content.join(name));
    let (ca, other_ca) = (TestCa::new(), TestCa::new());
    for (dir, of_source) in [(&tls, &ca), (&other, &other_ca)] {
        fs::create_dir_all(dir).expect("a folder");
        fs::copy(ca.certificate(), dir.join("ca-cert.pem")).expect("a file");
        of_source.issue(dir, "client", "DNS:source", NOW);
    }
    ca.issue(&tls, "server", "IP:127.0.0.1", NOW);
    fs::copy(program, content.join("driftline")).expect("the program is copied");
    fs::write(content.join("migrate.sh"), MIGRATE).expect("the script is written");
    fs::File::create(&disk).and_then(|file| file.set_len(128 << 20)).expect("a file");
    run(Command::new("mkfs.ext4").args(["-q", "-F", "-d", text(&content), text(&disk)]));
    disk
}

fn run(command: &mut Command) {
    let out = command.output().expect("the program starts");
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Boots a guest that has the disk at `/mnt`.
fn boot(linux: &LinuxImage, scratch: &ScratchDir, disk: &Path) -> FirecrackerProcess {
    let process = FirecrackerProcess::start(Command::new(driftline()), scratch);

    let machine = json!({ "vcpu_count": 1, "mem_size_mib": 256 });
    process.done("PUT", "/machine-config", &machine);
    let (kernel, initrd) = (linux.file("vmlinux"), linux.file("initramfs.cpio"));
    let cmdline = format!("{LINUX_CMDLINE} driftline.mount=/dev/vda:/mnt");
    let boot = json!({ "kernel_image_path": text(&kernel), "initrd_path": text(&initrd),
        "boot_args": cmdline });
    process.done("PUT", "/boot-source", &boot);
    let drive = json!({ "drive_id": "data", "path_on_host": text(disk),
        "is_root_device": false, "is_read_only": false });
    process.done("PUT", "/drives/data", &drive);
    process.done("PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
    process.await_shell();
    process
}

/// Returns how many sessions the kernel has got, for sending and for receiving. A connection with a
/// session in the kernel at both ends has two of each.
fn new_sessions(said: &str) -> [u32; 2] {
    let count = |name: &str| -> Vec<u32> {
        let (_, rest) = said.split_once(name).expect("the script prints it");
        rest.split_whitespace().take(2).map(|word| word.parse().expect("a number")).collect()
    };
    let (before, after) = (count("before="), count("after="));
    [after[0] - before[0], after[1] - before[1]]
}

#[test]
fn kernel_encrypts_a_migration() {
    let test = "kernel_encrypts_a_migration";
    let _alone = tests::one_at_a_time();
    let Some(linux) = LinuxImage::or_skip(test) else { return };
    let Ok(program) = std::env::var("DRIFTLINE_STATIC") else {
        return skip(test, "DRIFTLINE_STATIC names no static program");
    };
    let scratch = ScratchDir::new();
    let disk = disk(&scratch, &program);
    let mut host = boot(&linux, &scratch, &disk);
    let mut migrate = |args: &str| {
        let said = host.shell(&format!("sh /mnt/migrate.sh {args}"));
        eprintln!("{args}: {said}");
        said
    };
    let arrived = [
        ("1 1 tls", [2, 2], "by=the kernel the kernel "),
        ("0 1 tls", [1, 1], "by=this process the kernel "),
        ("1 0 tls", [1, 1], "by=the kernel this process "),
        ("0 0 tls", [0, 0], "by=this process this process "),
    ];
    for (args, sessions, by) in arrived {
        let said = migrate(args);
        assert!(said.contains("exit=0 ") && said.contains(by), "{said}");
        assert_eq!(new_sessions(&said), sessions, "{said}");
        assert!(said.contains("b=running "), "{said}");
    }
    // The source offloads its session unless the receiver has closed the connection already.
    let said = migrate("1 1 other");
    let expected = "the peer does not trust the CA that signed this host's certificate";
    assert!(said.contains("exit=4 ") && said.contains(expected), "{said}");
    assert!(said.contains("a=running "), "{said}");
    let said = migrate("1 1 tls cut");
    assert!(said.contains("exit=4 ") && said.contains("by=the kernel the kernel "), "{said}");
    assert_eq!(new_sessions(&said), [2, 2], "{said}");
    assert!(said.contains("failed (in pre-copy)") && said.contains("a=running "), "{said}");
}
