#!/usr/bin/env bash
# Runs Python tests with an extension built under AddressSanitizer.
#
# Usage: scripts/pytest_asan.sh <environment> <build directory> [<pytest arguments>...]
set -euo pipefail
cd "$(dirname "$0")/.."
environment="$1"
build="$2"
shift 2
# Not here: tests that memory does not grow (freed memory stays in quarantine), programs whose output is compared byte
# for byte with plain Python's, texts and formats, and what only takes long (the corpus, CPython's own tests, and tests
# that start dozens of interpreters, which take ten seconds each here; those of the interpreter's end stay).
(($#)) || set -- tests/python -k 'not grow and not leak and not keep_memory' --ignore-glob='*/test_cli*.py' \
  --ignore-glob='*/test_face*.py' --ignore-glob='*/test_corpus.py' --ignore-glob='*/test_instrument_cpython.py' \
  --ignore-glob='*/test_interrupts_at_every_stage.py' --ignore-glob='*/test_collector_at_every_stage.py' \
  --ignore-glob='*/test_replaced_weights.py' --ignore-glob='*/test_refused_environments.py' \
  --ignore-glob='*/test_profile_run.py'
# The runtime comes before everything else, and libstdc++ with it, so that exceptions are intercepted too.
preload="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libstdc++.so)"
# pytest captures file descriptor 2, so reports go to files.
reports="$(mktemp -d)"
trap 'rm -rf "$reports"' EXIT
status=0
LD_PRELOAD="$preload" ASAN_OPTIONS="detect_leaks=0:log_path=$reports/report" PYTHONMALLOC=malloc \
  PYTHONPATH="$build/python" "$environment/bin/python" -X faulthandler -m pytest -q -p no:cacheprovider --durations=15 "$@" || status=$?
# A report fails the run even if the process that wrote it was one that a test expects to die.
for report in "$reports"/*; do
  [[ -f "$report" ]] || continue
  cat "$report"
  status=1
done
exit "$status"
