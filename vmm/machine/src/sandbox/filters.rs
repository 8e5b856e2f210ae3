//! Filter tables: which system calls each class of threads may make, and with which arguments where
//! checking them is cheap.

use std::collections::BTreeMap;

use seccompiler::{BackendError, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};
use syscalls::Sysno::{self, *};

use super::calls::*;
use super::class::Class;

/// Rules for each system call number. A call without rules is allowed with any arguments.
pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Returns the rules for threads of `class`.
pub(super) fn of(class: Class) -> Result<Rules, BackendError> {
    let mut table = Table::default();
    table.every_thread()?;
    match class {
        Class::Worker | Class::Serial | Class::Log => {}
        Class::SerialInput => {
            table.kvm(LINE_IOCTLS)?;
            table.ioctls(INPUT_IOCTLS)?;
        }
        Class::Vcpu => {
            table.kvm(VCPU_IOCTLS)?;
            table.allow(VCPU);
        }
        Class::Collector => table.kvm(DIRTY_IOCTLS)?,
        Class::Watcher => {
            table.kvm(DIRTY_IOCTLS)?;
            table.ioctls(WATCH_IOCTLS)?;
            table.ioctls(PAGEMAP_IOCTLS)?;
        }
        Class::Supervisor => {
            table.kvm(VM_IOCTLS)?;
            table.allow(SUPERVISOR);
        }
        Class::Rng => {
            table.allow(DEVICE);
            table.allow(TIMER);
        }
        Class::Balloon => {
            table.allow(DEVICE);
            table.allow(BALLOON);
            table.allow(TIMER);
        }
        Class::Block => {
            table.allow(DEVICE);
            table.allow(BLOCK);
            table.allow(TIMER);
            table.allow_values(fcntl, 1, [libc::F_OFD_SETLK as u64])?;
        }
        Class::Net => {
            table.allow(DEVICE);
            table.allow(TIMER);
            table.ioctls(TAP_IOCTLS)?;
        }
        Class::Vsock => {
            table.allow(DEVICE);
            table.allow(VSOCK);
            table.ioctls(STREAM_IOCTLS)?;
        }
    }
    Ok(table.0)
}

/// Returns the rules for the threads that serve the operator: main, the API's threads, checkpoints
/// and migrations. All other threads descend from them, so these rules include what every class
/// needs.
pub(super) fn of_process() -> Result<Rules, BackendError> {
    let mut table = Table::default();
    table.process()?;
    table.every_thread()?;
    Ok(table.0)
}

/// Returns the calls that are refused with `ENOSYS` although another filter may allow them. The
/// flags of `clone3` are in memory, where a filter cannot read them. C libraries then fall back to
/// `clone`, which is allowed only for threads.
pub(super) fn refused() -> Rules {
    BTreeMap::from([(clone3.id().into(), Vec::new())])
}

#[derive(Default)]
struct Table(Rules);

impl Table {
    /// Allows memory, time, waiting, reading and writing open descriptors, and exiting.
    fn every_thread(&mut self) -> Result<(), BackendError> {
        self.allow(EVERY_THREAD);
        self.allow_masked(mmap, 2, libc::PROT_EXEC as u64, 0)?;
        self.allow_masked(mprotect, 2, libc::PROT_EXEC as u64, 0)?;
        // Status of an open descriptor.
        self.allow_masked(newfstatat, 3, libc::AT_EMPTY_PATH as u64, libc::AT_EMPTY_PATH as u64)?;
        self.allow_masked(statx, 2, libc::AT_EMPTY_PATH as u64, libc::AT_EMPTY_PATH as u64)?;
        self.allow_values(fcntl, 1, DESCRIPTOR_COMMANDS.iter().map(|c| *c as u64))?;
        // Signals to this process: kicks and aborts. musl aborts by `tkill`, which names no
        // process, and so by SIGSYS.
        let own = u64::from(std::process::id());
        self.allow_values(tgkill, 0, [own])?;
        self.allow_values(kill, 0, [own])?;
        self.allow_null(prlimit64, 2)?;
        // The handler of a forbidden call restores the terminal on standard input.
        let terminal = [(0, libc::STDIN_FILENO as u64), (1, u64::from(crate::terminal::SET))];
        self.allow_both(ioctl, terminal)?;
        let names = [libc::PR_GET_NAME, libc::PR_SET_NAME, libc::PR_SET_VMA];
        self.allow_values(prctl, 0, names.map(|n| n as u64))
    }

    /// Allows what only the threads that serve the operator need.
    fn process(&mut self) -> Result<(), BackendError> {
        self.allow(PROCESS);
        let thread = libc::CLONE_THREAD as u64;
        self.allow_masked(clone, 0, thread, thread)?;
        self.allow_values(seccomp, 0, [u64::from(libc::SECCOMP_SET_MODE_FILTER)])?;
        let about = [libc::PR_SET_NO_NEW_PRIVS, libc::PR_GET_NO_NEW_PRIVS, libc::PR_SET_PDEATHSIG];
        self.allow_values(prctl, 0, about.map(|p| p as u64))?;
        // Which processor features a guest may use: ARCH_GET_XCOMP_SUPP to REQ_XCOMP_GUEST_PERM.
        self.allow_values(arch_prctl, 0, 0x1021..=0x1025)?;
        // Name services are libraries that are loaded on demand. No mapping is both writable and
        // executable.
        self.allow_masked(mmap, 2, libc::PROT_WRITE as u64, 0)?;
        let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
        self.allow_values(socket, 0, families.map(|f| f as u64))?;
        self.allow_values(socketpair, 0, [libc::AF_UNIX as u64])?;
        // All KVM ioctls: these threads build machines.
        self.allow_masked(ioctl, 1, 0xff00, KVMIO << 8)?;
        self.allow_masked(ioctl, 1, 0xff00, UFFDIO << 8)?;
        let lists = [PLAIN_IOCTLS, TERMINAL_IOCTLS, TUN_IOCTLS, INTERFACE_IOCTLS, PAGEMAP_IOCTLS];
        lists.into_iter().try_for_each(|list| self.ioctls(list))?;
        Ok(())
    }

    /// Allows KVM's ioctls with these numbers.
    fn kvm(&mut self, numbers: &[u8]) -> Result<(), BackendError> {
        numbers
            .iter()
            .try_for_each(|n| self.allow_masked(ioctl, 1, 0xffff, KVMIO << 8 | u64::from(*n)))
    }

    /// Allows these ioctls.
    fn ioctls(&mut self, requests: &[u32]) -> Result<(), BackendError> {
        self.allow_values(ioctl, 1, requests.iter().map(|r| u64::from(*r)))
    }

    fn allow(&mut self, calls: &[Sysno]) {
        for call in calls {
            self.0.insert(call.id().into(), Vec::new());
        }
    }

    /// Allows `call` if its argument `index` is one of `values`. Only 32 bits are compared.
    fn allow_values(
        &mut self,
        call: Sysno,
        index: u8,
        values: impl IntoIterator<Item = u64>,
    ) -> Result<(), BackendError> {
        values.into_iter().try_for_each(|v| self.allow_if(call, index, SeccompCmpOp::Eq, v))
    }

    /// Allows `call` if the bits `mask` of its argument `index` equal `value`.
    fn allow_masked(
        &mut self,
        call: Sysno,
        index: u8,
        mask: u64,
        value: u64,
    ) -> Result<(), BackendError> {
        self.allow_if(call, index, SeccompCmpOp::MaskedEq(mask), value)
    }

    fn allow_if(
        &mut self,
        call: Sysno,
        index: u8,
        op: SeccompCmpOp,
        value: u64,
    ) -> Result<(), BackendError> {
        let low = value & u64::from(u32::MAX);
        let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, op, low)?;
        self.allow_rule(call, SeccompRule::new(vec![condition])?);
        Ok(())
    }

    /// Allows `call` if an argument is a null pointer.
    fn allow_null(&mut self, call: Sysno, index: u8) -> Result<(), BackendError> {
        let length = SeccompCmpArgLen::Qword;
        let condition = SeccompCondition::new(index, length, SeccompCmpOp::Eq, 0)?;
        self.allow_rule(call, SeccompRule::new(vec![condition])?);
        Ok(())
    }

    /// Allows `call` if both arguments, each an index and a 32-bit value, are equal to these.
    fn allow_both(&mut self, call: Sysno, arguments: [(u8, u64); 2]) -> Result<(), BackendError> {
        let is = |(index, value)| {
            SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
        };
        let conditions: Result<Vec<_>, _> = arguments.into_iter().map(is).collect();
        self.allow_rule(call, SeccompRule::new(conditions?)?);
        Ok(())
    }

    fn allow_rule(&mut self, call: Sysno, rule: SeccompRule) {
        match self.0.entry(call.id().into()) {
            std::collections::btree_map::Entry::Vacant(new) => {
                new.insert(vec![rule]);
            }
            // A call without rules is already allowed with any arguments.
            std::collections::btree_map::Entry::Occupied(mut rules) => {
                if !rules.get().is_empty() {
                    rules.get_mut().push(rule);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: &[Sysno] = &[
        execve,
        execveat,
        fork,
        vfork,
        ptrace,
        process_vm_readv,
        process_vm_writev,
        mount,
        umount2,
        pivot_root,
        chroot,
        kexec_load,
        kexec_file_load,
        bpf,
        init_module,
        finit_module,
        delete_module,
        reboot,
        setuid,
        setgid,
        setns,
        unshare,
        open_by_handle_at,
        perf_event_open,
        add_key,
        keyctl,
        iopl,
        ioperm,
        modify_ldt,
        personality,
        mknod,
        mknodat,
        fsopen,
        move_mount,
        pidfd_getfd,
        process_madvise,
        quotactl,
        swapon,
        settimeofday,
        clock_settime,
        acct,
        syslog,
    ];

    fn all_tables() -> impl Iterator<Item = Rules> {
        let classes = Class::ALL.into_iter().map(|class| of(class).unwrap());
        classes.chain([of_process().unwrap()])
    }

    #[test]
    fn no_thread_starts_programs_or_changes_the_host() {
        for table in all_tables() {
            assert!(NEVER.iter().all(|call| !table.contains_key(&i64::from(call.id()))));
        }
    }

    #[test]
    fn only_operator_threads_open_files_by_name() {
        let names = [open, openat, openat2, creat, unlink, unlinkat, rename, mkdir, bind, listen];
        for class in Class::ALL {
            let table = of(class).unwrap();
            assert!(names.iter().all(|call| !table.contains_key(&i64::from(call.id()))));
            let sockets = [socket, socketpair, connect];
            assert!(sockets.iter().all(|call| !table.contains_key(&i64::from(call.id()))));
        }
    }

    #[test]
    fn only_the_watcher_class_has_userfaultfd_ioctls() {
        let mut expected = Table::default();
        expected.ioctls(WATCH_IOCTLS).and_then(|()| expected.ioctls(PAGEMAP_IOCTLS)).unwrap();
        let ioctls = |class| of(class).unwrap().remove(&i64::from(ioctl.id())).unwrap_or_default();
        for rule in expected.0.into_values().flatten() {
            assert!(ioctls(Class::Watcher).contains(&rule));
            assert!(!ioctls(Class::Collector).contains(&rule));
        }
    }

    #[test]
    fn only_the_supervisor_class_sets_affinity() {
        for class in Class::ALL {
            let may = of(class).unwrap().contains_key(&i64::from(sched_setaffinity.id()));
            assert_eq!(may, class == Class::Supervisor, "{class:?}");
        }
    }

    #[test]
    fn process_filter_covers_every_class() {
        let process = of_process().unwrap();
        for class in Class::ALL {
            for (call, rules) in of(class).unwrap() {
                let wide = process.get(&call);
                let covers = |wide: &Vec<SeccompRule>| wide.is_empty() || !rules.is_empty();
                assert!(wide.is_some_and(covers), "{class:?}: {call}");
            }
        }
    }
}
