"""Runs one of CPython's own test modules in this process and prints one line of JSON.

Usage: worker.py plain|instrumented|torch|enabled MODULE
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import sys
import unittest


def main() -> int:
    mode, name = sys.argv[1:]
    faulthandler.enable()
    from cuvil import _native

    _native._debug_self_test()
    if mode in ("torch", "enabled"):
        import cuvil
        import torch  # noqa: F401

        if mode == "enabled":
            cuvil.enable()
            assert cuvil.enabled()
    # What the standard library's own runner prepares and some tests rely on.
    from test import support

    support.verbose = 0
    support.use_resources = ["cpu"]
    sys.argv = [name]

    output = io.StringIO()
    report: dict[str, object] = {}
    if mode == "instrumented":
        _native._debug_begin(0)
    try:
        module = importlib.import_module("test." + name)
        suite = unittest.defaultTestLoader.loadTestsFromModule(module)
        result = unittest.TextTestRunner(stream=output, verbosity=0).run(suite)
    finally:
        if mode == "instrumented":
            report = _native._debug_end()
    report.pop("log", None)
    # Sub-tests name themselves behind the test's own name.
    bad = sorted({str(case).split()[0] for case, _ in result.failures + result.errors})
    details = {str(case).split()[0]: text[-3000:] for case, text in result.failures + result.errors}
    line = {"module": name, "tests": result.testsRun, "bad": bad, "report": report, "details": details}
    sys.__stdout__.write("\nRESULT " + json.dumps(line) + "\n")
    sys.__stdout__.flush()
    # Threads that a test left behind must not keep the worker.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
