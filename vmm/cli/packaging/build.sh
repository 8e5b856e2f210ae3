#!/usr/bin/env bash
# Builds what users install, into FOLDER (by default target/dist):
#   driftline         the program, static and without debug information
#   driftline.debug   its debug information, which debuggers find by its build id
#   driftline_*.deb   the Debian package
# It fails if the program is larger than 12 MB. It needs rustup's target
# x86_64-unknown-linux-musl, musl-tools, binutils and cargo-deb.
set -euo pipefail
cd "$(dirname "$0")/../../.."

readonly triple=x86_64-unknown-linux-musl
CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR
dist=$(realpath -m "${1:-$CARGO_TARGET_DIR/dist}")
readonly dist built=$CARGO_TARGET_DIR/$triple/product

# Packed relative relocations take 4 KiB instead of 400.
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUSTFLAGS="-Clink-arg=-Wl,-z,pack-relative-relocs"
cargo build --locked --profile product --target $triple -p driftline-cli --bin driftline
rm -rf "$built/manual"
cargo run --locked --quiet -p driftline-cli --example manual -- "$built/manual"
gzip -9n "$built"/manual/man/*

rm -rf "$dist"
mkdir -p "$dist"
objcopy --only-keep-debug --compress-debug-sections "$built/driftline" "$dist/driftline.debug"
objcopy --strip-all --add-gnu-debuglink="$dist/driftline.debug" "$built/driftline" "$dist/driftline"
cargo deb --locked --no-build --strip --profile product --target $triple -p driftline-cli \
    --output "$dist/"
ls -l "$dist"
size=$(stat --format %s "$dist/driftline")
if ((size > 12000000)); then
    echo "$dist/driftline has $size bytes; the limit is 12,000,000" >&2
    exit 1
fi
