#!/usr/bin/env bash
# Runs the Python tests marked `asan` with an extension built under AddressSanitizer.
#
# Usage: scripts/pytest_asan.sh <environment> <build directory> [<pytest arguments>...]
set -euo pipefail
cd "$(dirname "$0")/.."
environment="$1"
build="$2"
shift 2
(($#)) || set -- -m asan tests/python
# The runtime comes before everything else, and libstdc++ with it, so that exceptions are intercepted too.
preload="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libstdc++.so)"
status=0
LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH="$build/python" \
  "$environment/bin/python" -m pytest -q -p no:cacheprovider "$@" || status=$?
# 5: no test carries the mark.
[[ "$status" == 5 ]] && exit 0
exit "$status"
