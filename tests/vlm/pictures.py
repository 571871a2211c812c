"""What is asked of a package before it may see: whole answers beside mlx-vlm's own, token by token."""

from tests.lib.seeing_engine import NotingPolicy, picture
from tests.vlm.seeing import VlmEngine

RED, BLUE, WIDE = picture("red"), picture("blue", 150, 60), picture("green", 160, 64)
FIVE = ("qwen3_vl", "gemma3", "mistral3", "internvl", "smolvlm")
CHUNKS = (2048, 3)
"""Of tokens: a prompt at once, and one that is cut within pictures."""


def answers_about_one_as_mlx_vlm_does(package: str) -> None:
    """The same for a package that takes only one picture in a prompt."""
    for chunk in CHUNKS:
        engine = VlmEngine(package, NotingPolicy(chunk))
        scores = []
        for shown in (RED, BLUE, picture("blue")):
            first = engine.answer("what is [img-0] here?", shown)
            again = engine.answer("what is [img-0] here? Yes.", shown)
            assert again.counts[0] >= len(first.request.prompt)
            scores.append(first.entries[0].logprob)
        assert len({*scores}) == 3, "the picture does not count"
        engine.check()


def answers_as_mlx_vlm_does(package: str) -> None:
    """One picture and two of other sizes, in either order, prompts that are cut anywhere, and a second turn that comes
    back from the cache; and a picture counts. Some of mlx-vlm's processors take several pictures of one size only:
    then the two have that."""
    for chunk in CHUNKS:
        engine = VlmEngine(package, NotingPolicy(chunk))
        second = BLUE if engine.takes_sizes(RED, BLUE) else picture("blue")
        first = engine.answer("what is [img-0] here?", RED)
        engine.answer("what is [img-0] here? and [img-1] too?", RED, second)
        swapped = engine.answer("what is [img-0] here? and [img-1] too?", second, RED)
        again = engine.answer("what is [img-0] here? and [img-1] too? Yes.", second, RED)
        assert again.counts[0] >= len(swapped.request.prompt)
        other = engine.answer("what is [img-0] here?", picture("blue"))
        assert first.request.prompt == other.request.prompt
        assert first.entries[0].logprob != other.entries[0].logprob, "the picture does not count"
        engine.check()
