"""No graph grows with its prompt: a forward over 24 tokens has as many nodes as one over 12."""

import pytest

from tests.lib.kernels import in_front
from tests.lib.programs import python

FEW = (
    *("llama", "deepseek_v3", "dbrx", "qwen3_5", "kimi_linear", "mamba", "mamba2", "rwkv7", "recurrent_gemma"),
    "bailing_moe_linear",
)
"""One of each recurrence, and of the other parts that once were loops."""


def growing(platform: str, *names: str) -> list[str]:
    """Returns the names of the models whose graphs grow with the prompt; without names, looks at all of mlx-lm's."""
    done = python("-m", "scripts.tools.models.nodes", platform, *names)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == len(names) or len(rows) > 120
    return [name for name, few, many in rows if int(few) != int(many)]


@pytest.mark.parametrize("names", [FEW, ()], ids=["few", "all"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "metal"])
def test_no_graph_grows_with_its_prompt(platform: str, names: tuple[str, ...]) -> None:
    if platform == "cpu" and not in_front():
        pytest.skip("without our kernels, recurrences are loops")
    assert growing(platform, *names) == []
