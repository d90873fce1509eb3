#!/usr/bin/env bash
# Builds the parts of Debian's abseil that Cuvil uses as one static, position-independent, hidden-visibility archive.
#
# Debian's own archives are compiled for executables only (they contain local-exec TLS) and cannot go into a shared
# library; see docs/design/0002-abseil-linkage.md. The result is a prefix with include/, lib/libcuvil_absl.a and
# VERSION. It is cached, keyed by version and flags, and published by a rename, so that concurrent builds are safe.
# The path of the prefix is the only line on standard output.
#
# Usage: scripts/build_abseil.sh [--sanitize=address|thread|undefined] [--print-prefix]
#   CUVIL_ABSL_SOURCE   an unpacked abseil source tree to use instead of Debian's source package
#   CUVIL_CACHE         where prefixes are kept (default ${XDG_CACHE_HOME:-~/.cache}/cuvil)
#   CUVIL_JOBS          parallel compilations (default: number of CPUs)
set -euo pipefail

# The Debian package whose source is fetched, and the version that the key falls back to without apt.
readonly package=abseil
# The libraries with code of their own; header-only ones (flat_hash_map, span, inlined_vector, cleanup, ...) come along.
readonly targets=(status statusor strings str_format_internal raw_hash_set hash synchronization throw_delegate)
# Bumped whenever the flags or targets above or below change.
readonly recipe=2

sanitize=""
print_prefix=0
for argument in "$@"; do
  case "$argument" in
    --sanitize=address | --sanitize=thread | --sanitize=undefined) sanitize="${argument#*=}" ;;
    --sanitize=) ;;
    --print-prefix) print_prefix=1 ;;
    *) echo "build_abseil.sh: unknown argument $argument" >&2; exit 2 ;;
  esac
done

say() { echo "abseil: $*" >&2; }
die() { echo "abseil: $*" >&2; exit 1; }

cache="${CUVIL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cuvil}"
mkdir -p "$cache"

# The key needs a version before anything is fetched: the distribution's codename names the source package's version
# well enough, because a stable release never moves to another upstream version.
codename="unknown"
if [[ -r /etc/os-release ]]; then codename="$(. /etc/os-release && echo "${VERSION_CODENAME:-$ID}")"; fi
if [[ -n "${CUVIL_ABSL_SOURCE:-}" ]]; then
  [[ -r "$CUVIL_ABSL_SOURCE/absl/base/config.h" ]] || die "$CUVIL_ABSL_SOURCE is not an abseil source tree"
  version="source-$(sed -n 's/^#define ABSL_LTS_RELEASE_VERSION //p' "$CUVIL_ABSL_SOURCE/absl/base/config.h")"
else
  version="$codename"
fi
prefix="$cache/abseil-$version-r$recipe-$(uname -m)-cxx20-pic${sanitize:+-$sanitize}"

if ((print_prefix)); then echo "$prefix"; exit 0; fi
if [[ -f "$prefix/VERSION" ]]; then echo "$prefix"; exit 0; fi

exec 9>"$prefix.lock"
if ! flock -n 9; then
  say "another build of the same prefix is running; waiting for it"
  flock 9
fi
if [[ -f "$prefix/VERSION" ]]; then echo "$prefix"; exit 0; fi

work="$(mktemp -d "$cache/abseil-build.XXXXXX")"
trap 'rm -rf "$work"' EXIT

# Writes deb-src lines for the Debian archives that the system already uses, and for nothing else, so that no address
# has to be written down here and no file of the system changes.
private_sources_list() {
  python3 - "$codename" <<'PYTHON'
import glob, re, sys
codename = sys.argv[1]
def wanted(suite): return suite == codename or suite.startswith(codename + "-")
lines = []
for path in ["/etc/apt/sources.list", *sorted(glob.glob("/etc/apt/sources.list.d/*.list"))]:
    try:
        text = open(path, encoding="utf-8").read()
    except OSError:
        continue
    for match in re.finditer(r"^deb\s+(\[[^\]]*\]\s+)?(\S+)\s+(\S+)\s+(.+)$", text, re.M):
        options, uri, suite, components = match.groups()
        if wanted(suite):
            lines.append(f"deb-src {options or ''}{uri} {suite} {components}")
for path in sorted(glob.glob("/etc/apt/sources.list.d/*.sources")):
    text = re.sub(r"^#.*\n", "", open(path, encoding="utf-8").read(), flags=re.M)
    for stanza in re.split(r"\n\s*\n", text):
        fields = {k.lower(): " ".join(v.split()) for k, v in re.findall(r"^([A-Za-z-]+):((?:.*(?:\n[ \t].*)*))", stanza, re.M)}
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
            continue
        signed = fields.get("signed-by", "")
        options = f"[signed-by={signed}] " if signed.startswith("/") else ""
        for uri in fields.get("uris", "").split():
            for suite in filter(wanted, fields.get("suites", "").split()):
                lines.append(f"deb-src {options}{uri} {suite} {fields.get('components', '')}")
print("\n".join(dict.fromkeys(lines)))
PYTHON
}

fetch_source() {
  local apt_dir="$work/apt"
  mkdir -p "$apt_dir"/{lists/partial,archives/partial,empty}
  private_sources_list >"$apt_dir/sources.list"
  [[ -s "$apt_dir/sources.list" ]] || die "no Debian archive in the system's apt sources; set CUVIL_ABSL_SOURCE to an unpacked abseil source tree"
  local options=(-q -o "Dir::Etc::sourcelist=$apt_dir/sources.list" -o "Dir::Etc::sourceparts=$apt_dir/empty"
                 -o "Dir::State::lists=$apt_dir/lists" -o "Dir::Cache=$apt_dir" -o "Dir::Cache::archives=$apt_dir/archives"
                 -o "APT::Sandbox::User=$(id -un)" -o "APT::Get::List-Cleanup=false" -o "Acquire::Languages=none")
  say "fetching Debian's source package (about 2 MB, plus package lists)"
  apt-get "${options[@]}" update >"$work/apt.log" 2>&1 || { tail -n 20 "$work/apt.log" >&2; die "apt-get update failed"; }
  (cd "$work" && apt-get "${options[@]}" source "$package" >>"$work/apt.log" 2>&1) ||
    { tail -n 20 "$work/apt.log" >&2; die "apt-get source $package failed (dpkg-dev and xz-utils are needed)"; }
  source_dir="$(find "$work" -mindepth 1 -maxdepth 1 -type d -name "$package-*" | head -n 1)"
  [[ -n "$source_dir" ]] || die "apt-get source left no directory"
}

if [[ -n "${CUVIL_ABSL_SOURCE:-}" ]]; then
  source_dir="$work/source"
  cp -r "$CUVIL_ABSL_SOURCE" "$source_dir"
else
  fetch_source
fi

# Everything is C++20 here, so that the vocabulary types are the standard ones: absl::string_view is std::string_view.
sed -i -E 's/^(#define ABSL_OPTION_USE_STD_[A-Z_]+) [02]$/\1 1/' "$source_dir/absl/base/options.h"

flags="-O2 -g1 -fvisibility=hidden -fvisibility-inlines-hidden -ffunction-sections -fdata-sections -w"
if [[ -n "$sanitize" ]]; then flags+=" -fsanitize=$sanitize -fno-omit-frame-pointer"; else flags+=" -DNDEBUG"; fi
launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
say "compiling ${#targets[@]} libraries${sanitize:+ with -fsanitize=$sanitize} (about a minute of two CPUs)"
cmake -S "$source_dir" -B "$work/build" -G Ninja -Wno-dev -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_STANDARD=20 \
  -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_CXX_FLAGS="$flags" -DABSL_PROPAGATE_CXX_STD=ON -DBUILD_TESTING=OFF \
  -DABSL_ENABLE_INSTALL=OFF "${launcher[@]}" >"$work/cmake.log" 2>&1 ||
  { tail -n 20 "$work/cmake.log" >&2; die "configuring failed"; }
# The directory is a new one each time; relative paths let ccache recognise its contents.
CCACHE_BASEDIR="$work" CCACHE_NOHASHDIR=1 nice ninja -C "$work/build" -j "${CUVIL_JOBS:-$(nproc)}" "${targets[@]/#/absl_}" >"$work/ninja.log" 2>&1 ||
  { tail -n 40 "$work/ninja.log" >&2; die "compiling failed"; }

stage="$work/prefix"
mkdir -p "$stage/lib" "$stage/include"
{
  echo "CREATE $stage/lib/libcuvil_absl.a"
  find "$work/build/absl" -name 'libabsl_*.a' | sort | sed 's/^/ADDLIB /'
  printf 'SAVE\nEND\n'
} | ar -M
ranlib "$stage/lib/libcuvil_absl.a"
(cd "$source_dir" && find absl \( -name '*.h' -o -name '*.inc' \) ! -path '*testing*' -print0 |
  tar --null -cf - -T - | tar -xf - -C "$stage/include")
cp "$source_dir/LICENSE" "$stage/LICENSE"
sed -n 's/^#define ABSL_LTS_RELEASE_VERSION //p' "$source_dir/absl/base/config.h" >"$stage/VERSION"

rm -rf "$prefix"
mv "$stage" "$prefix"
say "ready: $prefix (LTS $(cat "$prefix/VERSION"), $(du -sh "$prefix" | cut -f1))"
echo "$prefix"
