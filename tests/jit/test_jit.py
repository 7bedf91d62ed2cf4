"""Number formats against torch's own, the compile cache, and torch's threads."""

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from numba import carray

from laprox_sglang.jit import numerics, openmp

ROOT = Path(__file__).parents[2]


@numba.njit
def narrowed(values, like):
    result = np.empty(len(values), np.uint16)
    for index in range(len(values)):
        result[index] = numerics.narrow(like, values[index])
    return result


def test_narrow_rounds_as_torch_does():
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int32)
    values = torch.cat([bits.view(torch.float32), torch.tensor([math.inf, -math.inf, 0.0, -0.0, 3.4028235e38])])
    ours = torch.from_numpy(narrowed(values.numpy(), np.uint16(0)).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(ours, values.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_highest(dtype):
    row = torch.randn(1001).to(dtype)
    assert numerics.highest(numerics.numpy_view(row)) == row.max().float()
    assert numerics.highest(numerics.numpy_view(-row.abs())) == -row.abs().min().float()
    row[5] = math.nan
    assert math.isnan(numerics.highest(numerics.numpy_view(row)))
    assert numerics.highest(numerics.numpy_view(torch.full((3,), -math.inf, dtype=dtype))) == -math.inf
    assert numerics.highest(numerics.numpy_view(row[:0])) == -math.inf


def test_exp_negative():
    x = torch.linspace(-87, 0, 10_001)
    ours = torch.tensor([numerics.exp_negative(value) for value in x.numpy()])
    torch.testing.assert_close(ours, x.exp(), rtol=5e-6, atol=0)


def test_no_cache_folder_is_no_failure(monkeypatch, caplog):
    real = numba.njit

    def refuse(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", refuse)
    with caplog.at_level(logging.WARNING):
        doubled = numerics.cached_jit(nogil=True)(lambda x: 2 * x)
    assert doubled(21) == 42 and "compiled again" in caplog.text


@openmp.kernel()
def mark(data):
    w = carray(data, 5)
    seen = carray(openmp.pointer(w[3]), 64, np.int64)
    for thread in range(openmp.call(w[1]), 3, openmp.call(w[4])):
        seen[thread] += 1


@openmp.kernel()
def mark_all(data):
    w = carray(data, 5)
    openmp.fork(w[0], w[2], data, 3)


def test_every_share_is_done_once():
    team = openmp.team()
    seen = np.zeros(64, dtype=np.int64)
    words = np.array([team.parallel, team.number, mark.address, seen.ctypes.data, team.size])
    openmp.c_function(mark_all)(openmp.words_at(words))
    assert seen[:3].tolist() == [1, 1, 1] and not seen[3:].any()


def test_the_runtime_is_the_one_torch_uses():
    """A second one would mean a second set of threads."""
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert len(runtimes) == 1, runtimes


SHORT_TEAM = """
import numpy as np, torch
from tests.jit.test_jit import test_every_share_is_done_once
from laprox_sglang.cpu_engine import fused_layers
assert torch.get_num_threads() == 4
test_every_share_is_done_once()
x = torch.randn(3000, 64)
torch.testing.assert_close(fused_layers.silu_and_mul(x), torch.nn.functional.silu(x[:, :32]) * x[:, 32:])
"""


@pytest.mark.parametrize("limit", ["1", "3"])
def test_a_team_may_be_smaller_than_asked_for(limit):
    """OpenMP is free to give fewer threads; no share may be left out."""
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "OMP_THREAD_LIMIT": limit}
    code = SHORT_TEAM.replace("import numpy as np, torch", "import numpy as np, torch; torch.set_num_threads(4)")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
