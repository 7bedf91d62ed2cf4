"""``--laprox-policy``: the field's methods as this package's settings, one line each.

A preset is a score, an allocation, and the paper's window, pooling and sinks. Imports nothing: settings are checked
before anything heavy is loaded. Where the papers differ in things that are not the method (max or average pooling, the
width of a window), the choice is the one named in the source below, so that methods built on SnapKV differ from it in
nothing else.

name            source
laprox          arXiv 2605.07234; pooling width measured on this package's demo model (see the README)
snapkv          arXiv 2404.14469; window 32, average pooling over 5: the defaults of the authors' code
ada-snapkv      arXiv 2407.11550 (Ada-KV) on SnapKV's scores; safeguard 0.2
pyramidkv       arXiv 2406.02069; window 32, average pooling over 5, beta 20: the defaults of the authors' code
ada-pyramid     arXiv 2407.11550: PyramidKV's layer budgets, shared freely between the heads of a layer
cake            arXiv 2503.12491; window 32, average pooling over 5, gamma 200
criticalkv      arXiv 2502.03805 on SnapKV's scores
ada-criticalkv  the same with Ada-KV's budgets
defensivekv     arXiv 2510.13334; window 32, average pooling over 5, Ada-KV's budgets
headkv          arXiv 2410.19258 on SnapKV's scores; needs --laprox-profile
h2o             arXiv 2306.14048; evaluation only (see policy/scores/h2o.py)
streaming       arXiv 2309.17453; 4 sinks, all the rest recent
random          negative control, with streaming's sinks so that it does not fail for their lack alone
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]


def _preset(score: str, allocation: str, pool_kernel: int = 5, sink: int = 0, window: int = 32) -> Settings:
    return {"score": score, "allocation": allocation, "pool_kernel": pool_kernel, "sink": sink, "window": window}


PRESETS: dict[str, Settings] = {
    "laprox": _preset("laprox", "model", pool_kernel=21, sink=4),
    "snapkv": _preset("attention", "head"),
    "ada-snapkv": _preset("attention", "layer"),
    "pyramidkv": _preset("attention", "pyramid"),
    "ada-pyramid": _preset("attention", "layer_pyramid"),
    "cake": _preset("cake", "cake"),
    "criticalkv": _preset("critical", "head"),
    "ada-criticalkv": _preset("critical", "layer"),
    "defensivekv": _preset("defensive", "layer"),
    "headkv": _preset("attention", "profile"),
    "h2o": _preset("h2o", "head", pool_kernel=1),
    "streaming": _preset("streaming", "head", pool_kernel=1, sink=4),
    "random": _preset("random", "head", pool_kernel=1, sink=4),
}


def preset(name: str) -> Settings:
    """The settings of a preset, by the field names of ``LaProxConfig``. Raises ValueError, listing the known names."""
    if name not in PRESETS:
        raise ValueError(f"unknown policy {name!r}; choose from {', '.join(PRESETS)}")
    return dict(PRESETS[name])
