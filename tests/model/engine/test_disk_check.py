"""What was restored is computed again now and then: whether it is still what the model computes."""

from array import array
from pathlib import Path

import mlx.core as mx
import pytest

from runner.disk.check import SelfCheck, relative_error
from runner.disk.reader import Found
from runner.disk.segment import STATE, Segment
from scripts.tools.models.tiny import KINDS
from tests.model.engine.test_disk import Process, words
from tests.unit.disk.made import segment

OPAQUE = "deepseek_v41"
"""Whose layers are all kept as a whole, with buffers that depend on the lengths of forwards."""


def restored(kind: str, directory: Path, *, wrong: bool = False) -> Process:
    """Returns a process that has a prompt from the disk of another one, and will check it."""
    first = Process(kind, directory)
    first.ask(words(500))
    first.run()
    if wrong:
        poison(first)
    second = Process(kind, directory)
    second.chance = 0.0  # each is checked
    again = second.ask([*words(500), 3, 4, 5])
    while not again.finished:
        second.step()
    assert again.request.restored > 250
    return second


def poison(process: Process) -> None:
    """Writes all segments anew, whole, with other signs of what they hold."""
    for name in list(process.store.index.names.values()):
        found = process.store.read(name)
        assert found is not None
        data = bytearray(found.data)
        for at in range(4 * found.facts.tokens + 3, len(data), 4):
            data[at] ^= 0x80
        process.store.drop(name)
        assert process.store.publish(Segment(found.facts, memoryview(data)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_stays(kind: str, tmp_path: Path) -> None:
    process = restored(kind, tmp_path)
    process.run()
    files = len(process.store.index.names)
    counts = process.tier.counts()
    assert (counts.checks, counts.failed_checks, counts.rejected) == (int(kind != OPAQUE), 0, {})
    assert files == counts.segments == len(list(process.store.folder.glob("*.*-*.*")))
    again = process.ask([*words(500), 3, 4, 5])
    process.run()
    assert again.cached > 250
    process.engine.check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != OPAQUE])
def test_what_the_model_does_not_compute_is_removed(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = restored(kind, tmp_path, wrong=True)
    while not process.tier.counts().checks:
        process.step()
    process.disk.step()
    counts = process.tier.counts()
    assert (counts.checks, counts.failed_checks, counts.segments) == (1, 1, 0)
    assert not list(process.store.folder.glob("*.*-*.*"))
    assert caplog.text.count("the disk cache is wrong: emptied") == 1
    process.engine.requests.clear()  # their answers were wrong
    again = process.ask(words(500))
    process.run()
    assert again.cached == 0
    process.engine.check()
    assert process.tier.counts().segments > 0  # written anew
    assert process.tier.counts().held_bytes < 1 << 30


def test_a_request_goes_first(tmp_path: Path) -> None:
    process = restored("llama", tmp_path)
    for number in range(3):
        for _ in range(5):
            assert process.step()
        assert process.check._slices is not None
        asked = process.ask(words(60, number + 5))
        assert process.check._slices is None  # nothing is held beside the request
        while not asked.finished:
            assert process.check._slices is None
            process.step()
    process.run()  # three times are enough
    assert process.tier.counts().checks == 0
    assert not process.check.pending
    process.engine.check()


def test_a_slice_of_the_check_is_no_longer_than_one_of_a_trial(tmp_path: Path) -> None:
    process = restored("llama", tmp_path)
    lengths = list[int]()
    forward = process.check._forward

    def noted(tokens: mx.array, layers: list[object]) -> mx.array:
        lengths.append(tokens.shape[1])
        return forward(tokens, layers)

    process.check._forward = noted
    while process.check.pending:
        before = len(lengths)
        process.step()
        assert len(lengths) <= before + 1
    assert max(lengths) <= 16
    assert 256 < sum(lengths) <= 512


def test_most_requests_are_not_checked(tmp_path: Path) -> None:
    process = restored("llama", tmp_path)
    process.check._found = None
    numbers = [index / 128 for index in range(128)]
    found = Found(segment(words(300), 0, 256), array("i", words(256)))
    sampled = 0
    for process.chance in numbers:
        process.check.sample(found)
        sampled += process.check.pending
        process.check._found = None
    assert sampled == 2


def test_long_prompts_and_pictures_are_not_checked() -> None:
    for stop, fits in ((2048, True), (2049, False)):
        found = Found(segment(words(3000), stop - 200, stop), array("i", words(stop)))
        assert SelfCheck.suits(found) is fits
        assert not SelfCheck.suits(found._replace(prefix=array("i", [*words(stop - 1), -1])))
    state = segment(words(300), 0, 256, STATE)
    assert SelfCheck.suits(Found(state, array("i", words(256))))
    assert not SelfCheck.suits(Found(Segment(state.facts, memoryview(bytes((32 << 20) + 1))), array("i", words(256))))


def test_rounding_is_told_from_other_numbers() -> None:
    right = mx.random.normal((1, 2, 64, 16))
    assert relative_error(right, right) == 0.0
    assert relative_error(right + 0.02 * mx.random.normal(right.shape), right) < 0.1
    assert relative_error(mx.random.normal(right.shape), right) > 1.0
    assert relative_error(right * float("nan"), right) == float("inf")
    few = mx.concatenate([mx.random.normal((1, 2, 20, 16)), right[..., 20:, :]], axis=-2)  # of tied experts
    assert relative_error(few, right) == 0.0
