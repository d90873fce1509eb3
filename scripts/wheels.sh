#!/usr/bin/env bash
# Builds one wheel for each Python from 3.11 to 3.13 into dist/ and checks its size and linkage, and that it works in
# every patch release of its Python that is found (tests/wheel_check.py).
#
# Usage: scripts/wheels.sh [<version>...]
#   CI=true   a Python that cannot be found, or that has no environment with torch (scripts/python_env.sh), is an error
#             instead of a message
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/progress.sh
scripts/apt_packages.sh build

readonly limit_bytes=$((20 << 20))
versions=("$@")
((${#versions[@]})) || versions=(3.11 3.12 3.13)
cache="${CUVIL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cuvil}"
logs="build/logs"
mkdir -p dist "$logs" "$cache/env"

# A small environment with the build frontend only; no torch is needed to build.
builder() {
  local python="$1" env
  env="$cache/env/wheel-$("$python" -c 'import os, sys; print("%d%d" % sys.version_info[:2], os.path.realpath(sys.executable))' | sha256sum | cut -c1-12)"
  if [[ ! -f "$env/READY" ]]; then
    rm -rf "$env"
    "$python" -m venv "$env"
    "$env/bin/python" -m pip --disable-pip-version-check install --quiet $(grep -E '^(scikit-build-core|pytest)==' scripts/requirements/common.txt)
    touch "$env/READY"
  fi
  echo "$env"
}

llvm=22
[[ -d /usr/lib/llvm-22/lib/cmake/llvm || -n "${CUVIL_LLVM_DIR:-}" ]] || llvm=19
missing=0
for version in "${versions[@]}"; do
  python="$(scripts/find_python.sh "$version" | sed -n 1p)"
  if [[ -z "$python" ]]; then
    say "Python $version: not found; no wheel for it"
    missing=1
    continue
  fi
  env="$(builder "$python")"
  tag="cp${version/./}"
  rm -f dist/cuvil-*-"$tag"-*.whl
  step "$logs/wheel-$tag.log" "Python $version: building the wheel" \
    env CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL="${CUVIL_JOBS:-$(nproc)}" \
    "$env/bin/python" -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation --wheel-dir dist \
    --config-settings=cmake.define.CUVIL_LLVM_VERSION="$llvm" \
    --config-settings=cmake.define.CUVIL_WERROR="${CUVIL_WERROR:-OFF}" .
  wheel="$(ls dist/cuvil-*-"$tag"-*.whl)"
  size="$(stat -c %s "$wheel")"
  say "  $wheel: $((size / 1024)) KiB"
  ((size <= limit_bytes)) || die "$wheel is larger than $((limit_bytes >> 20)) MiB"
  unpacked="$(mktemp -d)"
  "$env/bin/python" -m zipfile -e "$wheel" "$unpacked"
  for file in __init__.py __main__.py py.typed _native.pyi; do
    [[ -f "$unpacked/cuvil/$file" ]] || die "$wheel has no cuvil/$file"
  done
  if [[ -d "$unpacked/cuvil/_native" ]]; then die "$wheel has the C++ sources of the extension"; fi
  step "$logs/wheel-$tag-linkage.log" "Python $version: checking what the wheel's extension links" \
    env CUVIL_LINKAGE_FILES="$(ls "$unpacked"/cuvil/_native*.so)" "$env/bin/python" -m pytest -q tests/linkage_test.py
  # Every patch release of a Python must run the same wheel. It borrows pytest from the environment of another one, and
  # torch where there is an environment with it.
  torch_env="$(scripts/python_env.sh --existing "$python")"
  if [[ -z "$torch_env" ]]; then
    [[ "${CI:-}" != true ]] || die "Python $version: CI needs an environment with torch to try the wheel in"
    say "  Python $version: no environment with torch; the wheel serves no model here"
  fi
  site="$("${torch_env:-$env}/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  scripts/find_python.sh "$version" | while read -r other; do
    release="$("$other" -c 'import platform; print(platform.python_version())')"
    # From another folder, so that nothing is imported from the source tree.
    step "$logs/wheel-$tag-$release.log" "Python $release: trying the wheel${torch_env:+ with torch}" \
      env -C "$unpacked" PYTHONPATH="$unpacked:$site" CUVIL_CHECK_TORCH="${torch_env:+1}" \
      "$other" -m pytest -q -p no:cacheprovider "$PWD/tests/wheel_check.py"
  done
  rm -rf "$unpacked"
done
if ((missing)) && [[ "${CI:-}" == true ]]; then die "CI needs every Python from 3.11 to 3.13"; fi
ls -l dist/*.whl >&2
