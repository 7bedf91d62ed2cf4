"""Hooks on SGLang 0.5.23, one module each: target, what it changes, why.

Where does my hook go? One new module here with ``TARGET``, ``TYPE``, ``PARAMETERS`` (of the target, checked at start)
and ``hook``, its name in ``SERVER_HOOKS`` or ``ENGINE_HOOKS``, and a test that fails without it. A hook must do
nothing in a server that was not started with our cache.

SGLang loads plugins fail-soft: an exception is only logged. So ``require_all`` is called again where our cache is
built, which no hook is needed for, and stops the server when a hook is missing.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from types import ModuleType
from typing import Any

# In every process that parses arguments, and in processes that run a scheduler.
SERVER_HOOKS = ("cli_flags", "cli_config", "start_check", "http_app")
ENGINE_HOOKS = ("graph_variants", "kv_pool", "run_batch", "scheduler_metrics", "server_info")
SCHEDULER_MODULE = "sglang.srt.managers.scheduler"


class HookMissingError(RuntimeError):
    """A hook on SGLang is not in place, so our cache would not be whole."""


def modules(names: tuple[str, ...] = SERVER_HOOKS + ENGINE_HOOKS) -> list[ModuleType]:
    return [importlib.import_module(f"{__name__}.{name}") for name in names]


def install() -> None:
    """Register the hooks that this process needs; SGLang applies them right after. Called once per process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from laprox_sglang.patches import engine_arguments, evaluation_rpc

    names: tuple[str, ...] = SERVER_HOOKS
    # Importing the scheduler only to hook it would slow down processes that never run one.
    if SCHEDULER_MODULE in sys.modules:
        names += ENGINE_HOOKS
    for module in modules(names):
        HookRegistry.register(module.TARGET, module.hook, HookType(module.TYPE))
    engine_arguments.install()
    evaluation_rpc.install()


def verify_targets() -> list[tuple[str, bool, str]]:
    """(target, ok, detail) of every hook: does the target exist in this SGLang, with the signature we wrap?"""
    return [(module.TARGET, *_check_target(module)) for module in modules()]


def missing() -> list[str]:
    """Targets of the hooks that are not in place in this process."""
    return [module.TARGET for module in modules() if not _is_hooked(module)]


def require_all() -> None:
    """Raises HookMissingError unless every target is as expected and hooked."""
    broken = [f"{target} ({detail})" for target, ok, detail in verify_targets() if not ok]
    broken += [f"{target} (not hooked)" for target in missing()]
    if broken:
        raise HookMissingError(
            f"laprox cannot hook into this SGLang: {'; '.join(broken)}. laprox_sglang works with sglang==0.5.23; "
            "run `laprox-sglang doctor`, or start without --radix-cache-backend laprox"
        )


def _resolve(target: str) -> Any:
    owner, name = target.rsplit(".", 1)
    return getattr(pkgutil.resolve_name(owner), name)


def _check_target(module: ModuleType) -> tuple[bool, str]:
    try:
        function = inspect.unwrap(_resolve(module.TARGET))
        found = tuple(inspect.signature(function).parameters)
    except (AttributeError, ImportError, ValueError, TypeError) as error:
        return False, f"{type(error).__name__}: {error}"
    # A bound classmethod does not show its first parameter, the function that it wraps does.
    expected = module.PARAMETERS
    if found not in (expected, expected[1:]):
        return False, f"has parameters {found}, expected {expected}"
    return True, "ok"


def _is_hooked(module: ModuleType) -> bool:
    function = _resolve(module.TARGET)
    while function is not None:
        closure = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is module.hook for cell in closure):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
