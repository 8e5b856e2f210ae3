//! Hand-overs to processes that the operator started as another user and in another cgroup.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use driftline_machine::testing::{kvm_or_skip, skip};
use serde_json::Value;

use crate::common::{TestDir, Vmm, address_of, status_field, wait_for};

const THREADS: &[&str] = &["--backend", "threads", "--mem", "64M", "--vcpus", "2"];
const KVM: &[&str] = &["--backend", "kvm", "--mem", "64M", "--vcpus", "2"];
/// Guests that write 48 MiB.
const IN_FILES: &[&str] =
    &["--memory-backing", "memfd", "--guest", "payload,ws=48M,rate=256M,burst=32,report=200"];

/// Users without any rights: `nobody`, and one that no process has.
pub const NOBODY: u32 = 65534;
const STRANGER: u32 = 65533;

/// Enters the cgroup, and executes the arguments as the user. `$NODE`, if any, is a device for all
/// users that takes the place of `/dev/kvm` in this mount namespace.
const ENTER: &str = "echo $$ >\"$CGROUP/cgroup.procs\" && \
     if [ \"$NODE\" ]; then mount --bind \"$NODE\" /dev/kvm; fi && \
     exec setpriv --reuid=\"$OWNER\" --regid=\"$OWNER\" --clear-groups -- \"$@\"";

/// A new cgroup, removed when dropped. It must outlive the processes in it.
struct TestCgroup {
    path: PathBuf,
    /// The file with the number of bytes that are charged to it, if its hierarchy counts them.
    charged: PathBuf,
}

impl TestCgroup {
    /// Makes one in the hierarchy that counts memory, or else in another one.
    fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let hierarchy = |line: &str, version: &str, controller: &str| {
            let fields: Vec<&str> = line.split(' ').collect();
            let is = fields[2] == version && fields[3].split(',').any(|o| o == controller);
            is.then(|| PathBuf::from(fields[1]))
        };
        let kinds = [("cgroup", "memory"), ("cgroup2", "rw"), ("cgroup", "pids")];
        let name = tempfile::Builder::new().prefix("driftline-test-").tempdir().unwrap();
        let name = name.path().file_name().unwrap();
        let all = kinds.iter().flat_map(|(version, controller)| {
            mounts.lines().filter_map(|line| hierarchy(line, version, controller))
        });
        let path = all.map(|at| at.join(name)).find(|path| fs::create_dir(path).is_ok())?;
        let files = ["memory.usage_in_bytes", "memory.current"].map(|name| path.join(name));
        let [old, new] = files;
        let charged = if old.exists() { old } else { new };
        Some(Self { path, charged })
    }

    fn contains(&self, pid: u32) -> bool {
        let name = self.path.file_name().unwrap().to_str().unwrap();
        let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        cgroups.lines().any(|line| line.ends_with(&format!("/{name}")))
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        wait_for("the cgroup to be empty", || fs::remove_dir(&self.path).ok());
    }
}

/// What processes of other users need: the program where all can read it, and a cgroup.
pub struct OtherUsers {
    tmp: TestDir,
    cgroup: TestCgroup,
    /// A device for KVM that all users can open.
    kvm: Option<PathBuf>,
}

impl OtherUsers {
    /// Returns `None`, and says so, if this process cannot start others as another user.
    pub fn or_skip(test: &str, with_kvm: bool) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skip(test, "no process can be started as another user: that needs root");
            return None;
        }
        let Some(cgroup) = TestCgroup::new() else {
            skip(test, "no cgroup can be made");
            return None;
        };
        let tmp = directory_of(0);
        let (built, program) = (env!("CARGO_BIN_EXE_driftline"), tmp.path("driftline"));
        fs::hard_link(built, &program).or_else(|_| fs::copy(built, &program).map(drop)).unwrap();
        let kvm = with_kvm.then(|| tmp.path("kvm"));
        if let Some(node) = &kvm {
            // A failure shows when the probe opens it.
            let _ = Command::new("mknod")
                .args(["-m", "666"])
                .arg(node)
                .args(["c", "10", "232"])
                .status();
        }
        let users = Self { tmp, cgroup, kvm };
        let mut probe = users.command(NOBODY, Path::new("sh"));
        probe.args(["-c", if with_kvm { ": </dev/kvm" } else { ":" }]);
        if probe.status().is_ok_and(|status| status.success()) {
            return Some(users);
        }
        skip(test, "no process can be started as another user: setpriv or unshare fails");
        None
    }

    /// Returns a command that starts `program` as a user, in the cgroup.
    pub fn command(&self, user: u32, program: &Path) -> Command {
        let mut command = match self.kvm {
            None => Command::new("sh"),
            Some(_) => {
                let mut unshare = Command::new("unshare");
                unshare.args(["--mount", "--propagation", "private", "sh"]);
                unshare
            }
        };
        command.args(["-c", ENTER, "sh"]).arg(program);
        command.env("NODE", self.kvm.as_deref().unwrap_or(Path::new("")));
        command.env("CGROUP", &self.cgroup.path).env("OWNER", user.to_string());
        command.env_remove("RUST_LOG").stdin(std::process::Stdio::null());
        command
    }

    /// Starts the program as a user who owns the directory `tmp`.
    pub fn start<'p>(
        &self,
        user: u32,
        tmp: &'p TestDir,
        name: &'static str,
        args: &[&str],
    ) -> Vmm<'p> {
        let mut command = self.command(user, &self.tmp.path("driftline"));
        command.args(args);
        Vmm::start_by(tmp, name, command)
    }

    /// Starts a receiver of a user at a unix socket in a directory of that user. Returns its
    /// address.
    fn receiver<'p>(&self, user: u32, tmp: &'p TestDir, name: &'static str) -> (Vmm<'p>, String) {
        let address = format!("unix:{}", tmp.text(&format!("{name}.in")));
        let mut vmm = self.start(user, tmp, name, &["receive-migration", &address]);
        vmm.await_message(&format!("waiting for a migration on {address}\n"));
        (vmm, address)
    }
}

/// Makes a directory of a user, in which others can reach files.
pub fn directory_of(user: u32) -> TestDir {
    let tmp = TestDir::new();
    fs::set_permissions(tmp.text(""), Permissions::from_mode(0o755)).unwrap();
    chown(tmp.text(""), Some(user), Some(user)).unwrap();
    tmp
}

/// Checks the user, the groups and the cgroup of a process.
fn assert_belongs_to(users: &OtherUsers, user: u32, pid: u32) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let all = format!("{user}\t{user}\t{user}\t{user}");
    for ids in ["Uid:", "Gid:"] {
        assert_eq!(status_field(&status, ids), Some(&*all));
    }
    assert_eq!(status_field(&status, "Groups:"), Some(""));
    assert!(users.cgroup.contains(pid), "it is not in {}", users.cgroup.path.display());
}

fn goes_to_a_user_without_rights(users: &OtherUsers, machine: &[&str]) {
    let (ours, theirs) = (directory_of(0), directory_of(NOBODY));
    let mut source = Vmm::run(&ours, "first", &[machine, IN_FILES].concat());
    let id = source.info().unwrap()["vm_id"].clone();
    source.await_checked_pages(2, &[]);
    let (mut next, to) = users.receiver(NOBODY, &theirs, "second");
    let report = source.tell(&["send-migration", &to, "--local", "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["status"], "completed", "{report}");
    assert_eq!(report["shared_memory_bytes"], 64 << 20, "{report}");
    assert_eq!((&report["normal_frames"], &report["zero_frames"]), (&0.into(), &0.into()));
    assert_eq!(source.wait(), Some(0), "{}", source.stderr());
    next.await_api();
    assert_eq!((&next.info().unwrap()["vm_id"], next.state()), (&id, "running".to_owned()));
    next.await_checked_pages(2, &[]);
    assert_belongs_to(users, NOBODY, next.pid());
    // Memory stays charged to the cgroup of the process that touched it first.
    if let Ok(charged) = fs::read_to_string(&users.cgroup.charged) {
        let charged: u64 = charged.trim().parse().unwrap();
        assert!(charged < 24 << 20, "{charged} bytes are charged to the receiver");
    }
    next.tell(&["stop"]);
    assert_eq!(next.wait(), Some(0), "{}", next.stderr());
}

#[test]
fn root_hands_over_to_any_user() {
    if let Some(users) = OtherUsers::or_skip("root_hands_over_to_any_user", false) {
        goes_to_a_user_without_rights(&users, THREADS);
    }
}

#[test]
fn kvm_guest_goes_to_another_user() {
    let test = "kvm_guest_goes_to_another_user";
    if !kvm_or_skip(test) {
        return;
    }
    if let Some(users) = OtherUsers::or_skip(test, true) {
        // The receiver gets the open disk, and has no right to open it.
        let tmp = TestDir::new();
        let disk = File::create(tmp.path("disk")).unwrap();
        disk.set_len(1 << 20).unwrap();
        disk.set_permissions(Permissions::from_mode(0o600)).unwrap();
        let option = format!("path={}", tmp.text("disk"));
        goes_to_a_user_without_rights(&users, &[KVM, &["--disk", &option]].concat());
    }
}

#[test]
fn memory_of_other_users_is_refused() {
    let Some(users) = OtherUsers::or_skip("memory_of_other_users_is_refused", false) else {
        return;
    };
    let (own, roots, strangers) = (directory_of(NOBODY), directory_of(0), directory_of(STRANGER));
    let run = [&["run"], THREADS, IN_FILES].concat();
    let mut source = users.start(NOBODY, &own, "first", &run);
    source.await_api();
    let mut before = source.await_progress(2, &[]);
    let (mut root, to_root) = users.receiver(0, &roots, "root");
    let (mut stranger, to_stranger) = users.receiver(STRANGER, &strangers, "stranger");
    // The sockets belong to their receivers alone.
    for to in [&to_root, &to_stranger] {
        let said = source.refuse(4, &["send-migration", to, "--local"]);
        let why = format!("cannot connect to {to}: Permission denied (os error 13)");
        assert!(said.contains(&why) && said.contains("the guest continues here"), "{said}");
        let path = to.strip_prefix("unix:").unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o666)).unwrap();
    }
    let why_not_to_root = "a process of user 65534 hands over the memory of its guest, and this \
         receiver of user 0 takes it only from its own user and from root: run both as one user, \
         or the source as root";
    let why_not_to_stranger = "the receiver is a process of user 65533, and a process of user \
         65534 hands memory over only to its own user: run both as one user, or this process as \
         root";
    for (receiver, to, why) in
        [(&mut root, to_root, why_not_to_root), (&mut stranger, to_stranger, why_not_to_stranger)]
    {
        let said = source.refuse(4, &["send-migration", &to, "--local"]);
        assert!(said.contains(why) && said.contains("the guest continues here"), "{said}");
        receiver.await_message(why);
        assert!(receiver.is_alive(), "{}", receiver.stderr());
        before = source.await_progress(2, &before);
    }
    let (mut next, to) = users.receiver(NOBODY, &own, "second");
    source.tell(&["send-migration", &to, "--local"]);
    assert_eq!(source.wait(), Some(0), "{}", source.stderr());
    next.await_api();
    next.await_progress(2, &before);
    // Both receivers still wait: root's takes the guest of a process of root.
    assert!(stranger.is_alive(), "{}", stranger.stderr());
    let tmp = TestDir::new();
    let roots = Vmm::run(&tmp, "other", &[THREADS, IN_FILES].concat());
    roots.tell(&["send-migration", &address_of(&root), "--local"]);
    root.await_api();
    root.await_progress(2, &[]);
}
