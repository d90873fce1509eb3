#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy; exit status not 0 if it finds anything.
#
# Usage: scripts/tidy.sh [<file>...]      by default the C++ sources that differ from CUVIL_TIDY_REF
#   CUVIL_TIDY_REF     a commit or branch (default main); files that git does not know yet count as changed
#   CUVIL_TIDY_BUILD   a build directory whose compile_commands.json names the files (default: the newest under build/)
#   CUVIL_JOBS         files at a time (default: number of CPUs)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/progress.sh

command -v clang-tidy >/dev/null || die "clang-tidy is not installed: apt-get install clang-tidy"
build="${CUVIL_TIDY_BUILD:-}"
if [[ -z "$build" ]]; then
  # Only a build of the Python extension compiles agent/.
  commands="$(grep -ls agent/tracer.cc $(ls -t build/*/compile_commands.json 2>/dev/null) /dev/null | sed -n 1p || true)"
  [[ -n "$commands" ]] || die "no build of the Python extension under build/: configure one first (docs/development.md)"
  build="$(dirname "$commands")"
fi

files=("$@")
if ((${#files[@]} == 0)); then
  ref="${CUVIL_TIDY_REF:-main}"
  base="$(git merge-base "$ref" HEAD)" || die "CUVIL_TIDY_REF=$ref is no commit that this branch comes from"
  mapfile -t files < <({ git diff --name-only --diff-filter=d "$base" -- '*.cc'
                         git ls-files --others --exclude-standard -- '*.cc'; } | sort -u)
fi
# What the build does not compile has no flags to parse it with.
known="$(python3 -c 'import json, os, sys
for entry in json.load(open(sys.argv[1])): print(os.path.relpath(os.path.join(entry["directory"], entry["file"])))' \
  "$build/compile_commands.json")"
checked=()
for file in "${files[@]}"; do
  if grep -qxF "$(realpath --relative-to=. "$file")" <<<"$known"; then
    checked+=("$file")
  else
    say "$file is not compiled in $build; not checked"
    ((${#} == 0)) || die "a file that was named cannot be checked"
  fi
done
if ((${#checked[@]} == 0)); then
  say "no C++ source to check"
  exit 0
fi
say "clang-tidy on ${#checked[@]} files, with the flags of $build"
# clang has other warnings than the compiler of that build; those are checked by the builds with -Werror.
printf '%s\0' "${checked[@]}" | xargs -0 -n 1 -P "${CUVIL_JOBS:-$(nproc)}" \
  clang-tidy --quiet --warnings-as-errors='*' -p "$build" --extra-arg=-Wno-unknown-warning-option --extra-arg=-w 2>&1 |
  { grep --line-buffered -vE '^[0-9]+ warnings? generated' || true; }
