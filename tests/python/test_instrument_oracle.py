"""What the probes announce is what the interpreter itself says it executes."""

# The form of these programs decides their bytecode.
# ruff: noqa: C416, C420, PIE804, RUF015, RUF021, RUF059, UP033, UP050

from __future__ import annotations

import sys

import instrument_subjects as subjects
import pytest
from cuvil import _native

INSTRUCTIONS, FRAMES, READS, CALLS, BRANCHES = 1, 2, 4, 8, 16


def executed_by_interpreter(function):
    """[(qualified name, offset)] of every instruction of the subject file, in order."""
    seen = []
    filename = subjects.__file__
    codes = {}

    def note(code, offset):
        if code.co_filename == filename:
            codes[code.co_qualname] = code
            seen.append((code.co_qualname, offset))

    if sys.version_info >= (3, 12):
        monitoring, tool = sys.monitoring, 4
        monitoring.use_tool_id(tool, "cuvil-test")
        try:
            monitoring.register_callback(tool, monitoring.events.INSTRUCTION, note)
            monitoring.set_events(tool, monitoring.events.INSTRUCTION)
            function()
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None)
            monitoring.free_tool_id(tool)
    else:

        def trace(frame, event, arg):
            if frame.f_code.co_filename != filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                note(frame.f_code, frame.f_lasti)
            return trace

        old = sys.gettrace()
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(old)
    return seen, codes


def announced(function, kinds=INSTRUCTIONS):
    result, error, report = _native._debug_run(kinds, function)
    assert error is None
    assert report["status"] == "" and report["mismatches"] == 0 and report["unknown"] == 0
    assert report["frames"] == report["instrumented"]
    assert report["enters"] == report["leaves"]
    return result, report["log"]


@pytest.fixture(autouse=True)
def warm():
    _native._debug_self_test()
    subjects.run()


def test_announces_exactly_the_instructions_that_are_executed():
    expected, codes = executed_by_interpreter(subjects.run)
    _, log = announced(subjects.run)
    got = [(name, offset) for _, name, offset, _ in log if name in codes]
    # Names repeat for generator expressions; the sites of all codes of one name together say what has a probe.
    probed = {(name, site[0]) for name, code in codes.items() for site in _native._debug_sites(code)}
    expected = [entry for entry in expected if entry in probed]
    got = [entry for entry in got if entry in probed]
    assert len(got) > 1000
    assert got == expected


def test_only_instructions_with_a_documented_reason_have_no_probe():
    import dis

    allowed = {"RESUME", "CACHE", "EXTENDED_ARG", "SEND", "END_FOR", "END_SEND", "CLEANUP_THROW", "KW_NAMES"}
    before_resume = {"COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR", "POP_TOP", "NOP"}
    _, codes = executed_by_interpreter(subjects.run)
    for code in codes.values():
        sites = {site[0] for site in _native._debug_sites(code)}
        started = False
        previous = ""
        for instruction in dis.get_instructions(code):
            name = instruction.opname
            if instruction.offset not in sites:
                # YIELD_VALUE right behind SEND; 3.11's CALL right behind PRECALL; 3.13's POP_TOP right behind END_FOR.
                neighbour = previous in ("SEND", "PRECALL") or (sys.version_info >= (3, 13) and previous == "END_FOR")
                assert name in allowed or neighbour or (not started and name in before_resume), (code, instruction)
            started = started or name == "RESUME"
            previous = name if name not in ("CACHE", "EXTENDED_ARG") else previous


def test_sites_agree_with_dis():
    import dis

    _, codes = executed_by_interpreter(subjects.run)
    for code in codes.values():
        instructions = {i.offset: i for i in dis.get_instructions(code)}
        for offset, opcode, oparg, op, depth, target, _, kwnames in _native._debug_sites(code):
            instruction = instructions[offset]
            assert instruction.opcode == opcode
            assert (instruction.arg or 0) == oparg
            assert 0 <= depth <= code.co_stacksize
            assert op != "Unknown", instruction
            if instruction.opcode in dis.hasjrel:
                aim = instructions[target]
                through = {"EXTENDED_ARG", "KW_NAMES"}
                between = [i for o, i in instructions.items() if instruction.argval <= o < target]
                assert all(i.opname in through for i in between), (instruction, aim)
            if kwnames >= 0:
                assert all(isinstance(name, str) for name in code.co_consts[kwnames])


def test_branches_are_announced_with_their_outcome():
    _, log = announced(subjects.run, INSTRUCTIONS | BRANCHES)
    checked = 0
    for index, entry in enumerate(log):
        if entry[0] != "branch":
            continue
        _, name, offset, value, sense, _, target, follower = entry
        op = log[index - 1]
        assert op[:3] == ("op", name, offset)
        # The next instruction of the same code tells where the branch went; truth tests may run code in between.
        step = next((e for e in log[index + 1 :] if e[0] == "op" and e[1] == name), None)
        if step is None or not isinstance(value, (bool, int, type(None))) or "genexpr" in name:
            continue
        tested = (value is None) if op[3] == "BranchNone" else bool(value)
        taken = tested == bool(sense)
        if step[2] in (target, follower):
            assert step[2] == (target if taken else follower)
            checked += 1
    assert checked > 300


def test_frames_are_announced_with_caller_generator_and_exit():
    def outer():
        it = subjects.count_up(2)
        return [next(it), it.throw(ValueError()), list(it)]

    _, log = announced(outer, FRAMES)
    frames = [(e[0], e[1].rpartition(".")[2], *e[2:]) for e in log]
    enters = [e for e in frames if e[0] == "enter" and e[1] == "count_up"]
    assert [(e[5], e[6]) for e in enters] == [(0, 1), (1, 0), (1, 0), (1, 0), (1, 0)]  # resumed, creates_generator
    assert len({e[2] for e in enters[1:]}) == 1
    assert all(e[7].endswith("outer") for e in enters)
    exits = [e[3] for e in frames if e[0] == "leave" and e[1] == "count_up"]
    assert exits == ["returned", "yielded", "yielded", "yielded", "returned"]
    assert [e[4] for e in frames if e[0] == "leave" and e[1] == "count_up"][0].__name__ == "generator"


def test_init_of_a_hot_class_is_announced_every_time():
    class D:
        def __init__(self, a):
            self.a = a
            self.a  # noqa: B018

    def make(n):
        for i in range(n):
            D(i)

    def many():
        make(9000)

    _, log = announced(many, READS)
    assert sum(1 for e in log if e[0] == "attr" and e[1].endswith("D.__init__")) == 9000


def test_reads_are_announced_with_object_and_name():
    o = subjects.Obj()

    def read():
        return o.a, o.val(), subjects.TABLE

    _, log = announced(read, READS)
    mine = [e for e in log if e[0] == "attr" and e[1].endswith("read")]
    assert [(e[3], e[4]) for e in mine] == [(o, "a"), (o, "val"), (subjects, "TABLE")]
    names = [(e[1], e[4]) for e in log if e[0] == "name" and e[2].endswith("read")]
    assert ("LoadGlobal", "subjects") in names


def test_lines_of_instructions():
    code = subjects.assert_positive.__code__
    lines = {_native._debug_line(code, site[0]) for site in _native._debug_sites(code)}
    expected = {line for _, _, line in code.co_lines() if line is not None}
    assert lines - {0} <= expected and code.co_firstlineno + 1 in lines
