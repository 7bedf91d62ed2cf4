"""``laprox-sglang top``: its errors say what to do, its map reads without colours."""

import httpx
import pytest

from laprox_sglang import cli
from laprox_sglang.observe import top


def test_no_server(capsys):
    assert cli.main(["top", "--once", "--url", "127.0.0.1:1"]) == 2
    assert "no answer from http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "remedy"), [(401, "--api-key"), (404, "laprox-sglang serve"), (503, "answered 503")])
def test_refusals_name_the_remedy(code, remedy):
    source = top.Source("127.0.0.1:1/v1", None)
    source._http = httpx.Client(base_url=source.url, transport=httpx.MockTransport(lambda _: httpx.Response(code)))
    with pytest.raises(top.TopError, match=remedy):
        source.get("stats")


def test_the_key_is_sent():
    assert top.Source("host", "secret")._http.headers["Authorization"] == "Bearer secret"


def test_cells_are_darker_the_more_is_kept():
    shades = [top.cell(share / 10, 2)[0] for share in range(11)]
    assert shades[0] == "··" and shades[-1] == "██"
    assert [top.SHADES.index(each[0]) for each in shades] == sorted(top.SHADES.index(each[0]) for each in shades)
    assert top.colour(0) == top.HEAT[0] and top.colour(1) == top.HEAT[-1]
