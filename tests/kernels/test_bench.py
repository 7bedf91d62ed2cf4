"""The kernel benchmark on a machine without a GPU: it says so, checks results all the same, and notices wrong ones."""

import json
import os
import subprocess
import sys

import pytest
import torch

from laprox_sglang.kernels import bench
from laprox_sglang.kernels.bench import Result

# One process, as triton decides when it is imported whether it interprets: all checks, then a kernel that is wrong.
SCRIPT = """
import sys
from laprox_sglang.kernels import bench
code = bench.main(["--check", "--output", sys.argv[1]])
assert not {"sglang", "flashinfer"} & set(sys.modules), "it must run where only torch and triton are"
from laprox_sglang.kernels import bench_checks
bench_checks._decode_sizes = lambda device: ()
bench_checks._extend = lambda device: ()
bench_checks._replay = bench_checks._far_rows
lse = bench_checks.ragged_lse
bench_checks.ragged_lse = lambda *arguments: lse(*arguments) + 0.1
print(code, bench.main(["--check", "--output", sys.argv[1] + "/wrong"]))
"""


def without_a_gpu(*command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)


def test_checks_in_the_interpreter(tmp_path):
    done = without_a_gpu("-c", SCRIPT, str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert "nothing is timed" in lines[0] and lines[-1] == "0 1"
    right = json.loads((tmp_path / "bench-kernels.json").read_text())
    assert len(right["checks"]) == 18 and all(check["passed"] for check in right["checks"])
    assert right["results"] == [] and right["device"]["peak_gb_per_s"] is None
    assert right["versions"]["triton"] and right["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert "WRONG log-sum-exp of the lists" in done.stdout
    wrong = json.loads((tmp_path / "wrong" / "bench-kernels.json").read_text())
    assert [check["name"] for check in wrong["checks"] if not check["passed"]] == ["log-sum-exp of the lists"]


def test_it_says_that_there_is_no_gpu(tmp_path):
    done = without_a_gpu("-m", "laprox_sglang.cli", "bench-kernels", "--output", str(tmp_path))
    assert done.returncode == 2 and "kernels are timed on a GPU only" in done.stderr and "--check" in done.stderr
    assert not list(tmp_path.iterdir())


def result(lists, kernel="ragged_decode", **values):
    return Result("some model", lists, 4, kernel, 100.0, **values)


def timed(lists, rate, **values):
    return result(lists, seconds=1e8 / rate / 1e9, gb_per_s=float(rate), share_of_peak=rate / 4000, **values)


def test_table():
    results = [
        timed("ample", 3000, passed=True),
        timed("skewed", 2500, passed=True),
        result("ample", "FlashInfer, uniform", note="flashinfer is not installed"),
        result("tiny", "FlashInfer, same lists", error=0.5, passed=False),
    ]
    lines = bench.table(results).splitlines()
    assert lines[0] == bench.HEADER and "75.0%" in lines[1] and "3000" in lines[1]
    assert lines[3].endswith("flashinfer is not installed")
    assert lines[4].endswith("WRONG (largest difference 0.5)") and "GB/s" not in lines[4]
    assert lines[5] == "some model: skewed lists take 1.20 times as long as uniform ones on equal bytes"


@pytest.mark.parametrize("bad", [float("nan"), 1.0])
def test_compare(bad):
    expected = torch.zeros(4, dtype=torch.bfloat16)
    found = expected.clone()
    assert bench.compare(found, expected) == (0.0, True)
    found[2] = bad
    assert bench.compare(found, expected)[1] is False


def test_lists_have_the_bytes_that_their_name_says():
    from laprox_sglang.kernels.bench_cases import list_lengths

    generator = torch.Generator().manual_seed(0)
    ample, skewed = (list_lengths(lists, 4, 8, 6554, generator) for lists in ("ample", "skewed"))
    assert ample.shape == skewed.shape == (4, 8) and (ample == 6554).all()
    assert skewed.max() == 16 * 6554 and abs(int(skewed.sum() - ample.sum())) < 32
    tiny = list_lengths("tiny", 64, 8, 6554, generator)
    assert tiny.min() == 0 and tiny.max() == 64
