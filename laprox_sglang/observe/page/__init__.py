"""The page: one self-contained document, made of the files in this folder when it is first asked for."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

STYLES = ("style.css",)
# In this order: each uses only what stands before it.
SCRIPTS = ("base.js", "client.js", "chart.js", "heatmap.js", "panels.js", "main.js")


def _read(names: tuple[str, ...]) -> str:
    folder = resources.files(__name__)
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


@cache
def _parts() -> tuple[str, str]:
    # One scope for all scripts, none of it global.
    return _read(STYLES), f'"use strict";\n(() => {{\n{_read(SCRIPTS)}\n}})();'


@cache
def html() -> str:
    style, script = _parts()
    template = _read(("index.html",))
    return template.replace("/* STYLE */", style).replace("/* SCRIPT */", script)


@cache
def headers() -> dict[str, str]:
    """Nothing from elsewhere is loaded or sent to, and nobody may frame the page (CSP level 2)."""
    style, script = (
        "'sha256-" + base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() + "'" for part in _parts()
    )
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"Content-Security-Policy": policy, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
