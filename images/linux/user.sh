# Sourced by build.sh. Builds user space: the checkers, their tests, and the initramfs.

# Writes one file of a cpio archive ("newc"), so that a device node needs neither root nor the cpio
# package.
cpio_entry() {
    local name=$1 mode=$2 size=0 major=0 minor=0
    case $# in
    3) size=$(stat -c %s "$3") ;;
    4) major=$3 minor=$4 ;;
    esac
    cpio_inode=$((cpio_inode + 1))
    printf '070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\0' \
        "$cpio_inode" "$mode" 0 0 1 0 "$size" 0 0 "$major" "$minor" $((${#name} + 1)) 0 "$name"
    cpio_pad $((110 + ${#name} + 1))
    if [ $# -eq 3 ]; then
        cat "$3"
        cpio_pad "$size"
    fi
}

# Zero bytes up to a multiple of four.
cpio_pad() {
    local missing=$(((4 - $1 % 4) % 4))
    [ "$missing" -eq 0 ] || head -c "$missing" /dev/zero
}

initramfs() {
    cpio_inode=0
    printf busybox >sh
    # The marker that the shell runs; the shell itself prints it.
    echo 'echo "driftline-linux: shell"' >profile
    cpio_entry dev 0040755
    cpio_entry dev/console 0020600 5 1
    cpio_entry bin 0040755
    cpio_entry bin/busybox 0100755 /bin/busybox
    cpio_entry bin/sh 0120777 sh
    cpio_entry bin/driftline-check 0120777 link
    cpio_entry etc 0040755
    cpio_entry etc/profile 0100644 profile
    cpio_entry init 0100755 result/driftline-check
    cpio_entry 'TRAILER!!!' 0
}

# Runs in a work folder. Leaves driftline-check and initramfs.cpio in result/.
build_user() {
    local sources=()
    mapfile -t sources < <(
        find "$here/guest" -name '*.c' ! -name main.c ! -name laws.c | LC_ALL=C sort
    )
    musl-gcc "${program_flags[@]}" -o laws "$here/guest/laws.c" "${sources[@]}"
    ./laws >laws.log || { cat laws.log >&2; fail "a law of the checkers does not hold"; }
    musl-gcc "${program_flags[@]}" -s -o result/driftline-check "$here/guest/main.c" "${sources[@]}"
    printf /init >link
    # Not compressed: unpacking runs in the guest's ring 0, which a development machine may emulate.
    initramfs >result/initramfs.cpio
}
