"""Starts that must fail say why; a plain server is the same with the package installed as without it."""

import json
import subprocess
import sys

import pytest

from tests.server.harness import COMMON, LAPROX, STOCK, Server, StartError
from tests.server.tiny_models import tiny_model, tokens

# The whole way from the command line, up to the point where SGLang would load the model; several starts in one process,
# because importing SGLang takes most of the time.
SCRIPT = """
import contextlib, io, json, sys
from laprox_sglang import cpu_engine
cpu_engine.enable()
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            prepare_server_args(arguments).resolve_once()
        outcome = "would start"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error} {said.getvalue()}"
    print("OUTCOME " + json.dumps(outcome), flush=True)
"""


def outcomes(starts: list[tuple[str, ...]]) -> list[str]:
    """What each command line ends with: 'would start', or the error."""
    common = ["--model-path", str(tiny_model()), *COMMON]
    commands = json.dumps([[*common, *flags] for flags in starts])
    run = subprocess.run([sys.executable, "-c", SCRIPT, commands], capture_output=True, text=True, check=True)
    found = [json.loads(line[8:]) for line in run.stdout.splitlines() if line.startswith("OUTCOME ")]
    assert len(found) == len(starts)
    return found


BAD_STARTS = [
    (("--laprox-ratio", "0"), "not in (0, 1]"),
    (("--laprox-ratio", "1.5"), "not in (0, 1]"),
    (("--laprox-ratio", "nan"), "not in (0, 1]"),
    (("--laprox-ratio", "0.5", "--laprox-budget-tokens", "64"), "not both"),
    (("--laprox-config", '{"rato": 0.5}'), "unknown laprox setting 'rato'"),
    (("--laprox-window", "200"), "larger than --laprox-min-tokens"),
    (("--laprox-pool-kernel", "4"), "is even"),
    (("--laprox-score", "magic"), "magic"),
    (("--laprox-kernels", "flashinfer"), "--laprox-kernels flashinfer needs a CUDA device"),
    (("--laprox-cuda-graphs", "decode"), "--laprox-cuda-graphs decode needs a CUDA device"),
    (("--page-size", "16"), "use --page-size 1"),
    (("--enable-hierarchical-cache",), "hierarchical cache"),
    (("--kv-cache-dtype", "fp8_e5m2"), "quantised KV cache"),
    (("--pp-size", "2"), "pipeline parallelism"),
    (("--enable-streaming-session",), "streaming sessions"),
    (("--disable-radix-cache",), "disabled radix cache"),
]


def test_bad_starts_end_with_the_reason():
    found = outcomes([(*LAPROX, *flags) for flags, _ in BAD_STARTS])
    wrong = [(flags, got) for (flags, reason), got in zip(BAD_STARTS, found, strict=True) if reason not in got]
    assert wrong == []


def test_good_starts_and_half_asked_ones():
    good = [(*LAPROX, "--laprox-ratio", "0.5"), (*LAPROX, "--laprox-config", '{"budget-tokens": 64}'), STOCK, ()]
    half = [("--attention-backend", "laprox"), ("--radix-cache-backend", "laprox"), ("--laprox-ratio", "0.5")]
    found = outcomes(good + half)
    assert found[: len(good)] == ["would start"] * len(good)
    assert all("laprox needs both of its backends" in each for each in found[len(good) :])


def test_the_server_process_ends_with_the_reason():
    with pytest.raises(StartError) as stopped, Server(tiny_model(), *LAPROX, "--laprox-budget-tokens", "0"):
        pass
    assert stopped.value.code != 0
    assert "--laprox-budget-tokens 0 is too small" in stopped.value.log


def test_a_plain_server_is_left_alone():
    prompt = tokens(300, 1)
    outputs, logs = [], []
    for switch in ("1", "0"):
        flags = ("--dtype", "float32", "--skip-tokenizer-init")
        with Server(tiny_model(), *STOCK, *flags, env={"LAPROX_SGLANG_ENABLE": switch}) as server:
            outputs.append(server.generate(prompt, 16)["output_ids"])
            assert "laprox" not in server.client.get("/server_info").json()["internal_states"][0]
            logs.append(server.log)
    assert outputs[0] == outputs[1]
    caches = [[line.split("impl=")[1] for line in log.splitlines() if "Tree cache initialized" in line] for log in logs]
    assert caches[0] == caches[1] and "UnifiedRadixCache" in caches[0][0]
