#!/usr/bin/env bash
# Prints the interpreters of one version, best first, one a line: the one named in CUVIL_PYTHON_3_11 (_3_12, _3_13),
# pyenv's, then those on PATH. Only release builds of CPython with the GIL and with headers count.
#
# Usage: scripts/find_python.sh 3.11|3.12|3.13
set -euo pipefail
version="$1"

# Prints the real path of a usable interpreter: pyenv's shims are scripts that hide it.
usable() {
  "$1" - "$version" 2>/dev/null <<'PYTHON'
import os, sys, sysconfig
assert sys.implementation.name == "cpython"
assert "%d.%d" % sys.version_info[:2] == sys.argv[1]
assert not hasattr(sys, "gettotalrefcount") and not sysconfig.get_config_var("Py_GIL_DISABLED")
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
import ensurepip, venv
print(os.path.realpath(sys.executable))
PYTHON
}

override="CUVIL_PYTHON_${version/./_}"
candidates=()
if [[ -n "${!override:-}" ]]; then candidates+=("${!override}"); fi
for directory in $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".* 2>/dev/null | sort -rV); do
  candidates+=("$directory/bin/python$version")
done
candidates+=("/usr/bin/python$version" "/usr/local/bin/python$version")
if on_path="$(command -v "python$version" 2>/dev/null)"; then candidates+=("$on_path"); fi

declare -A seen=()
for candidate in "${candidates[@]}"; do
  [[ -x "$candidate" ]] || continue
  real="$(usable "$candidate")" || continue
  [[ -z "${seen[$real]:-}" ]] || continue
  seen[$real]=1
  echo "$candidate"
done
