from __future__ import annotations

import argparse

import pytest

from laprox_sglang import cli
from laprox_sglang.config import ConfigError, LaProxConfig, add_flags, from_arguments
from laprox_sglang.policy import presets
from laprox_sglang.policy.presets import PRESETS
from laprox_sglang.policy.registry import NOT_SERVED, check_names, score_names

ASKED = (
    "laprox snapkv ada-snapkv pyramidkv ada-pyramid cake criticalkv ada-criticalkv defensivekv headkv h2o "
    "streaming random"
)


def parse(*arguments: str) -> LaProxConfig | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return from_arguments(vars(parser.parse_args(list(arguments))))


def test_all_presets_are_there_named_in_the_docstring_and_valid(tmp_path):
    assert list(PRESETS) == ASKED.split()
    profile = tmp_path / "profile.json"
    profile.write_text("{}")
    for name, settings in PRESETS.items():
        check_names(settings["score"], settings["allocation"])
        assert f"\n{name} " in presets.__doc__
        extra = {"profile": str(profile)} if settings["allocation"] == "profile" else {}
        made = LaProxConfig.from_dict({"policy": name, **extra})
        assert {key: getattr(made, key) for key in settings} == settings


def test_the_default_is_the_laprox_preset():
    assert LaProxConfig.from_dict({"policy": "laprox"}) == LaProxConfig()


def test_a_flag_wins_over_the_preset_wherever_both_stand():
    given = parse("--laprox-policy", "snapkv", "--laprox-pool-kernel", "7")
    assert (given.score, given.allocation, given.pool_kernel, given.sink) == ("attention", "head", 7, 0)
    given = parse("--laprox-config", '{"policy": "snapkv", "window": 64, "ratio": 0.2}', "--laprox-sink", "8")
    assert (given.score, given.window, given.ratio, given.sink) == ("attention", 64, 0.2, 8)
    given = parse("--laprox-config", '{"pool_kernel": 9}', "--laprox-policy", "cake")
    assert (given.score, given.allocation, given.pool_kernel) == ("cake", "cake", 9)


def test_unknown_policy_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown policy 'snap'; choose from laprox, snapkv"):
        parse("--laprox-policy", "snap")


def test_h2o_is_refused_by_a_server_and_not_by_the_evaluation(capsys):
    assert set(NOT_SERVED) == {"h2o"} <= set(score_names())
    with pytest.raises(ConfigError, match=r"h2o.*cannot be served.*all the prompt's queries"):
        parse("--laprox-policy", "h2o")
    assert cli.main(["serve", "--laprox-policy", "h2o"]) == 2
    assert "laprox-sglang eval" in capsys.readouterr().err
    assert LaProxConfig.from_dict({"policy": "h2o"}).score == "h2o"


def test_profile_and_its_file_go_together(tmp_path):
    with pytest.raises(ConfigError, match="go together"):
        parse("--laprox-policy", "headkv")
    with pytest.raises(ConfigError, match="go together"):
        parse("--laprox-profile", "some.json")
    with pytest.raises(ConfigError, match=r"none\.json is not a file"):
        parse("--laprox-policy", "headkv", "--laprox-profile", str(tmp_path / "none.json"))
