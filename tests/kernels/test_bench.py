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
bench_checks._compression = lambda device: ()
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
    assert len(right["checks"]) == 21 and all(check["passed"] for check in right["checks"])
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


def test_only_right_results_are_timed(monkeypatch):
    """The loop over cases and kernels, with plain torch in the place of kernels and a clock that says 2 ms."""
    import triton

    from laprox_sglang.kernels import bench_cases, shapes

    def right(case):
        return lambda: case.expected

    def wrong(case):
        return lambda: case.expected + 1

    def broken(case):
        raise RuntimeError("no kernel for this device")

    kernels = (
        ("ragged_decode", None, right, True),
        ("wrong", None, wrong, True),
        ("broken", None, broken, False),
        ("absent", "no_such_package", right, True),
    )
    monkeypatch.setattr(bench_cases, "KERNELS", kernels)
    monkeypatch.setattr(bench, "TIMED", (("skewed", 2),))
    monkeypatch.setattr(bench, "MEAN", 20)
    timed = []
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, return_mode: timed.append(call) or 2.0)
    shape = shapes.ModelShape("small", 2, 0, 4, 2, 64, 0, 0)
    good, bad, failed, absent = bench.time_all([shape], "cpu", 1000.0, float("inf"))
    assert len(timed) == 1 and good.passed and good.seconds == 2e-3
    case = bench_cases.make_case(shape, "skewed", 2, 20, "cpu")
    assert case.entries == case.lengths.sum() + 2 * 2 * bench_cases.TAIL
    assert good.gb_per_s == pytest.approx(case.entries * 64 * 2 * 2 / 2e-3 / 1e9)
    assert good.share_of_peak == pytest.approx(good.gb_per_s / 1000) and good.megabytes == case.bytes / 1e6
    assert bad.passed is False and bad.seconds is None and bad.error == pytest.approx(1, abs=0.01)
    assert failed.note == "RuntimeError: no kernel for this device" and absent.note.endswith("is not installed")
    (late, *_) = bench.time_all([shape], "cpu", 1000.0, 0.0)
    assert late.seconds is None and "out of time" in late.note
    with pytest.raises(RuntimeError):
        monkeypatch.setattr(bench_cases, "KERNELS", (("ragged_decode", None, broken, True),))
        bench.time_all([shape], "cpu", 1000.0, float("inf"))


@pytest.mark.parametrize("lists", ["ample", "scattered", "skewed", "tiny"])
def test_cases_are_whole(lists):
    """Every list has its rows, in every layer, and no row belongs to two lists."""
    from laprox_sglang.kernels import bench_cases, shapes

    case = bench_cases.make_case(shapes.ModelShape("small", 2, 0, 6, 3, 16, 0, 0), lists, 4, 30, "cpu")
    lengths = case.indptr.diff(dim=1).view(4, bench_cases.LAYERS, 3)
    assert all(torch.equal(lengths[:, layer], case.lengths) for layer in range(bench_cases.LAYERS))
    assert len(case.rows) == lengths.sum() == len(case.rows.unique()) and case.indptr[-1, -1] == len(case.rows)
    per_layer = len(case.k_rows) // bench_cases.LAYERS
    for layer in range(bench_cases.LAYERS):
        rows = torch.cat([case.rows[case.indptr[b, 3 * layer] : case.indptr[b, 3 * layer + 3]] for b in range(4)])
        assert (rows // per_layer == layer).all()
    indptr, listed = bench_cases.list_of_rows(case)
    assert len(listed) == case.entries == indptr[-1] and len(listed.unique()) == len(listed)


def test_compression_is_timed_against_the_least_time_of_a_prefill(monkeypatch):
    from laprox_sglang.kernels import bench_compress, shapes

    shape = shapes.LLAMA_3_1_8B
    flops = bench_compress.prefill_flops(shape, 131072)
    # By hand: 2 x 6.98e9 weights a token; 2 x 32 layers x 4096 x n / 2 x 2 products a token.
    assert flops == pytest.approx(131072 * (2 * 6.9796e9 + 2 * 131072 * 32 * 4096), rel=1e-3)
    step = bench_compress.Step("m", "scores", 0.25, 0.05)
    assert "250.000 ms" in bench_compress.line(step) and "5.00% of the least time" in bench_compress.line(step)
    assert "least" not in bench_compress.line(bench_compress.Step("m", "plan", 1e-5))
