# Sourced by the other scripts: progress lines with the time since the start, and quiet steps that show their output
# only when they fail.

cuvil_started=${cuvil_started:-$SECONDS}

say() { printf '[%4ds] %s\n' "$((SECONDS - cuvil_started))" "$*" >&2; }
die() { say "error: $*"; exit 1; }

# step <log> <title> <command...>: runs the command into <log>, with a sign of life every 30 seconds.
step() {
  local log="$1" title="$2"
  shift 2
  local begin=$SECONDS status=0
  say "$title"
  mkdir -p "$(dirname "$log")"
  "$@" >"$log" 2>&1 &
  local child=$!
  while kill -0 "$child" 2>/dev/null; do
    # Polls every quarter of a second, so that short steps stay short.
    for _ in {1..120}; do
      kill -0 "$child" 2>/dev/null || break
      sleep 0.25
    done
    kill -0 "$child" 2>/dev/null && say "  … $title, $((SECONDS - begin)) s so far: $(tail -n 1 "$log" 2>/dev/null | tr -d '\r' | cut -c1-100)"
  done
  wait "$child" || status=$?
  if ((status != 0)); then
    say "FAILED ($status) after $((SECONDS - begin)) s: $title"
    tail -n "${CUVIL_LOG_LINES:-80}" "$log" >&2
    say "whole log: $log"
    return "$status"
  fi
  say "  done in $((SECONDS - begin)) s: $title"
}
