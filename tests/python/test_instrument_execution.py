"""Programs behave under full instrumentation as they do without it."""

# The form of these programs decides their bytecode.
# ruff: noqa: C416, C420, PIE804, RUF015, RUF021, RUF059, UP033, UP050

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import traceback
import types
import weakref

import instrument_subjects as subjects
import pytest
from cuvil import _native


@pytest.fixture(autouse=True)
def prepared():
    _native._debug_self_test()


def traced(function, *args, complete=True, **kwargs):
    """The call's result (or exception), after checking that nothing ran unseen."""
    result, error, report = _native._debug_run(0, function, *args, **kwargs)
    assert report["mismatches"] == 0 and report["unknown"] == 0 and report["enters"] == report["leaves"]
    if complete:
        assert report["status"] == "" and report["refused"] == 0 and report["in_sink"] == 0
    traced.report = report
    if error is not None:
        raise error
    return result


def test_a_program_of_everything_computes_the_same():
    expected = subjects.run()
    assert subjects.run() == expected
    for _ in range(40):
        assert traced(subjects.run) == expected
    assert traced.report["frames"] == traced.report["instrumented"] > 50


def test_generators_cross_extents_in_both_directions():
    before = subjects.count_up(10)
    next(before)
    unstarted = subjects.count_up(3)
    code_was_known = traced(lambda: next(before)) == 1

    def inside():
        return before.throw(ValueError()), list(before), list(unstarted)

    assert code_was_known and traced(inside) == ("v", [2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2])
    assert traced.report["started_outside"] > 0

    def begin():
        g = subjects.count_up(5)
        next(g)
        return g

    assert list(traced(begin)) == [1, 2, 3, 4]
    assert traced(list, traced(begin)) == [1, 2, 3, 4]
    assert traced.report["started_outside"] == 0 and traced.report["instrumented"] == traced.report["frames"]
    g = traced(begin)
    del g
    gc.collect()


def test_exceptions_thrown_into_and_out_of_generators():
    def g():
        try:
            yield 1
        except KeyError:
            yield 2
        raise ZeroDivisionError

    def inside():
        it = g()
        out = [next(it), it.throw(KeyError("k"))]
        try:
            next(it)
        except ZeroDivisionError as error:
            out.append((type(error), error.__context__))
        return out

    assert traced(inside) == inside()


def test_asyncio():
    async def wait(i):
        await asyncio.sleep(0)
        return i

    async def produce():
        for i in range(3):
            yield await wait(i)

    async def main():
        results = await asyncio.gather(*(wait(i) for i in range(5)))
        produced = [x async for x in produce()]
        async with asyncio.timeout(5):
            last = await wait(9)
        return results, produced, last

    assert traced(lambda: asyncio.run(main())) == ([0, 1, 2, 3, 4], [0, 1, 2], 9)


def test_other_threads_run_untouched():
    def inside():
        out = []
        thread = threading.Thread(target=lambda: out.append(sum(subjects.count_up(50))))
        thread.start()
        thread.join()
        return out

    assert traced(inside) == [1225]
    assert traced.report["other_thread"] > 0


def test_a_second_extent_is_refused_and_says_why():
    def inside():
        with pytest.raises(RuntimeError, match="already"):
            _native._debug_run(0, len, ())
        out = []

        def other():
            try:
                _native._debug_run(0, len, ())
            except RuntimeError as error:
                out.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return out

    assert "another thread" in traced(inside)[0]
    assert traced(lambda: 5) == 5


def deep_source(n):
    source = "\n".join(f"def n{i}(x): return n{i + 1}(x) + 1" for i in range(n)) + f"\ndef n{n}(x): return x"
    namespace = {}
    exec(source, namespace)
    return namespace["n0"]


def test_first_frames_of_many_nested_functions():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(3000)
    try:
        deep = deep_source(600)
        assert traced(deep, 0, complete=False) == 600
        # A frame that found the stack chunk full ran the original; the next time there is room.
        assert traced.report["no_room"] <= 2
        assert traced(deep, 0) == 600
        assert traced.report["no_room"] == 0
    finally:
        sys.setrecursionlimit(limit)


def test_recursion_reaches_the_depth_that_the_limit_allows():
    def down(n):
        nonlocal deepest
        deepest = n
        return down(n + 1)

    limit = sys.getrecursionlimit()
    for wanted in (1000, 4000):
        sys.setrecursionlimit(wanted)
        try:
            deepest = 0
            with pytest.raises(RecursionError):
                down(0)
            plain = deepest
            deepest = 0
            with pytest.raises(RecursionError):
                traced(down, 0)
            assert abs(deepest - plain) <= 8
        finally:
            sys.setrecursionlimit(limit)


def test_recursion_deeper_than_the_c_stack_is_run_unseen_and_reported():
    out = []

    def down(n):
        return down(n - 1) + 1 if n else 0

    def body():
        sys.setrecursionlimit(30_000)
        result, error, report = _native._debug_run(0, down, 20_000)
        out.append((result, error, report["status"], report["too_deep"], report["enters"] - report["leaves"]))
        # The next extent on the same thread works again.
        out.append(_native._debug_run(0, down, 10)[2]["status"])

    limit = sys.getrecursionlimit()
    threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(0)
        sys.setrecursionlimit(limit)
    assert out[0] == (20_000, None, "the recursion is too deep to follow", 1, 0)
    assert out[1] == ""


def boom(n):
    if n == 0:
        raise KeyError("x")
    local = n * 2
    return boom(n - 1) + local


def caught():
    try:
        boom(3)
    except KeyError as error:
        return error


def test_tracebacks_outlive_the_extent():
    error = traced(caught)
    tb, seen = error.__traceback__.tb_next, []
    while tb:
        seen.append((tb.tb_lineno - boom.__code__.co_firstlineno, tb.tb_frame.f_locals.get("local")))
        tb = tb.tb_next
    assert seen == [(4, 6), (4, 4), (4, 2), (2, None)]


def test_tracebacks_are_formatted_with_the_same_carets():
    plain = traceback.format_exception(caught())
    assert traceback.format_exception(traced(caught)) == plain


def test_class_bodies_exec_eval_import_and_introspection():
    def inside():
        a, b = 1, [2]

        class C:
            z = a

            def m(self):
                return __class__.__name__, super().__repr__()[:3], locals().keys() >= {"self"}

        exec("q = a + 1", {"a": a})
        d = eval("[a for a in b]", {}, {"b": b})
        sys.modules.pop("colorsys", None)
        import colorsys

        lines = inspect.currentframe().f_lineno - inside.__code__.co_firstlineno
        return C().m(), sorted(locals()), d, lines, colorsys.__name__, [x for x in (lambda: (yield a))()]

    assert traced(inside) == inside()


@pytest.mark.parametrize(
    "source",
    [
        "a=[1,2]\nb=[x for x in a]\nc=sorted(locals())\n",
        "class Q:\n  a=[1,2]\n  b=[x for x in a]\n  c=sorted(locals())\nc=Q.c\n",
    ],
    ids=["module", "class"],
)
def test_hidden_locals_of_comprehensions_stay_hidden(source):
    plain, instrumented = {}, {}
    exec(source, plain)
    traced(lambda: exec(compile(source, "s", "exec"), instrumented))
    assert instrumented["c"] == plain["c"]


def test_jumps_that_need_extended_arguments():
    body = "".join(f"    x += _ + {i % 7}\n" for i in range(4000))
    namespace = {}
    exec(f"def big(x):\n  for _ in range(3):\n{body}    if x < 0: break\n  return x\n", namespace)
    expected = namespace["big"](1)
    assert traced(namespace["big"], 1) == expected


def test_many_constants():
    namespace = {}
    exec("def f():\n  return [" + ", ".join(f"'c{i}'" for i in range(70_000)) + ", len('x')]\n", namespace)
    assert traced(namespace["f"]) == namespace["f"]()
    exec("def f(x):\n  return [" + ", ".join(f"x + {i}.5" for i in range(300)) + "]\n", namespace)
    assert traced(namespace["f"], 1) == namespace["f"](1)


def test_trace_functions_toggled_inside():
    def inside():
        def trace(*args):
            return trace

        old = sys.gettrace()
        sys.settrace(trace)
        x = sum(i for i in range(3))
        sys.settrace(old)
        return x

    assert traced(inside) == 3


def test_frames_of_the_package_are_not_announced():
    namespace = {"__name__": "cuvil.something"}
    exec("def ours(f): return f()", namespace)

    def users():
        return 7

    result, _, report = _native._debug_run(2, namespace["ours"], users)
    assert result == 7
    assert [e[1].rpartition(".")[2] for e in report["log"] if e[0] == "enter"] == ["users"]
    other = {"__name__": "cuvillier"}
    exec("def theirs(f): return f()", other)
    _, _, report = _native._debug_run(2, other["theirs"], users)
    assert [e[1].rpartition(".")[2] for e in report["log"] if e[0] == "enter"] == ["theirs", "users"]


def test_copies_die_with_their_code():
    def cycle():
        namespace = {}
        exec("def f(n):\n  for i in range(n): yield i\ndef g(n): return sum(f(n))\n", namespace)
        assert traced(namespace["g"], 5) == 10
        copies = [_native._debug_copy(namespace[name].__code__) for name in "fg"]
        return [weakref.ref(copy) for copy in copies], [weakref.ref(namespace[name].__code__) for name in "fg"]

    copies, originals = cycle()
    gc.collect()
    assert [r() for r in copies + originals] == [None] * 4


def test_code_replaced_while_its_generator_is_suspended():
    def make():
        namespace = {}
        exec("def f(n):\n  for i in range(n): yield i\ndef h(n): yield n\n", namespace)
        f = namespace["f"]
        g = f(4)
        next(g)
        original = weakref.ref(f.__code__)
        f.__code__ = namespace["h"].__code__
        return g, original

    g, original = traced(make)
    gc.collect()
    if sys.version_info >= (3, 12):  # 3.11's generators hold their code
        assert original() is None
    assert next(g) == 1
    assert traced(list, g) == [2, 3]


def test_a_copys_code_can_be_used_as_a_function_of_its_own():
    def maker(x):
        return sys._getframe().f_code, x + 1

    code, _ = traced(maker, 1)
    copy = types.FunctionType(code, globals())
    assert copy(4)[1] == 5 and traced(copy, 6)[1] == 7


def test_a_probe_used_by_hand_does_nothing():
    code = _native._debug_copy(caught.__code__)
    probe = code.co_consts[-1]
    del probe[3]

    def inside():
        del probe[3]
        return 1

    assert traced(inside) == 1
    with pytest.raises(TypeError):
        type(probe)()


def test_malformed_code_is_refused_and_runs():
    code = (lambda: 1).__code__
    with_unknown = code.replace(co_code=bytes([0, 0]) + code.co_code)
    with pytest.raises(ValueError, match="bytecode"):
        _native._debug_copy(with_unknown)


def test_finalizers_and_callbacks_inside_the_extent():
    log = []

    class Dying:
        def __del__(self):
            log.append("del")

    def inside():
        d = Dying()
        weakref.finalize(d, log.append, "finalize")
        del d
        cycle = Dying()
        cycle.me = cycle
        del cycle
        gc.collect()
        return len(log)

    assert traced(inside) == 3


def test_keyboard_interrupt_and_signals():
    import _thread
    import signal

    def inside():
        try:
            _thread.interrupt_main()
            for _ in range(10_000_000):
                pass
        except KeyboardInterrupt:
            return "interrupted"
        return "missed"

    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert traced(inside) == "interrupted"
    finally:
        signal.signal(signal.SIGINT, old)


def test_calls_leave_no_references_behind():
    o = subjects.Obj()

    def call():
        return subjects.program(o, 3)

    for _ in range(3):
        traced(call)
    gc.collect()
    before = (sys.getrefcount(o), len(gc.get_objects()), sys.getrefcount(subjects.program.__code__))
    for _ in range(50):
        traced(call)
    gc.collect()
    after = (sys.getrefcount(o), len(gc.get_objects()), sys.getrefcount(subjects.program.__code__))
    assert after[0] == before[0] and after[2] == before[2] and abs(after[1] - before[1]) < 20
