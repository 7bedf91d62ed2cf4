"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from laprox_sglang import demo_model


@pytest.fixture(scope="session")
def demo_model_folder() -> Path:
    """The demo model in the user's cache folder: made by the first test that wants it."""
    return demo_model.ensure(progress=False)
