#!/usr/bin/env bash
# Prints the page "Command line" of the book from the program's own help:
#   docs/cli.sh target/release/driftline >docs/src/reference/cli.md
set -euo pipefail
driftline=${1:?usage: docs/cli.sh PATH_OF_DRIFTLINE}

# The options that every command has are shown once, at the program's own help.
without_common() {
    awk '
        /^ +(-[a-zA-Z], )?--?[a-z]/ { common = /--(verbose|log|log-format|log-file|help)( |\.|$)/ }
        /^[^ ]/ { common = 0 }
        !common { print }' | sed 's/ *$//' | cat -s | awk '
        # A heading with nothing under it is dropped, too.
        /^Output:$/ { heading = $0; next }
        heading != "" && NF { if (/^ /) print heading; heading = "" }
        { print }' | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'
}

page() {
    printf '\n## driftline %s\n\n```text\n' "$1"
    # Without a terminal, help is 100 columns wide.
    # shellcheck disable=SC2086
    "$driftline" $1 --help | without_common
    printf '```\n'
}

cat <<'TEXT'
# Command line

This page is the program's own help. `docs/cli.sh` generates it.

Sizes are a number and nothing, `K`, `M`, `G` or `T`, or `KiB`, `MiB`, `GiB` or `TiB` (powers of
two), such as `64M` or `1.5G`. `MB`, which others read as a power of ten, is refused. Sizes inside
`--guest payload,..` are whole numbers with these units up to `GiB`. Durations are numbers and `ms`,
`s`, `m`, `h` or `d`, such as `100ms` or `"1h 30m"`, in whole milliseconds. Results go to standard
output, everything else to standard error. Every command with results has `--json`.
[Exit codes](exit-codes.md) are the same for all commands. The options under *Output* of the first
block, except `--version`, belong to every command.

```text
TEXT
"$driftline" --help | sed 's/ *$//'
printf '```\n'
for command in demo run serve firecracker info balloon pause resume nmi stop checkpoint restore \
    receive-migration send-migration upgrade plan top cancel-migration resolve compare doctor; do
    page "$command"
done
for command in ls verify repair compact export; do
    page "store $command"
done
