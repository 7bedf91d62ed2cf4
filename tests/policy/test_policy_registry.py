from __future__ import annotations

import os
import subprocess
import sys

import pytest
from policies import ALLOCATIONS, SCORES, allocation_for

from laprox_sglang.config import ConfigError, LaProxConfig
from laprox_sglang.policy.allocations.base import Allocation
from laprox_sglang.policy.registry import check_names, get_allocation, get_score
from laprox_sglang.policy.scores.base import Score


def test_every_name_gives_its_class():
    made = [get_score(name) for name in SCORES] + [allocation_for(name, 2, 2) for name in ALLOCATIONS]
    assert all(isinstance(one, Score | Allocation) for one in made)
    assert len({type(one) for one in made}) == len(SCORES) + len(ALLOCATIONS)
    assert {name for name in ALLOCATIONS if allocation_for(name, 2, 2).normalised} == {"model"}
    assert {name for name in ALLOCATIONS if allocation_for(name, 2, 2).weighs_layers} == {"cake"}


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown score 'snap'; choose from laprox, .*random"):
        check_names("snap", "model")
    with pytest.raises(ValueError, match=r"unknown allocation 'mdl'; choose from model, .*pyramid"):
        check_names("laprox", "mdl")
    with pytest.raises(ValueError, match="unknown score"):
        get_score("model")
    with pytest.raises(ValueError, match="unknown allocation"):
        get_allocation("laprox")


def test_settings_refuse_unknown_names():
    assert LaProxConfig().score in SCORES and LaProxConfig().allocation in ALLOCATIONS
    with pytest.raises(ConfigError, match="unknown score"):
        LaProxConfig(score="snap")


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*(m for m in ('torch', 'sglang') if m in sys.modules))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(done.stdout.split())


def test_the_registry_loads_neither_torch_nor_sglang():
    statement = "from laprox_sglang.policy.registry import check_names; check_names('laprox', 'model')"
    assert imported_by(statement) == set()


def test_the_policies_load_torch_but_not_sglang():
    statement = (
        "from laprox_sglang.policy.registry import *; import laprox_sglang.policy.select; "
        "[get_score(n) for n in score_names()]; [get_allocation(n) for n in allocation_names() if n != 'profile']; "
        "import laprox_sglang.policy.allocations.profile"
    )
    assert imported_by(statement) == {"torch"}
