"""Programs in an interpreter of their own, so that memory, threads, signals and exit are their own.

CUVIL_SOAK_CALLS sets the number of calls (5,000 by default), CUVIL_SOAK_SECONDS for how long threads disturb each other
(2 by default).
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from eager_twin import ACCELERATOR

NOT_CUVIL = ACCELERATOR != "cuvil"
CALLS = int(os.environ.get("CUVIL_SOAK_CALLS", "5000"))
SECONDS = float(os.environ.get("CUVIL_SOAK_SECONDS", "2"))

PRELUDE = """
import faulthandler, gc, os, signal, sys, threading, time
faulthandler.enable()
import torch, torch.nn as nn
import cuvil
torch.set_num_threads(1)
CALLS = {calls}
SECONDS = {seconds}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.k = nn.Linear(16, 16), nn.LayerNorm(16), 2.0
    def forward(self, x, scale=1.0):
        a, b = self.norm(torch.relu(self.lin(x))).chunk(2, -1)
        return {{"y": a * b * self.k * scale, "parts": [a, b], "n": x.shape[0]}}

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def handles():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

torch.manual_seed(0)
m = nn.Sequential(Block()).eval()
x = torch.randn(4, 16)
with torch.no_grad():
    expected = m(x)["y"].clone()
cuvil.enable()
def check(y):
    assert torch.equal(y["y"], expected), (y["y"] - expected).abs().max()
"""


def python(program: str, *flags: str, timeout: float = 300.0, **environment: str) -> subprocess.CompletedProcess[str]:
    source = PRELUDE.format(calls=CALLS, seconds=SECONDS) + textwrap.dedent(program)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", **environment}
    return subprocess.run(
        [sys.executable, *flags, "-c", source], capture_output=True, text=True, timeout=timeout, env=env, check=False
    )


def succeeds(program: str, *flags: str, **environment: str) -> str:
    result = python(program, *flags, **environment)
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout
