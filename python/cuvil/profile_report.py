"""A profile for people: tables as text, and a page that needs nothing but itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape

from cuvil.profile_device import Activity, Stream
from cuvil.profile_trace import save_whole
from cuvil.profiling import BY, Interval, Profile, Row, Thread

_PAGE_ROWS = 200
_PAGE_INTERVALS = 3000
_NAME_LETTERS = 80  # of kernels, in tables

# No script, and no way to load anything: what the program's names contain stays text.
_PAGE_HEAD = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Cuvil profile</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
table { border-collapse: collapse; margin-bottom: 1em; }
th, td { padding: 2px 12px 2px 0; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
tr:nth-child(even) { background: #f4f4f4; }
.lanes { position: relative; background: #f8f8f8; margin-bottom: 1em; overflow: hidden; }
.lanes div { position: absolute; height: 16px; min-width: 1px; overflow: hidden; white-space: nowrap;
  font-size: 11px; border-radius: 2px; box-sizing: border-box; border-right: 1px solid #fff; }
.call { background: #f3c98b; } .plan { background: #8fc1e3; }
.step { background: #b9dfb1; } .preparation { background: #d7b5e0; }
.kernel { background: #9ad0c2; } .copy { background: #e3a1a1; } .fill { background: #cfcfcf; }
</style></head><body>
<h1>Cuvil profile</h1>
"""


def time_text(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return (
                f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 1000 * size else f"{nanoseconds / size:,.0f} {unit}"
            )
    return f"{nanoseconds:.0f} ns"


def bytes_text(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B" if count else ""


def _short(key: str, by: str) -> str:
    if by == "kernel" and len(key) > _NAME_LETTERS:
        return f"{key[: _NAME_LETTERS - 1]}…"
    folder = os.getcwd() + os.sep
    return key[len(folder) :] if by in ("line", "kernel") and key.startswith(folder) else key


def _columns(profile: Profile, by: str) -> list[str]:
    if by == "kernel":
        return [by, "calls", "total", "mean", "share", "bytes", "mostly from"]
    columns = [by, "calls", "total", "mean", "share", *(["with inner"] if by == "module" else [])]
    if profile.streams:
        columns += ["kernels", "GPU", "GPU share", *(["GPU with inner"] if by == "module" else [])]
    return columns


def _cells(row: Row, by: str, profile: Profile) -> list[str]:
    values = row.to_dict(by, profile)
    if by == "kernel":
        times = [time_text(row.gpu_ns), time_text(values["mean_ns"]), f"{100 * values['share']:.1f} %"]
        return [_short(row.key, by), f"{row.calls:,}", *times, bytes_text(row.bytes), _short(row.line, "line")]
    cells = [
        _short(row.key, by),
        f"{row.calls:,}",
        time_text(row.total_ns),
        time_text(values["mean_ns"]),
        f"{100 * values['share']:.1f} %",
        *([time_text(row.inclusive_ns)] if by == "module" else []),
    ]
    if profile.streams:
        cells += [f"{row.kernels:,}", time_text(row.gpu_ns), f"{100 * values['gpu_share']:.1f} %"]
        cells += [time_text(row.gpu_inclusive_ns)] if by == "module" else []
    return cells


def _summary(profile: Profile) -> str:
    count = sum(len(thread.intervals) for thread in profile.threads)
    threads = f"{len(profile.threads)} thread{'' if len(profile.threads) == 1 else 's'}"
    spent = f"{time_text(profile.recorded_ns)} in module calls, {time_text(profile.end_ns - profile.start_ns)} in all"
    text = f"{spent}; {count:,} steps and calls on {threads}"
    if not profile.streams:
        return text
    kernels = sum(len(stream.activities) for stream in profile.streams)
    known = f"{100 * profile.attributed_share:.1f} % of kernel time with its line"
    return f"{text}; {time_text(profile.device_ns)} on GPUs in {kernels:,} kernels and copies, {known}"


def _notes(profile: Profile) -> list[str]:
    attached = "Times were taken with CUPTI attached, which makes launches and graphs slower than they are without."
    return [*profile.notes, *([attached] if profile.streams else [])]


def table(profile: Profile, by: str, limit: int | None) -> str:
    rows = profile.rows(by)
    shown = rows if limit is None else rows[:limit]
    cells = [_columns(profile, by), *(_cells(row, by, profile) for row in shown)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [_summary(profile), *_notes(profile)]
    if shown:
        lines.append("")
        for line in cells:
            rest = "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
            lines.append(f"{line[0]:<{widths[0]}}{rest}".rstrip())
    if len(shown) < len(rows):
        lines.append(f"and {len(rows) - len(shown):,} more")
    return "\n".join(lines)


def _page_table(profile: Profile, by: str) -> Iterator[str]:
    rows = profile.rows(by)
    headings = "".join(f"<th>{escape(text)}</th>" for text in _columns(profile, by))
    yield f"<h2>By {by}</h2>\n<table><tr>{headings}</tr>\n"
    for row in rows[:_PAGE_ROWS]:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row, by, profile)) + "</tr>\n"
    yield "</table>\n"
    if len(rows) > _PAGE_ROWS:
        yield f"<p>and {len(rows) - _PAGE_ROWS:,} more</p>\n"


def _page_counters(profile: Profile) -> Iterator[str]:
    yield "<h2>Counters</h2>\n<table><tr><th>counter</th><th>unit</th><th>samples</th>"
    yield "<th>least</th><th>mean</th><th>most</th></tr>\n"
    for counter in profile.counters:
        values = counter.to_dict()
        numbers = [f"{values['samples']:,}", *(f"{values[key]:,.1f}" for key in ("min", "mean", "max"))]
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (counter.name, counter.unit, *numbers))
        yield f"<tr>{cells}</tr>\n"
    yield "</table>\n"


def _lanes(profile: Profile, thread: Thread, shown: set[int], length_ns: int) -> Iterator[str]:
    depth = max((interval.depth for interval in thread.intervals), default=-1) + 1
    yield f'<h3>{escape(thread.name)}</h3>\n<div class="lanes" style="height:{18 * depth}px">\n'
    for interval in thread.intervals:
        if id(interval) in shown:
            yield _bar(interval, profile.start_ns, length_ns)
    yield "</div>\n"


def _stream_lanes(profile: Profile, stream: Stream, shown: set[int], length_ns: int) -> Iterator[str]:
    lanes = stream.lanes()
    yield f'<h3>{escape(stream.name)}</h3>\n<div class="lanes" style="height:{18 * len(lanes)}px">\n'
    for depth, lane in enumerate(lanes):
        for activity in lane:
            if id(activity) in shown:
                where = _where(activity, profile.start_ns, length_ns, depth)
                site = activity.site
                place = [] if site is None else [site.module, site.place, site.key("operator")]
                tip = "\n".join([activity.name, *place, time_text(activity.duration_ns)])
                yield _box(activity.kind, where, tip, activity.name)
    yield "</div>\n"


def _where(span: Interval | Activity, zero_ns: int, length_ns: int, depth: int) -> str:
    left = 100 * (span.start_ns - zero_ns) / length_ns
    width = 100 * (span.end_ns - span.start_ns) / length_ns
    return f"left:{left:.4f}%;width:{width:.4f}%;top:{18 * depth}px"


def _box(kind: str, where: str, tip: str, name: str) -> str:
    return f'<div class="{kind}" style="{where}" title="{escape(tip)}">{escape(name)}</div>\n'


def _bar(interval: Interval, zero_ns: int, length_ns: int) -> str:
    site = interval.site
    name = site.operator or f"{site.module} ({site.type})"
    tip = f"{name}\n{site.module}\n{site.place}\n{time_text(interval.end_ns - interval.start_ns)}"
    return _box(site.kind, _where(interval, zero_ns, length_ns, interval.depth), tip, name)


def _longest(spans: list[Interval] | list[Activity]) -> tuple[int, set[int]]:
    """How many there are, and the identities of those that a page shows."""
    by_length = sorted(spans, key=lambda span: span.start_ns - span.end_ns)
    return len(spans), {id(span) for span in by_length[:_PAGE_INTERVALS]}


def _page(profile: Profile) -> Iterator[str]:
    yield _PAGE_HEAD
    yield f"<p>{escape(_summary(profile))}</p>\n"
    for note in _notes(profile):
        yield f"<p>{escape(note)}</p>\n"
    # Kernels may end behind the profile: the device was waited for.
    ends = [profile.end_ns, *(activity.end_ns for activity in profile.activities())]
    length_ns = max(max(ends) - profile.start_ns, 1)
    yield "<h2>Timeline</h2>\n"
    intervals, shown_intervals = _longest(list(profile.intervals()))
    activities, shown_activities = _longest(list(profile.activities()))
    for what, count in (("steps and calls", intervals), ("kernels and copies", activities)):
        if count > _PAGE_INTERVALS:
            yield f"<p>The {_PAGE_INTERVALS:,} longest of {count:,} {what}.</p>\n"
    for thread in profile.threads:
        yield from _lanes(profile, thread, shown_intervals, length_ns)
    for stream in profile.streams:
        yield from _stream_lanes(profile, stream, shown_activities, length_ns)
    for by in BY if profile.streams else BY[:-1]:
        yield from _page_table(profile, by)
    if profile.counters:
        yield from _page_counters(profile)
    yield "</body></html>\n"


def save_page(profile: Profile, path: str) -> None:
    save_whole(path, _page(profile))
