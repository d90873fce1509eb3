#!/usr/bin/env bash
# Installs what building and testing need from Debian, if it is missing and we are root; otherwise says what is missing.
#
# Usage: scripts/apt_packages.sh build|test
set -euo pipefail
. "$(dirname "$0")/progress.sh"

packages=(ca-certificates ccache cmake dpkg-dev g++ git libzstd-dev lld ninja-build python3 python3-dev python3-venv
          xz-utils zlib1g-dev)
if [[ "${1:-build}" == test ]]; then
  packages+=(clang clang-format libbenchmark-dev libgmock-dev libgtest-dev)
fi

candidate() { apt-cache policy "$1" 2>/dev/null | sed -n 's/^  Candidate: //p' | grep -v '(none)' || true; }
installed() { [[ "$(dpkg-query -W -f='${Status}' "$1" 2>/dev/null)" == "install ok installed" ]]; }

missing() {
  local package
  for package in "${packages[@]}"; do installed "$package" || echo "$package"; done
  installed llvm-22-dev || installed llvm-19-dev || echo llvm-dev-of-some-version
}

command -v dpkg-query >/dev/null || { say "not a Debian system: the build's packages are taken to be there"; exit 0; }
[[ -n "$(missing)" ]] || exit 0
if [[ "$(id -u)" != 0 ]]; then
  die "missing packages: $(missing | tr '\n' ' ')— run as root, or install them first"
fi
log="$(mktemp)"
export DEBIAN_FRONTEND=noninteractive
step "$log" "refreshing package lists" apt-get -q update
# Debian 12 has LLVM 22 in its security archive; 19 serves where only an older snapshot is reachable.
if ! installed llvm-22-dev && ! installed llvm-19-dev; then
  if [[ -n "$(candidate llvm-22-dev)" ]]; then packages+=(llvm-22-dev); else packages+=(llvm-19-dev); fi
fi
step "$log" "installing packages (about 200 MB to download)" \
  apt-get -q install -y --no-install-recommends "${packages[@]}"
rm -f "$log"
