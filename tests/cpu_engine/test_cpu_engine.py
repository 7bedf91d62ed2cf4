"""The stand-in is in place for a program and its children, raises when called, and changes nothing elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from laprox_sglang import cpu_engine

WITHOUT_GPU = pytest.mark.skipif(cpu_engine.has_cuda_device(), reason="this machine has a CUDA device")


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, to which the engine that the test process itself uses is unknown."""
    ours = ("SGLANG_USE_CPU_ENGINE", "PYTHONPATH", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    clean = {key: value for key, value in os.environ.items() if key not in ours}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**clean, **environment}, timeout=120
    )


def output(code: str, **environment: str) -> list[str]:
    done = run_python("-c", code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_importing_the_package_changes_nothing():
    code = (
        "import os, sys; before = list(sys.path); import laprox_sglang.cpu_engine, laprox_sglang.plugin;"
        "print(sys.path == before, 'SGLANG_USE_CPU_ENGINE' in os.environ, {'sgl_kernel', 'torch'} & set(sys.modules))"
    )
    assert output(code) == ["True False set()"]


@WITHOUT_GPU
def test_enable_reaches_this_process_and_its_children():
    code = (
        "import os, subprocess, sys; from laprox_sglang import cpu_engine\n"
        "print(cpu_engine.enable(), cpu_engine.enable(), cpu_engine.is_enabled())\n"
        "import sgl_kernel; print(sgl_kernel.LAPROX_STANDIN, os.environ['SGLANG_USE_CPU_ENGINE'])\n"
        "print(sys.path.count(sys.path[0]), os.environ['PYTHONPATH'])\n"
        "sys.stdout.flush(); child = 'import sgl_kernel; print(sgl_kernel.__file__)'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)"
    )
    lines = output(code, PYTHONPATH="/somewhere/else")
    assert lines[:2] == ["True True True", "True 1"]
    assert lines[2] == f"1 {cpu_engine.STANDIN_DIRECTORY}{os.pathsep}/somewhere/else"
    assert lines[3] == str(cpu_engine.STANDIN_DIRECTORY / "sgl_kernel" / "__init__.py")


@WITHOUT_GPU
def test_spawned_process_sees_the_standin(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import multiprocessing\n"
        "def work(queue):\n"
        "    import sgl_kernel\n"
        "    queue.put(sgl_kernel.LAPROX_STANDIN)\n"
        "if __name__ == '__main__':\n"
        "    from laprox_sglang import cpu_engine\n"
        "    cpu_engine.enable()\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=work, args=(queue,)); process.start()\n"
        "    print(queue.get(timeout=60)); process.join()\n"
    )
    done = run_python(str(script))
    assert done.stdout.strip() == "True", done.stderr


@WITHOUT_GPU
def test_user_thread_settings_win():
    code = "import os; from laprox_sglang import cpu_engine; cpu_engine.enable(); print(os.environ['OMP_WAIT_POLICY'])"
    assert output(code, OMP_WAIT_POLICY="ACTIVE") == ["ACTIVE"]


@WITHOUT_GPU
def test_names_raise_when_called_and_not_before():
    code = (
        "from laprox_sglang import cpu_engine; cpu_engine.enable()\n"
        "from sgl_kernel import NAMES, verify_tree_greedy_cpu as call\n"
        "print(len(NAMES), call.__name__)\n"
        "try: call(1, x=2)\n"
        "except RuntimeError as error: print(error)"
    )
    first, message = output(code)
    assert first == "8 verify_tree_greedy_cpu"
    assert "sgl_kernel.verify_tree_greedy_cpu was called" in message and "no CUDA device" in message


@WITHOUT_GPU
@pytest.mark.parametrize(
    "statement", ["from sgl_kernel import rmsnorm", "from sgl_kernel.scalar_type import ScalarType"]
)
def test_names_with_a_fallback_in_sglang_are_missing(statement):
    start = "from laprox_sglang import cpu_engine; cpu_engine.enable()"
    code = f"{start}\ntry: {statement}\nexcept ImportError: print('fallback')"
    assert output(code) == ["fallback"]


@WITHOUT_GPU
@pytest.mark.parametrize("name", ["sglang", "sgl_kernel"])
def test_too_late_is_an_error(name):
    code = (
        f"import sys, types; sys.modules[{name!r}] = types.ModuleType({name!r})\n"
        "from laprox_sglang import cpu_engine\n"
        "try: cpu_engine.enable()\n"
        "except cpu_engine.CpuEngineError as error: print(error)"
    )
    (message,) = output(code)
    assert f"{name} is already imported" in message and "before `import sglang`" in message


def test_a_cuda_device_leaves_everything_alone(monkeypatch):
    monkeypatch.setattr(cpu_engine, "has_cuda_device", lambda: True)
    monkeypatch.setattr(cpu_engine, "is_enabled", lambda: False)
    before = (list(sys.path), dict(os.environ))
    assert cpu_engine.enable() is False
    assert (list(sys.path), dict(os.environ)) == before


def test_other_processors_are_refused(monkeypatch):
    monkeypatch.setattr(cpu_engine, "has_cuda_device", lambda: False)
    monkeypatch.setattr(cpu_engine, "is_enabled", lambda: False)
    monkeypatch.setattr(cpu_engine.platform, "machine", lambda: "aarch64")
    with pytest.raises(cpu_engine.CpuEngineError, match="aarch64"):
        cpu_engine.enable()


@WITHOUT_GPU
def test_sglang_imports_the_cpu_path():
    """Every name that this SGLang imports at module level is there, the scheduler's modules included."""
    code = (
        "from laprox_sglang import cpu_engine; cpu_engine.enable()\n"
        "import sglang.srt.managers.scheduler\n"
        "from sglang.srt.models.registry import ModelRegistry\n"
        "from sglang.srt.utils import is_cpu\n"
        "names = set(ModelRegistry.get_supported_archs())\n"
        "print(is_cpu(), {'LlamaForCausalLM', 'Qwen2ForCausalLM', 'Qwen3ForCausalLM', 'MistralForCausalLM',"
        " 'Qwen3MoeForCausalLM'} <= names)"
    )
    assert output(code, OMP_NUM_THREADS="1")[-1] == "True True"
