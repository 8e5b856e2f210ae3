# Sourced by build.sh. Owns how the kernel is made: unpack, patch, configure, compile.

# The patched source, unpacked in the current folder or, with --keep-source, once for all in the cache.
kernel_source() {
    local tree=$PWD/source patch_file
    if [ -n "$keep_source" ]; then
        tree=$cache/source-$(printf '%s\n' kernel/quirks.patch kernel/speed.patch | stamp "$(version_of "$source_package")")
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

# Everything off but what the two fragments name, and what that needs; a wish that Kconfig did not grant is an error.
kernel_configure() {
    local tree=$1 kernel=$2 refused
    cat "$here/kernel/base.config" "$here/kernel/$kernel.config" >wanted.config
    make -s -C "$tree" O="$PWD/build" KCONFIG_ALLCONFIG="$PWD/wanted.config" allnoconfig
    refused=$(grep '^CONFIG_' wanted.config | grep -vxFf build/.config || true)
    [ -z "$refused" ] || fail "the kernel's configuration has no place for:" $refused
}

# In a work folder: leaves vmlinux, bzImage and the configuration in result/.
build_kernel() {
    local tree
    tree=$(kernel_source)
    mkdir build
    # Nothing of who built it, where and when.
    export KBUILD_BUILD_USER=driftline KBUILD_BUILD_HOST=driftline KBUILD_BUILD_TIMESTAMP="1970-01-01"
    kernel_configure "$tree" "$1"
    nice make -s -C "$tree" O="$PWD/build" -j"$(nproc)" vmlinux bzImage >make.log 2>&1 ||
        { tail -n 40 make.log >&2; fail "the kernel does not build"; }
    strip -o result/vmlinux build/vmlinux
    cp build/arch/x86/boot/bzImage result/bzImage
    cp build/.config result/config
}
