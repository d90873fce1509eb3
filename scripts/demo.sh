#!/usr/bin/env bash
# The demonstration on a bare Debian 12: installs what is missing, builds Cuvil for the system's Python 3.11 and runs
# `python -m cuvil.demo` in an environment with torch.
#
# Usage: scripts/demo.sh [<arguments of the demo>...]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/progress.sh
scripts/apt_packages.sh build

python=""
for candidate in /usr/bin/python3.11 $(for v in 3.11 3.12 3.13; do scripts/find_python.sh "$v"; done); do
  [[ -x "$candidate" ]] && python="$candidate" && break
done
[[ -n "$python" ]] || die "no Python from 3.11 to 3.13 with headers was found"
say "Python: $("$python" --version) at $python"
logs="build/logs"
mkdir -p "$logs"
shared="$(scripts/python_env.sh "$python")"

# Cuvil is installed into an environment of its own that sees the shared one, so that the shared one stays as it is.
environment="$PWD/build/demo-env"
rm -rf "$environment"
"$python" -m venv "$environment"
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
"$shared/bin/python" -c "$purelib" >"$("$environment/bin/python" -c "$purelib")/shared.pth"

llvm=22
[[ -d /usr/lib/llvm-22/lib/cmake/llvm || -n "${CUVIL_LLVM_DIR:-}" ]] || llvm=19
step "$logs/demo-build.log" "building and installing Cuvil (one to three minutes the first time)" \
  env CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL="${CUVIL_JOBS:-$(nproc)}" \
  "$environment/bin/python" -m pip --disable-pip-version-check install --no-deps --no-build-isolation --force-reinstall \
  --config-settings=cmake.define.CUVIL_LLVM_VERSION="$llvm" .
# From another folder, so that what was installed is what runs.
cd /
exec "$environment/bin/python" -m cuvil.demo "$@"
