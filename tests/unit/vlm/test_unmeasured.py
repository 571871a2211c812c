"""Pictures of new sizes: mlx-vlm's processor measures each once, off the loop, and for no client that has left."""

from collections.abc import Callable
from typing import cast

import pytest

from protocol import Media
from runner.engine.request import UnmeasuredError
from runner.errors import MediaError
from runner.media.header import Header
from runner.media.prompt import MediaNames
from runner.media.rows import RowStore
from runner.media.support import MediaSupport
from runner.tokenizer import Tokenizer
from runner.vlm.pictures import VlmPictures
from runner.vlm.process import Arrays, Prepared
from tests.unit.media.test_expand import CONTEXT, Pieces, image

SOFT = 60


class Script:
    """A processor that makes a token of each 32 columns, between two others."""

    def __init__(self) -> None:
        self.measured: list[tuple[int, int]] = []

    def measure(self, width: int, height: int, left: Callable[[], bool]) -> Prepared:
        if left():
            raise MediaError("measure image: the client has left")
        self.measured.append((width, height))
        return Prepared([1, *[SOFT] * (width // 32), 2], [])

    def prepare(self, data: bytes, header: Header, left: Callable[[], bool]) -> Arrays:
        raise NotImplementedError


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def support(script: Script) -> MediaSupport:
    pictures = VlmPictures("p", "1", script, {}, [SOFT], mrope=False)
    return MediaSupport(pictures, MediaNames(), RowStore(pictures))


def unmeasured(support: MediaSupport, *media: Media) -> UnmeasuredError:
    with pytest.raises(UnmeasuredError) as found:
        expanded(support, *media)
    return found.value


def expanded(support: MediaSupport, *media: Media) -> list[int]:
    prompt = "".join(f"[img-{each.id}]" for each in media)
    found = support.expand(f"{prompt}.", media, cast("Tokenizer", Pieces()), CONTEXT)
    assert found is not None
    return found.ids


def test_a_new_size_is_measured_before_its_tokens_are_known(support: MediaSupport, script: Script) -> None:
    media = [image(0, 3), image(1, 2), image(2, 3, colour="blue")]
    error = unmeasured(support, *media)
    assert script.measured == [], "not where prompts are tokenized"
    for measuring in support.decode(error.prompt, bool):
        measuring.result()
    assert script.measured == [(96, 64), (64, 64)], "one of each size"
    assert expanded(support, *media) == [300, 1, 60, 60, 60, 2, 1, 60, 60, 2, 1, 60, 60, 60, 2, ord(".")]
    assert expanded(support, media[2]) == [300, 1, 60, 60, 60, 2, ord(".")]
    assert len(script.measured) == 2
    support.store.close()


def test_nothing_is_measured_for_a_client_that_has_left(support: MediaSupport, script: Script) -> None:
    error = unmeasured(support, image(0, 3))
    for measuring in support.decode(error.prompt, lambda: True):
        with pytest.raises(MediaError, match="the client has left"):
            measuring.result()
    assert script.measured == []
    unmeasured(support, image(0, 3))
    support.store.close()
