"""enable()'s self-test is not disturbed by what the garbage collector runs."""

import subprocess
import sys

import pytest

pytest.importorskip("cuvil._native")

# The self-test runs once in a process, so each attempt is a process of its own.
PROGRAM = """
import gc, os, sys
from cuvil import _native

def count():
    try:
        while True:
            yield
    finally:
        len('the end of an abandoned generator runs code')

class Abandoned:  # part of a cycle, so that only the collector ends the generator
    def __init__(self):
        self.me = self
        self.generator = count()
        next(self.generator)

failed = 0
for allocations in range(3, 1500, 15):
    pid = os.fork()
    if pid == 0:
        gc.disable()
        Abandoned()
        # The next collection comes after so many allocations, which is somewhere in the self-test.
        gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
        gc.enable()
        problem = _native.interpreter_self_test()
        os._exit(2 if problem else 0 if gc.isenabled() else 3)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        failed += 1
        print(allocations, 'allocations: exit status', status)
sys.exit(failed != 0)
"""


def test_generators_that_end_in_a_collection_do_not_fail_it() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
