#!/usr/bin/env bash
# Everything that continuous integration checks, on every Python from 3.11 to 3.13 that is found.
#
#   lint      formatting, style, types, layering
#   cpp       GoogleTest binaries of every folder, plain; one build with the benchmarks
#   tsan      what lies below the agent, under ThreadSanitizer
#   asan      everything in C++ under AddressSanitizer, and the extension under Python
#   clang     one build with Clang's thread-safety analysis as errors, and what lies below the agent in it
#   llvm19    what uses LLVM, compiled with LLVM 19 where that is installed beside 22
#   wheels    a wheel for each Python: size, linkage, serves a model in every patch release found
#   python    pytest on each Python; torch 2.11 on 3.11 and 3.12, the newest on 3.13
#
# Usage: scripts/test.sh [<stage>...]     all stages by default
#   CI=true                     all three Pythons are required; without it a missing one is skipped with a message
#   CUVIL_PYTHON_3_11=...       an interpreter to use (also _3_12, _3_13)
#   CUVIL_ENV_3_11=...          an environment with torch to use as it is (also _3_12, _3_13)
#   CUVIL_JOBS                  parallel compilations (default: number of CPUs)
#   CUVIL_PYTEST_ARGS           more arguments for pytest
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/progress.sh

all_stages=(lint cpp tsan asan clang llvm19 wheels python)
stages=("$@")
((${#stages[@]})) || stages=("${all_stages[@]}")
for stage in "${stages[@]}"; do
  [[ " ${all_stages[*]} " == *" $stage "* ]] || die "there is no stage $stage; there are: ${all_stages[*]}"
done
untried=""
jobs="${CUVIL_JOBS:-$(nproc)}"
export CUVIL_JOBS="$jobs"
logs="$PWD/build/logs"
mkdir -p "$logs"
# Two threads of torch beside another process are slower than one on a small machine.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

wants() { local stage; for stage in "${stages[@]}"; do [[ "$stage" != "$1" ]] || return 0; done; return 1; }

scripts/apt_packages.sh test

llvm=22
[[ -d /usr/lib/llvm-22/lib/cmake/llvm || -n "${CUVIL_LLVM_DIR:-}" ]] || llvm=19
common=(-G Ninja -DCUVIL_LLVM_VERSION="$llvm" -DCUVIL_WERROR=ON)
[[ -z "${CUVIL_LLVM_DIR:-}" ]] || common+=(-DCUVIL_LLVM_DIR="$CUVIL_LLVM_DIR")

# Under the sanitizers assertions are on. Their builds are not optimised much: compiling is most of the time.
sanitized=(-DCMAKE_BUILD_TYPE=Debug "-DCMAKE_C_FLAGS_DEBUG=-O1 -g1" "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1")

declare -A python=() environments=()
versions=()
missing=()
for version in 3.11 3.12 3.13; do
  found="$(scripts/find_python.sh "$version" | sed -n 1p)"
  if [[ -n "$found" ]]; then
    python[$version]="$found"
    versions+=("$version")
    say "Python $version: $found"
  else
    missing+=("$version")
    say "Python $version: not found (looked in pyenv and on PATH); its tests are skipped"
  fi
done
if ((${#missing[@]})) && [[ "${CI:-}" == true ]]; then
  die "CI needs Python 3.11, 3.12 and 3.13; missing: ${missing[*]}"
fi
((${#versions[@]})) || die "no Python from 3.11 to 3.13 with headers was found"

# Environments download while the compiler works. One after the other: they share torch's CUDA libraries.
if wants python || wants lint || wants cpp || wants tsan || wants asan || wants clang || wants wheels; then
  rm -f "$logs"/env-*.done
  (
    for version in "${versions[@]}"; do
      nice scripts/python_env.sh "${python[$version]}" >"$logs/env-$version.path" 2>"$logs/env-$version.log" ||
        { echo failed >"$logs/env-$version.path"; }
      touch "$logs/env-$version.done"
    done
  ) &
  env_job=$!
  trap 'kill "$env_job" 2>/dev/null || true' EXIT
fi

environment() {
  local version="$1" waited=0
  while [[ ! -f "$logs/env-$version.done" ]]; do
    ((waited++ % 30)) || say "Python $version: waiting for its environment: $(tail -n 1 "$logs/env-$version.log" 2>/dev/null)"
    sleep 1
  done
  environments[$version]="$(cat "$logs/env-$version.path")"
  if [[ ! -x "${environments[$version]}/bin/python" ]]; then
    tail -n 40 "$logs/env-$version.log" >&2
    die "Python $version: no environment"
  fi
}

# build <tag> <cmake arguments...>: all targets, or those in build_targets
build_targets=()
build() {
  local tag="$1"
  shift
  step "$logs/cmake-$tag.log" "$tag: configuring" cmake -S . -B "build/$tag" "${common[@]}" "$@"
  step "$logs/ninja-$tag.log" "$tag: building" ninja -C "build/$tag" -k 0 -j "$jobs" "${build_targets[@]}"
}
first="${versions[0]}"
# unit_tests <tag> <version> <ctest arguments...>: with the torch of that Python's environment
unit_tests() {
  local tag="$1" version="$2" torch
  environment "$version"
  torch="$("${environments[$version]}/bin/python" -c \
    'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')/lib/libtorch_cpu.so"
  CUVIL_TEST_TORCH_LIBRARY="$torch" CUVIL_REQUIRE_TORCH_LIBRARY=1 step "$logs/ctest-$tag.log" "$tag: C++ tests" \
    ctest --test-dir "build/$tag" --output-on-failure --no-tests=error "${@:3}"
}
tag_of() { echo "ci-py${1/./}"; }

if wants tsan; then
  build ci-tsan "${sanitized[@]}" -DCUVIL_SANITIZE=thread -DCUVIL_BUILD_PYTHON=OFF
  TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1" unit_tests ci-tsan "$first"
fi

if wants cpp || wants python; then
  for version in "${versions[@]}"; do
    build "$(tag_of "$version")" -DPython_EXECUTABLE="${python[$version]}" \
      -DCUVIL_BUILD_BENCHMARKS="$([[ "$version" == "$first" ]] && echo ON || echo OFF)"
    if [[ "$version" == "$first" ]]; then
      step "$logs/headers.log" "every header compiles alone" ninja -C "build/$(tag_of "$version")" -j "$jobs" all_verify_interface_header_sets
      unit_tests "$(tag_of "$version")" "$version"
    fi
  done
fi

if wants lint; then
  environment "$first"
  step "$logs/lint.log" "lint" scripts/lint.sh "${environments[$first]}"
fi

if wants asan; then
  build ci-asan "${sanitized[@]}" -DCUVIL_SANITIZE=address -DPython_EXECUTABLE="${python[$first]}"
  # The runtime of GCC up to 13 takes a block of thread-local storage that happens to begin at a certain place of its
  # page for one of glibc before 2.25, reads its length where there is none, and LeakSanitizer dies reading it, once in
  # some hundreds of runs. Without its interceptor it finds those blocks as it finds all others, through malloc.
  ASAN_OPTIONS=detect_leaks=1:intercept_tls_get_addr=0 unit_tests ci-asan "$first"
fi

if wants clang; then
  build ci-clang -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS_DEBUG=-O0 -DCMAKE_CXX_FLAGS_DEBUG=-O0 \
    -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DPython_EXECUTABLE="${python[$first]}"
  unit_tests ci-clang "$first"
fi

if wants llvm19; then
  if [[ "$llvm" != 19 && -d /usr/lib/llvm-19/lib/cmake/llvm ]]; then
    # All but jit/ comes from the compiler's cache.
    build_targets=(_native cuvil_python_tree jit_test)
    build ci-llvm19 -DPython_EXECUTABLE="${python[$first]}" -DCUVIL_LLVM_DIR=/usr/lib/llvm-19/lib/cmake/llvm
    build_targets=()
    step "$logs/ctest-ci-llvm19.log" "ci-llvm19: C++ tests of jit/" \
      ctest --test-dir build/ci-llvm19 --output-on-failure --no-tests=error -R '^jit_test$'
    step "$logs/llvm19.log" "ci-llvm19: a kernel" env PYTHONPATH=build/ci-llvm19/python "${python[$first]}" -c \
      'import cuvil._native as n; k = n.llvm_self_test(); print(k); assert k["version"].startswith("19."), k'
  elif [[ "$llvm" == 19 ]]; then
    say "LLVM 19: is what everything was built with"
  else
    untried=" (llvm19 not tried: apt-get install llvm-19-dev)"
    say "LLVM 19: not installed; not tried"
  fi
fi

if wants cpp || wants python; then
  # Late, because their environments are made last. Of what lies below the agent only torch may be another one.
  for version in "${versions[@]:1}"; do
    unit_tests "$(tag_of "$version")" "$version" -R '^(agent|scheduler)_'
  done
fi

if wants wheels; then
  for version in "${versions[@]}"; do environment "$version"; done
  # The same flags as above, so that nothing is compiled again.
  CUVIL_WERROR=ON scripts/wheels.sh "${versions[@]}"
fi

# A run of pytest keeps one core busy, so two go side by side where there are two.
running=()
failed=0
# beside <log> <title> <command...>: as step, once there is room beside those that run
beside() {
  if ((${#running[@]} >= (jobs > 1 ? 2 : 1))); then
    wait -n "${running[@]}" || failed=1
    local still=() run
    for run in "${running[@]}"; do
      if kill -0 "$run" 2>/dev/null; then still+=("$run"); else wait "$run" || failed=1; fi
    done
    running=("${still[@]}")
  fi
  step "$@" &
  running+=("$!")
}
# Environments that are made here have the packages with pretrained models; one that is given may lack them.
pretrained() { local given="CUVIL_ENV_${1/./_}"; [[ -n "${!given:-}" ]] || echo 1; }
# The longest first: under AddressSanitizer, then the newest Python.
if wants asan; then
  environment "$first"
  beside "$logs/pytest-asan.log" "ci-asan: Python tests" env CUVIL_REQUIRE_PRETRAINED="$(pretrained "$first")" scripts/pytest_asan.sh "${environments[$first]}" build/ci-asan
fi
if wants python; then
  for ((i = ${#versions[@]} - 1; i >= 0; --i)); do
    version="${versions[i]}"
    environment "$version"
    beside "$logs/pytest-$version.log" "Python $version: pytest" env PYTHONPATH="build/$(tag_of "$version")/python" \
      CUVIL_REQUIRE_PRETRAINED="$(pretrained "$version")" \
      "${environments[$version]}/bin/python" -m pytest -q -p no:cacheprovider --durations=15 ${CUVIL_PYTEST_ARGS:-} tests
  done
fi
for run in "${running[@]}"; do wait "$run" || failed=1; done
if wants python; then
  for version in "${versions[@]}"; do say "Python $version: $(tail -n 1 "$logs/pytest-$version.log")"; done
fi
((failed == 0)) || die "pytest failed"

say "all of: ${stages[*]} passed on Python ${versions[*]}${missing[*]:+ (skipped: ${missing[*]})}$untried"
