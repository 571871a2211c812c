"""The address of the runner that `mlx-runner top` reads."""

import re

import pytest

from runner.cli.parse import parse_top
from runner.errors import UsageError


@pytest.mark.parametrize(
    ("words", "environ", "url"),
    [
        (["--port", "11500"], {}, "http://127.0.0.1:11500"),
        (["11500"], {}, "http://127.0.0.1:11500"),
        (["127.0.0.1:11500"], {}, "http://127.0.0.1:11500"),
        (["http://localhost:11500/"], {}, "http://localhost:11500"),
        (["http://[::1]:11500"], {}, "http://[::1]:11500"),
        ([], {"MLX_RUNNER_PORT": "11500"}, "http://127.0.0.1:11500"),
        (["--port", "2"], {"MLX_RUNNER_PORT": "11500"}, "http://127.0.0.1:2"),
        (["3"], {"MLX_RUNNER_PORT": "11500"}, "http://127.0.0.1:3"),
    ],
)
def test_a_runner_is_named_by_its_port_or_its_address(words: list[str], environ: dict[str, str], url: str) -> None:
    settings = parse_top(words, environ)
    assert (settings.url, settings.once) == (url, False)
    assert parse_top([*words, "--once"], environ).once


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a runner: mlx-runner top --port N"),
        (["--port", "0"], "--port 0: give a whole number from 1 to 65535"),
        (["localhost"], "localhost: a runner's address looks like http://127.0.0.1:11500"),
        (["https://127.0.0.1:1"], "looks like http://"),
        (["http://127.0.0.1:1/page"], "looks like http://"),
        (["http://[::1"], "looks like http://"),
        (["1", "2"], "unrecognized arguments: 2; see mlx-runner top --help"),
    ],
)
def test_an_address_that_names_no_runner_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_top(words, {})
