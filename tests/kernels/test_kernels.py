"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled ahead of time.

Both need a process of their own, because triton decides when it is imported whether it interprets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sass
import torch

FOLDER = Path(__file__).parent


def start(*command, **environment):
    """One thread each, so that two of them share two cores well."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, *command],
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-8000:]
    return output


@pytest.fixture(scope="module", autouse=True)
def compiling(tmp_path_factory):
    """Started first: the compiler works beside the interpreter."""
    process = start(str(FOLDER / "compile_all.py"), "--json", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    yield process
    process.kill()


@pytest.fixture(scope="module")
def compiled(compiling):
    """{(name, capability): what the machine code says} of the production shapes."""
    records = [json.loads(line) for line in output_of(compiling).splitlines()]
    print("\n" + sass.table(records))
    return {(record["name"], record["capability"]): record for record in records}


def test_against_the_references():
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    files = map(str, sorted(FOLDER.glob("interpreted*.py")))
    output = output_of(start("-m", "pytest", "-p", "no:cacheprovider", *files, **environment))
    assert " passed" in output and "failed" not in output


def test_no_kernel_spills_on_any_gpu(compiled):
    assert {capability for _, capability in compiled} == {80, 90, 100}
    assert len(compiled) > 40 and all(record["spills"] == 0 for record in compiled.values())


def test_decode_loads_rows_16_bytes_at_a_time(compiled):
    """All of a block's K and V, and the row ids one turn ahead of them; memory is kept busy by several programs."""
    for capability in (80, 90, 100):
        for group in (4, 8):
            record = compiled[f"decode G={group} D=128", capability]
            rows_bytes = 64 * 128 * 2 * 2
            assert record["wide"] * 16 * 128 == rows_bytes and record["narrow"] <= 4, record
            assert record["resident"] >= 3 and record["in_flight"] >= 96 * 1024, record
            assert record["mma"] > 0, record


@pytest.mark.parametrize(("capability", "kind"), [(80, "HMMA"), (90, "HGMMA"), (100, "UTCHMMA")])
def test_prefill_and_scores_use_the_gpus_own_tensor_cores(compiled, capability, kind):
    for name in ("extend", "window lse", "column norms", "projected norm"):
        record = compiled[f"{name} G=4 D=128", capability]
        assert record["mma_kind"] == kind and record["mma"] > 0 and record["wide"] > 0, record


def test_every_group_uses_tensor_cores_and_wide_loads(compiled):
    of_rows = [r for (name, _), r in compiled.items() if name.split()[0] in ("decode", "extend", "column", "projected")]
    assert len(of_rows) > 20
    assert all(record["mma"] > 0 and record["wide"] > 0 for record in of_rows), of_rows
    assert all(record["wide"] > 0 for (name, _), record in compiled.items() if name == "pack: copy")
