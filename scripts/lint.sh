#!/usr/bin/env bash
# Checks formatting, style, types and layering.
#
# Usage: scripts/lint.sh <environment> [--fix]
set -euo pipefail
cd "$(dirname "$0")/.."
bin="$1/bin"
failed=0

sources() { git ls-files --cached --others --exclude-standard "$@" | while read -r file; do [[ -f "$file" ]] && echo "$file"; done; }

if [[ "${2:-}" == --fix ]]; then
  sources '*.cc' '*.h' '*.c' | xargs --no-run-if-empty clang-format -i
  "$bin/ruff" check --quiet --fix . || true
  "$bin/ruff" format --quiet .
fi
sources '*.cc' '*.h' '*.c' | xargs --no-run-if-empty clang-format --dry-run --Werror || failed=1
"$bin/ruff" check --output-format=concise . || failed=1
"$bin/ruff" format --check . || failed=1
"$bin/mypy" || failed=1
"$bin/python" tests/layering_test.py || failed=1
# The repository speaks of itself only: no path of the machine that it was written on.
if sources | xargs --no-run-if-empty grep -nIE '(^|[^A-Za-z0-9_./-])/(root|work)/' -- ; then
  echo "lint: the lines above name a path of one machine"
  failed=1
fi
exit "$failed"
