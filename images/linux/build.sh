#!/usr/bin/env bash
# Builds the small Linux guest: a kernel from the distribution's source package, and an initramfs
# with a busybox shell and Driftline's checkers. README.md explains why.
#
#   build.sh [--kernel mptable|acpi|all|none] [--keep-source] [CACHE_DIR]
#
# CACHE_DIR (default: ${XDG_CACHE_HOME:-~/.cache}/driftline/linux-guest) receives
#
#   vmlinux, bzImage               the kernel without ACPI   (--kernel mptable, the default, or all)
#   vmlinux-acpi, bzImage-acpi     the kernel with ACPI      (--kernel acpi, or all)
#   initramfs.cpio                 shell and checkers, for either
#   driftline-check                the checkers, for the host: static, so it runs there as well
#
# Only targets whose inputs have changed are built: each result lies in a folder named after the
# hash of its inputs. Results appear complete or not at all; the names above are links to the
# newest. Missing packages are installed if the user is root, and named otherwise.
set -euo pipefail
shopt -s inherit_errexit

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
readonly source_package=linux-source-6.12
readonly source_tarball=${LINUX_SOURCE:-/usr/src/$source_package.tar.xz}
readonly packages=(
    "$source_package" bc bison busybox-static flex gcc libc6-dev libelf-dev lz4 make musl-tools
    patch xz-utils
)
readonly program_flags=(
    -std=gnu11 -D_GNU_SOURCE -O2 -static -march=x86-64
    -Wall -Wextra -Wconversion -Wno-sign-conversion -Wshadow -Werror
    # musl has no kernel headers; the distribution's are found after its own.
    -idirafter /usr/include -idirafter /usr/include/x86_64-linux-gnu
)

say() {
    echo "linux guest: $*"
}

fail() {
    echo "linux guest: $*" >&2
    exit 1
}

usage() {
    sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

kernels=(mptable)
keep_source=
cache=
while [ $# -gt 0 ]; do
    case $1 in
    --kernel)
        case ${2:-} in
        mptable | acpi) kernels=("$2") ;;
        all) kernels=(mptable acpi) ;;
        none) kernels=() ;;
        *) usage ;;
        esac
        shift
        ;;
    --keep-source) keep_source=yes ;;
    -*) usage ;;
    *)
        [ -z "$cache" ] || usage
        cache=$1
        ;;
    esac
    shift
done
if [ -z "$cache" ]; then
    cache=${XDG_CACHE_HOME:-${HOME:?give CACHE_DIR, or set XDG_CACHE_HOME or HOME}/.cache}
    cache=$cache/driftline/linux-guest
fi
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)

# Prints the distribution's version of a package; for a given source, its content hash.
version_of() {
    if [ "$1" = "$source_package" ] && [ -n "${LINUX_SOURCE:-}" ]; then
        sha256sum <"$source_tarball"
    else
        dpkg-query -W -f '${Version}' "$1" 2>/dev/null || true
    fi
}

install_packages() {
    local missing=() package
    for package in "${packages[@]}"; do
        [ -n "$(version_of "$package")" ] || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        fail "these packages are missing: ${missing[*]} (apt-get install ${missing[*]})"
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update >&2
    apt-get -qq install -y --no-install-recommends "${missing[@]}" >&2
}

# Prints a hash over the arguments and the files on standard input, one path a line, by their names
# in this folder.
stamp() {
    local paths
    mapfile -t paths
    { printf '%s\n' "$@" && cd "$here" && sha256sum "${paths[@]}"; } | sha256sum | cut -c 1-16
}

kernel_stamp() {
    printf '%s\n' kernel/base.config "kernel/$1.config" kernel/{quirks,speed}.patch kernel.sh |
        stamp "$(version_of "$source_package")" "$(gcc -dumpfullversion)"
}

user_stamp() {
    (cd "$here" && find guest -type f | LC_ALL=C sort; echo user.sh) |
        stamp "$(version_of busybox-static)" "$(version_of musl-tools)" \
            "$(gcc -dumpfullversion)" "${program_flags[*]}"
}

# Makes CACHE/$1 a link to the file $2 of the cache, at once.
link_to() {
    ln -sfn "$2" "$cache/.$1.new"
    mv -T "$cache/.$1.new" "$cache/$1"
}

# Runs the function $2 in an empty folder, which then becomes CACHE/$1. Removes older folders of its
# kind.
build_into() {
    local name=$1 work old
    work=$(mktemp -d "$cache/.work.XXXXXX")
    # shellcheck disable=SC2064 # The trap removes the folder that `work` names now.
    trap "rm -rf '$work'" EXIT
    mkdir "$work/result"
    (cd "$work" && "$2" "${@:3}")
    mv -T "$work/result" "$cache/$name"
    rm -rf "$work"
    trap - EXIT
    for old in "$cache/${name%-*}"-*; do
        [ "$old" = "$cache/$name" ] || rm -rf "$old"
    done
}

# shellcheck source=images/linux/kernel.sh
. "$here/kernel.sh"
# shellcheck source=images/linux/user.sh
. "$here/user.sh"

install_packages
# One build at a time in a cache. A second one waits and then finds everything built.
exec 9>"$cache/.lock"
flock 9
# A killed build leaves its work folder.
rm -rf "$cache"/.work.*

name=user-$(user_stamp)
if [ -d "$cache/$name" ]; then
    say "initramfs.cpio and driftline-check are up to date"
else
    say "building initramfs.cpio and driftline-check"
    build_into "$name" build_user
fi
link_to initramfs.cpio "$name/initramfs.cpio"
link_to driftline-check "$name/driftline-check"

for kernel in "${kernels[@]}"; do
    suffix=
    [ "$kernel" = mptable ] || suffix=-$kernel
    name=kernel-$kernel-$(kernel_stamp "$kernel")
    if [ -d "$cache/$name" ]; then
        say "vmlinux$suffix and bzImage$suffix are up to date"
    else
        say "building vmlinux$suffix and bzImage$suffix from $source_tarball (some minutes)"
        build_into "$name" build_kernel "$kernel"
    fi
    link_to "vmlinux$suffix" "$name/vmlinux"
    link_to "bzImage$suffix" "$name/bzImage"
done
say "in $cache"
