# Sourced by build.sh. Owns how the kernel is made: unpack, patch, configure, compile.

# Unpacks and patches the source, in the current folder or, with --keep-source, once in the cache.
# Prints its folder.
kernel_source() {
    local tree=$PWD/source patch_file
    if [ -n "$keep_source" ]; then
        tree=$cache/source-$(printf '%s\n' kernel/{quirks,speed}.patch |
            stamp "$(version_of "$source_package")")
    fi
    if [ ! -e "$tree/.patched" ]; then
        rm -rf "$tree"
        mkdir "$tree"
        tar -xf "$source_tarball" -C "$tree" --strip-components=1
        for patch_file in quirks speed; do
            patch -s -p1 -d "$tree" <"$here/kernel/$patch_file.patch"
        done
        touch "$tree/.patched"
    fi
    echo "$tree"
}

# Enables only the options that the two fragments name, and those that they need. Stops if Kconfig
# does not accept one.
kernel_configure() {
    local tree=$1 kernel=$2 refused
    cat "$here/kernel/base.config" "$here/kernel/$kernel.config" >wanted.config
    make -s -C "$tree" O="$PWD/build" KCONFIG_ALLCONFIG="$PWD/wanted.config" allnoconfig
    refused=$(grep '^CONFIG_' wanted.config | grep -vxFf build/.config || true)
    [ -z "$refused" ] || fail "Kconfig does not accept these options:" $refused
}

# Runs in a work folder. Leaves vmlinux, bzImage and the configuration in result/.
build_kernel() {
    local tree
    tree=$(kernel_source)
    mkdir build
    # The kernel does not contain the user, the host and the time of its build.
    export KBUILD_BUILD_USER=driftline KBUILD_BUILD_HOST=driftline
    export KBUILD_BUILD_TIMESTAMP="1970-01-01"
    kernel_configure "$tree" "$1"
    nice make -s -C "$tree" O="$PWD/build" -j"$(nproc)" vmlinux bzImage >make.log 2>&1 ||
        { tail -n 40 make.log >&2; fail "the kernel does not build"; }
    strip -o result/vmlinux build/vmlinux
    cp build/arch/x86/boot/bzImage result/bzImage
    cp build/.config result/config
}
