"""A profile for people: tables as text, and a page that needs nothing but itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape

from cuvil.profile_trace import save_whole
from cuvil.profiling import BY, Interval, Profile, Row, Thread

_PAGE_ROWS = 200
_PAGE_INTERVALS = 3000

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


def _short(key: str, by: str) -> str:
    folder = os.getcwd() + os.sep
    return key[len(folder) :] if by == "line" and key.startswith(folder) else key


def _headings(by: str) -> list[str]:
    return [by, "calls", "total", "mean", "share", *(["with inner"] if by == "module" else [])]


def _cells(row: Row, by: str, whole_ns: int) -> list[str]:
    values = row.to_dict(by, whole_ns)
    cells = [
        _short(row.key, by),
        f"{row.calls:,}",
        time_text(row.total_ns),
        time_text(values["mean_ns"]),
        f"{100 * values['share']:.1f} %",
    ]
    return [*cells, time_text(row.inclusive_ns)] if by == "module" else cells


def _summary(profile: Profile) -> str:
    count = sum(len(thread.intervals) for thread in profile.threads)
    threads = f"{len(profile.threads)} thread{'' if len(profile.threads) == 1 else 's'}"
    spent = f"{time_text(profile.recorded_ns)} in module calls, {time_text(profile.end_ns - profile.start_ns)} in all"
    return f"{spent}; {count:,} steps and calls on {threads}"


def table(profile: Profile, by: str, limit: int | None) -> str:
    rows = profile.rows(by)
    whole_ns = profile.recorded_ns
    shown = rows if limit is None else rows[:limit]
    cells = [_headings(by), *(_cells(row, by, whole_ns) for row in shown)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [_summary(profile), *profile.notes]
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
    whole_ns = profile.recorded_ns
    yield f"<h2>By {by}</h2>\n<table><tr>" + "".join(f"<th>{escape(text)}</th>" for text in _headings(by)) + "</tr>\n"
    for row in rows[:_PAGE_ROWS]:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row, by, whole_ns)) + "</tr>\n"
    yield "</table>\n"
    if len(rows) > _PAGE_ROWS:
        yield f"<p>and {len(rows) - _PAGE_ROWS:,} more</p>\n"


def _lanes(profile: Profile, thread: Thread, shown: set[int]) -> Iterator[str]:
    length_ns = max(profile.end_ns - profile.start_ns, 1)
    depth = max((interval.depth for interval in thread.intervals), default=-1) + 1
    yield f'<h3>{escape(thread.name)}</h3>\n<div class="lanes" style="height:{18 * depth}px">\n'
    for interval in thread.intervals:
        if id(interval) in shown:
            yield _bar(interval, profile.start_ns, length_ns)
    yield "</div>\n"


def _bar(interval: Interval, zero_ns: int, length_ns: int) -> str:
    site = interval.site
    left = 100 * (interval.start_ns - zero_ns) / length_ns
    width = 100 * (interval.end_ns - interval.start_ns) / length_ns
    name = site.operator or f"{site.module} ({site.type})"
    tip = f"{name}\n{site.module}\n{site.place}\n{time_text(interval.end_ns - interval.start_ns)}"
    style = f"left:{left:.4f}%;width:{width:.4f}%;top:{18 * interval.depth}px"
    return f'<div class="{site.kind}" style="{style}" title="{escape(tip)}">{escape(name)}</div>\n'


def _page(profile: Profile) -> Iterator[str]:
    yield _PAGE_HEAD
    yield f"<p>{escape(_summary(profile))}</p>\n"
    for note in profile.notes:
        yield f"<p>{escape(note)}</p>\n"
    longest = sorted(profile.intervals(), key=lambda interval: interval.start_ns - interval.end_ns)
    shown = {id(interval) for interval in longest[:_PAGE_INTERVALS]}
    yield "<h2>Timeline</h2>\n"
    if len(longest) > _PAGE_INTERVALS:
        yield f"<p>The {_PAGE_INTERVALS:,} longest of {len(longest):,} steps and calls.</p>\n"
    for thread in profile.threads:
        yield from _lanes(profile, thread, shown)
    for by in BY:
        yield from _page_table(profile, by)
    yield "</body></html>\n"


def save_page(profile: Profile, path: str) -> None:
    save_whole(path, _page(profile))
