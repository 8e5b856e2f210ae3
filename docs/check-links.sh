#!/usr/bin/env bash
# Checks the Markdown documents: every relative link leads to a file, every anchor to a heading,
# every path of the source tree that is named exists, and every page of the book is in its summary.
# Needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t files < <(git ls-files '*.md')
[ "${#files[@]}" -gt 40 ] || { echo "git lists only ${#files[@]} documents" >&2; exit 1; }
failed=0
readonly folders='dirty-tracker|checkpoint|migrate|vmm|tests|images|docs|\.ci'

complain() {
    echo "$1" >&2
    failed=1
}

# The anchors of a page, as mdbook and GitHub make them from its headings.
anchors() {
    sed '/^```/,/^```/d' "$1" | sed -n 's/^##* //p' | tr '[:upper:]' '[:lower:]' |
        sed -E 's/[^a-z0-9 _-]//g; s/ /-/g'
}

for file in "${files[@]}"; do
    while IFS= read -r target; do
        path=${target%%#*}
        case $target in
            http://* | https://* | mailto:*) continue ;;
        esac
        place=$file
        [ -z "$path" ] || place=$(dirname "$file")/$path
        if [ ! -e "$place" ]; then
            complain "$file: $target leads to nothing"
        elif [ "$target" != "$path" ] && ! anchors "$place" | grep -qxF -- "${target#*#}"; then
            complain "$file: $target leads to no heading"
        fi
    done < <(sed '/^```/,/^```/d' "$file" | grep -oE '\]\([^) ]+\)' | sed 's/^](//; s/)$//')
    while IFS= read -r path; do
        [ -e "$path" ] || complain "$file: there is no $path"
    done < <(sed '/^```/,/^```/d' "$file" | grep -oE "\`($folders)/[A-Za-z0-9_./-]+\`" | tr -d '\`')
done
for page in "${files[@]}"; do
    name=${page#docs/src/}
    [ "$name" = "$page" ] || [ "$name" = SUMMARY.md ] || grep -qF "($name)" docs/src/SUMMARY.md ||
        complain "$page is not in the summary"
done
[ "$failed" -eq 0 ]
