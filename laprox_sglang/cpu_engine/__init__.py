"""SGLang's CPU engine on a machine where its CUDA-only kernel package cannot load.

SGLang 0.5.23 serves on a CPU when ``SGLANG_USE_CPU_ENGINE=1``, but ``import sgl_kernel`` must succeed first, and the
wheel on PyPI needs libcuda. :func:`enable` puts a stand-in with that name in front of it, for this process and for
every process it starts::

    from laprox_sglang import cpu_engine

    cpu_engine.enable()  # before `import sglang`
    import sglang as sgl

Nothing happens on import, and nothing at all on a machine with a CUDA device.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

STANDIN_DIRECTORY = Path(__file__).resolve().parent / "standin"
ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"
# OpenMP threads that spin while they wait slow a busy machine down ten times: the scheduler's threads, the tokenizer,
# the detokenizer and the client share the same cores. Without any spinning a decode step on an idle machine takes a
# third longer, so they spin briefly. Large pages: rows of a compressed prefix lie anywhere in a pool of gigabytes, and
# reading them was three times as fast. A value that the user set is left alone.
VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000", "THP_MEM_ALLOC_ENABLE": "1"}


class CpuEngineError(RuntimeError):
    """The CPU engine cannot be switched on here; the message says why and what to do."""


def has_cuda_device() -> bool:
    """Ask the driver, without importing torch and without making a CUDA context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def is_enabled() -> bool:
    """True when this process uses, or will use, the stand-in."""
    loaded = sys.modules.get("sgl_kernel")
    if loaded is not None:
        return _is_standin(loaded)
    return os.environ.get(ENGINE_VARIABLE) == "1" and bool(sys.path) and sys.path[0] == str(STANDIN_DIRECTORY)


def enable() -> bool:
    """Make SGLang run on the CPU in this process and its children, unless a CUDA device is there.

    Returns True when the CPU engine is on, False when the machine has a CUDA device and nothing was changed.
    Call it before ``import sglang``; calling it again does nothing. Raises CpuEngineError when it is too late
    or when the processor is not one that SGLang's kernel-free CPU path runs on.
    """
    if is_enabled():
        return True
    if has_cuda_device():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        # On arm64 SGLang calls CPU kernels unconditionally, which only a source build of its kernel package has.
        raise CpuEngineError(
            f"SGLang's CPU engine runs without its kernel package on x86-64 only, and this is {platform.machine()}; "
            "build sgl-kernel for this processor from SGLang's source, or use a machine with a CUDA device"
        )
    for name in ("sgl_kernel", "sglang"):
        if name in sys.modules:
            raise CpuEngineError(
                f"{name} is already imported, so it is too late to switch to the CPU engine; call "
                "laprox_sglang.cpu_engine.enable() before `import sglang`, at the top of the program"
            )
    directory = str(STANDIN_DIRECTORY)
    sys.path[:] = [directory, *(entry for entry in sys.path if entry != directory)]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != directory]
    os.environ["PYTHONPATH"] = os.pathsep.join([directory, *inherited])
    os.environ[ENGINE_VARIABLE] = "1"
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    return True


def _is_standin(module: object) -> bool:
    return bool(getattr(module, "LAPROX_STANDIN", False))
