"""``laprox-sglang doctor``: is this machine and this SGLang fit for the compressed cache?"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata

from laprox_sglang import config, cpu_engine, demo_model

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "laprox"
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numba")


@dataclass(frozen=True)
class Check:
    """``ok`` is None for a line that only informs."""

    name: str
    ok: bool | None
    detail: str


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def expected_sglang() -> str | None:
    """The pinned version, from this package's own metadata."""
    for requirement in metadata.requires("laprox-sglang") or ():
        name, _, version = requirement.partition("==")
        if name.strip() == "sglang" and version:
            return version.split(";")[0].strip()
    return None


def check_versions() -> Iterable[Check]:
    yield Check(
        "python",
        sys.version_info >= (3, 11),
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    )
    found, expected = installed_version("sglang"), expected_sglang()
    detail = f"{found or 'not installed'}, expected {expected}"
    if found != expected:
        detail += f"; run `pip install sglang=={expected}`"
    yield Check("sglang", found is not None and found == expected, detail)
    for package in PACKAGES:
        version = installed_version(package)
        yield Check(package, version is not None, version or "not installed")


def check_device() -> Iterable[Check]:
    if not cpu_engine.has_cuda_device():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        fit = platform.machine().lower() in ("x86_64", "amd64")
        yield Check("device", fit, f"no CUDA device: CPU engine, {cores} cores" + ("" if fit else "; it needs x86-64"))
        return
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        major, minor = properties.major, properties.minor
        memory = properties.total_memory / 2**30
        yield Check(f"device {index}", True, f"{properties.name}, sm_{major}{minor}, {memory:.0f} GiB")


def check_kernels() -> Iterable[Check]:
    """What ``--laprox-kernels`` can name here, by what is installed; a model's shape is checked when it is served."""
    cuda = cpu_engine.has_cuda_device()
    default = "triton" if cuda else "cpu (numba and torch)"
    others = [name for name, package in (("flashinfer", "flashinfer-python"),) if cuda and installed_version(package)]
    yield Check("attention kernels", None, f"auto is {default}; also {', '.join([*others, 'torch (slow)'])}")
    if cuda:
        yield Check("CUDA graphs", None, "off; --laprox-cuda-graphs decode is experimental: no GPU has run it")


def check_plugin() -> Iterable[Check]:
    points = [point for point in metadata.entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME]
    if points:
        yield Check("plugin entry point", True, f"{PLUGIN_NAME} -> {points[0].value}")
    else:
        yield Check("plugin entry point", False, "not found; install the package again (`pip install laprox-sglang`)")
    switch = os.environ.get(config.ENABLE_VARIABLE, "1")
    off = switch.strip().lower() in ("0", "false", "off", "no")
    yield Check(config.ENABLE_VARIABLE, not off, f"{switch}: LaProx is switched off; unset it" if off else "on")
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed:
        named = PLUGIN_NAME in [name.strip() for name in allowed.split(",")]
        yield Check(
            "SGLANG_PLUGINS", named, allowed if named else f"{allowed}: leaves out {PLUGIN_NAME}; add it or unset it"
        )


def check_hooks() -> Iterable[Check]:
    """Imports SGLang, on the CPU engine where there is no CUDA device."""
    warnings.filterwarnings("ignore", module="sglang")  # what SGLang says about quantisation is not a finding here
    cpu_engine.enable()
    from laprox_sglang.patches import verify_targets

    for target, ok, detail in verify_targets():
        yield Check("hook " + ".".join(target.split(".")[-2:]), ok, detail)


def check_model(model_path: str | None) -> Iterable[Check]:
    if model_path is None:
        folder = demo_model.default_folder()
        made = demo_model.is_ready(folder)
        yield Check("demo model", None, f"{folder}" if made else "not made yet (`laprox-sglang demo-model`)")
        return
    from laprox_sglang import model_support

    ok, reason = model_support.check(model_path)
    yield Check("model", ok, f"{model_path}: {reason}")


def guarded(name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    """A check that itself fails is a finding, not the end of the report."""
    found: list[Check] = []
    try:
        found.extend(check())
    except Exception as error:
        found.append(Check(name, False, f"{type(error).__name__}: {error}"))
    return found


def render(checks: Iterable[Check]) -> str:
    marks = {True: "ok", False: "FAIL", None: "-"}
    lines = list(checks)
    width = max((len(check.name) for check in lines), default=0)
    return "\n".join(f"{marks[check.ok]:<4}  {check.name:<{width}}  {check.detail}" for check in lines)


def refused_modes() -> str:
    from laprox_sglang.refused import REFUSED_MODES

    width = max(len(mode.name) for mode in REFUSED_MODES)
    lines = [f"  {mode.name:<{width}}  {mode.flag}: {mode.reason}" for mode in REFUSED_MODES]
    return "\n".join(["Modes of SGLang that are refused at start:", *lines])


def run(model_path: str | None) -> int:
    """Print the report; 0 only if nothing failed."""
    checks = [
        *guarded("versions", check_versions),
        *guarded("device", check_device),
        *guarded("kernels", check_kernels),
        *guarded("plugin", check_plugin),
        *guarded("hooks", check_hooks),
        *guarded("model", lambda: check_model(model_path)),
    ]
    print(render(checks))
    print(f"\n{refused_modes()}")
    failed = [check.name for check in checks if check.ok is False]
    print(f"\n{'not ready: ' + ', '.join(failed) if failed else 'ready'}")
    return 1 if failed else 0
