"""Pictures of new sizes: mlx-vlm's processor measures each once, off the loop, and for no client that has left."""

from collections.abc import Callable
from typing import cast

import pytest

from protocol import Media
from runner.engine.ports import Steps
from runner.errors import MediaError, RequestError
from runner.media.prompt import MediaNames, MediaPrompt
from runner.media.row_store import RowStore
from runner.media.support import MediaSupport
from runner.tokenizer import Tokenizer
from runner.vlm.pictures import VlmPictures
from runner.vlm.process import Prepared, Preparer
from tests.lib.steps import result_of
from tests.unit.media.test_expand import CONTEXT, Pieces, image

SOFT = 60


class Script(Preparer):
    """A processor that makes a token of each 32 columns, between two others."""

    def __init__(self) -> None:
        self.measured: list[tuple[int, int]] = []

    def measure(self, width: int, height: int, left: Callable[[], bool]) -> Prepared:
        if left():
            raise MediaError("measure image: the client has left")
        self.measured.append((width, height))
        return Prepared([1, *[SOFT] * (width // 32), 2], [])


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def support(script: Script) -> MediaSupport:
    pictures = VlmPictures("p", "1", script, {}, [SOFT], mrope=False)
    return MediaSupport(pictures, MediaNames(), RowStore(pictures))


def expansion(support: MediaSupport, *media: Media) -> Steps[MediaPrompt | None]:
    prompt = "".join(f"[img-{each.id}]" for each in media)
    return support.expand(f"{prompt}.", media, cast("Tokenizer", Pieces()), CONTEXT)


def ids_of(steps: Steps[MediaPrompt | None], vision: MediaSupport | None = None) -> list[int]:
    found = result_of(steps, vision)
    assert found is not None
    return found.ids


def test_a_new_size_is_measured_before_its_tokens_are_known(support: MediaSupport, script: Script) -> None:
    media = [image(0, 3), image(1, 2), image(2, 3, colour="blue")]
    steps = expansion(support, *media)
    unmeasured = next(steps)
    assert unmeasured is not None
    assert script.measured == [], "not where prompts are tokenized"
    for measuring in support.decode(unmeasured, bool):
        measuring.result()
    assert script.measured == [(96, 64), (64, 64)], "one of each size"
    assert ids_of(steps) == [300, 1, 60, 60, 60, 2, 1, 60, 60, 2, 1, 60, 60, 60, 2, ord(".")]
    assert ids_of(expansion(support, media[2])) == [300, 1, 60, 60, 60, 2, ord(".")]
    assert len(script.measured) == 2
    support.store.close()


def test_nothing_is_measured_for_a_client_that_has_left(support: MediaSupport, script: Script) -> None:
    steps = expansion(support, image(0, 3))
    unmeasured = next(steps)
    assert unmeasured is not None
    for measuring in support.decode(unmeasured, lambda: True):
        with pytest.raises(MediaError, match="the client has left"):
            measuring.result()
    assert script.measured == []
    with pytest.raises(RequestError, match="send it again"):
        next(steps)
    support.store.close()
