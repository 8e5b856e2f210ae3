#!/usr/bin/env bash
# Installs a Debian package of Driftline into a fresh system, runs a guest there as a service, asks
# it over its API, upgrades, and removes the package again:
#   install-test.sh driftline_0.1.0-1_amd64.deb
# The system is Debian's own, with systemd as its first process in namespaces of this machine. The
# test needs root, mmdebstrap and Debian's packages. It exits with 77 where there can be no such
# system.
set -euo pipefail

deb=$(realpath "${1:?usage: install-test.sh DEB}")
readonly deb
work=$(mktemp -d)
readonly work root=$work/root
readonly socket=/run/driftline/example/api.sock
system=

finish() {
    if [ -n "$system" ]; then
        # unshare ignores other signals; the system goes with it.
        kill -KILL "$system" 2>/dev/null || true
        wait "$system" 2>/dev/null || true
    fi
    rm -rf --one-file-system "$work"
}
trap finish EXIT

fail() {
    echo "install-test: $*" >&2
    inside journalctl --no-pager -n 30 >&2 || true
    exit 1
}

# The test cannot run on this machine.
skip() {
    echo "install-test: skipped: $*" >&2
    tail -n 5 "$work/log" >&2 || true
    exit 77
}

# The first process of the namespaces: mounts what systemd needs, and becomes systemd.
boot() {
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t tmpfs tmpfs "$root/run"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    mkdir "$root/dev/pts" "$root/dev/shm"
    local name
    for name in null zero full random urandom tty; do
        touch "$root/dev/$name"
        mount --bind "/dev/$name" "$root/dev/$name"
    done
    [ ! -c /dev/kvm ] || cp -a /dev/kvm "$root/dev/kvm"
    # systemd wants a hierarchy of its own: the unified one, or a named one beside the old ones.
    if ! mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup" ||
        [ ! -w "$root/sys/fs/cgroup/cgroup.procs" ]; then
        mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
        mkdir "$root/sys/fs/cgroup/systemd"
        mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
    fi
    exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=other \
        chroot "$root" /lib/systemd/systemd --system --unit=basic.target --log-target=journal
}

# Runs a command in the system. Fails while the system's first process has not changed its root
# directory yet: the command would run on this machine.
inside() {
    local first
    first=$(tr -d ' ' <"/proc/$system/task/$system/children")
    [ "/proc/$first/root/" -ef "$root/" ] || return 1
    nsenter --target "$first" --mount --pid --uts --ipc --cgroup --root --wd=/ -- \
        env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "$@"
}

# Waits at most a minute until a command in the system succeeds.
succeeds() {
    local i
    for ((i = 0; i < 600; i++)); do
        if inside "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    return 1
}

await() {
    succeeds "$@" || fail "waited a minute for: $*"
}

# Every file that a package could leave. The tools of packages and of systemd keep notes elsewhere.
files() {
    inside find / -xdev \( -path /var/lib/dpkg -o -path /var/log -o -path /var/cache -o -path /tmp \
        -o -path /var/lib/systemd -o -path /var/tmp -o -path /root -o -path '/etc/*-' \) -prune \
        -o -print | LC_ALL=C sort
    inside find /run -name '*driftline*' | LC_ALL=C sort
}

property() {
    inside systemctl show --value --property "$1" driftline@example.service
}

expect() {
    [ "$2" = "$3" ] || fail "$1 is \"$2\", not \"$3\""
}

mmdebstrap --quiet --variant=apt --include=systemd,systemd-sysv \
    "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$root" 2>"$work/log" ||
    skip "mmdebstrap makes no system"
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
# Both lists of files contain it, so their comparison ignores it.
cp "$deb" "$root/driftline.deb"
export root
export -f boot
unshare --mount --pid --fork --uts --ipc --cgroup --propagation private --kill-child \
    bash -euc boot >"$work/log" 2>&1 </dev/null &
system=$!
succeeds systemctl is-active basic.target || skip "systemd does not start in namespaces"

files >"$work/before"
inside dpkg -i /driftline.deb >/dev/null
inside test ! -e /dev/kvm || inside chown root:kvm /dev/kvm
inside test ! -e /dev/kvm || inside chmod 660 /dev/kvm
if ! inside test -e /dev/kvm; then
    echo "without /dev/kvm the guest runs on host threads"
    inside mkdir -p /run/systemd/system/driftline@.service.d
    inside sh -c 'printf "[Service]\nEnvironment=\"DRIFTLINE_OPTIONS=--backend threads\"\n" \
        >/run/systemd/system/driftline@.service.d/test.conf'
    inside systemctl daemon-reload
fi
inside driftline --version
for page in driftline driftline-run driftline-store-ls; do
    inside test -s "/usr/share/man/man1/$page.1.gz" || fail "there is no page $page"
done

# systemctl returns once the guest runs: the unit is of Type=notify.
inside systemctl start driftline@example || fail "the unit does not start"
first=$(property MainPID)
expect "the user" "$(inside stat -c %U "/proc/$first")" driftline
expect "the groups" "$(inside id -nG driftline)" "driftline kvm"
[[ $(property StatusText) == "guest "*" runs" ]] || fail "the status is $(property StatusText)"
inside driftline info --json --api-sock "$socket" |
    grep -q '"state":"running","vm_id":"[^"]*","name":"example"' ||
    fail "info does not show a running guest"
inside driftline checkpoint --api-sock "$socket" --store /var/lib/driftline/example >/dev/null
inside driftline store verify /var/lib/driftline/example >/dev/null
inside rm -r /var/lib/driftline/example

# An upgrade leaves the guest alone.
inside dpkg -i /driftline.deb >/dev/null
expect "the process after an upgrade" "$(property MainPID)" "$first"

inside driftline stop --wait --api-sock "$socket"
await sh -c '! systemctl is-active --quiet driftline@example'
expect "the state after a stop" "$(property ActiveState) $(property Result)" "inactive success"
inside test ! -e /run/driftline/example || fail "/run/driftline/example is left"

# Removal ends the guest, and leaves the configuration; purging removes that, too.
inside systemctl start driftline@example
inside dpkg -r driftline >/dev/null
files >"$work/removed"
left=$(comm -13 "$work/before" "$work/removed" | tr '\n' ' ')
expect "what removal leaves" "$left" \
    "/etc/driftline /etc/driftline/example.json /var/lib/driftline "
inside dpkg -P driftline >/dev/null
files >"$work/purged"
diff "$work/before" "$work/purged" || fail "purging leaves or takes files"
echo "installed, served a guest, upgraded, removed and purged: $(basename "$deb")"
