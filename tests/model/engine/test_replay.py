"""What an engine did is done again from a tape alone, and any difference is found."""

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from runner.errors import RunnerError
from runner.grammar.guide import decode_state
from runner.grammar.messages import State
from runner.sampling import SamplingOptions
from runner.sampling.sample import SampledTokens
from runner.tape import taped_grammar
from runner.tape.file import TapeFile, TapeReader
from runner.tape.recording import Arrived, Turn
from runner.tape.tape import Entry, EntryKind
from runner.tape.taped_grammar import KnownStates
from scripts.tools.models.tiny import KINDS, VOCAB
from tests.lib.taped_engine import HEADER, MIXES, Story, events_in


def check_replay(story: Story, file: Path) -> None:
    seen = story.record(file)
    done, again = story.replay(file)
    assert done.difference == ""
    assert again == seen
    assert done.requests == len(seen)


def entries(file: Path) -> list[Entry]:
    return [*TapeReader(file).entries()]


def rewritten(file: Path, values: list[Entry]) -> Path:
    """Writes another tape of these values."""
    tape = TapeFile(file.with_name("rewritten"), HEADER)
    tape.write(values)
    return tape.path


@pytest.mark.parametrize("name", KINDS)
def test_any_mix_is_replayed(name: str, tmp_path: Path) -> None:
    check_replay(Story(name, 0), tmp_path / "tape")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize("name", KINDS)
def test_many_mixes_are_replayed(name: str, seed: int, tmp_path: Path) -> None:
    check_replay(Story(name, seed), tmp_path / "tape")


def test_the_mixes_have_all_that_a_replay_must_do_again(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in MIXES:
        story, file = Story("llama", seed), tmp_path / str(seed)
        check_replay(story, file)
        found += events_in(entries(file))
        found["joined"] += story.joined > 1
    wanted = "done length cancelled failed refused joined matched evicted forced known drafted accepted faults late"
    assert not [each for each in wanted.split() if not found[each]], found


def test_all_is_written_before_every_forward_and_with_one_write(tmp_path: Path) -> None:
    writes: list[int] = []
    bodies: list[list[Entry]] = []
    write = TapeFile.write

    def counted(file: TapeFile, body: list[Entry]) -> None:
        bodies.append(body)
        writes.append(len(body))
        write(file, body)

    story, file = Story("llama", 3), tmp_path / "tape"
    with patch.object(TapeFile, "write", counted):
        story.record(file)
    forwards = sum(kind is EntryKind.FAULT for body in bodies for kind, _ in body)
    assert len(story.unwritten) >= forwards // 2 > 20
    assert set(story.unwritten) == {0}
    idle = story.idle_slices
    assert len(writes) <= len(story.unwritten) + idle + 1
    slices = sum(kind is EntryKind.TURN for body in bodies for kind, _ in body)
    prompts = sum(len(value) for body in bodies for _, value in body if isinstance(value, bytes))
    assert file.stat().st_size - prompts <= 200 * slices


@pytest.mark.parametrize("kind", [EntryKind.TOKENS, EntryKind.EVENT, EntryKind.ENDED])
def test_a_difference_names_its_slice_and_both_values(kind: EntryKind, tmp_path: Path) -> None:
    story, file = Story("llama", 2), tmp_path / "tape"
    story.record(file)
    values = entries(file)
    place = next(at for at, (each, value) in enumerate(values) if each is kind and isinstance(value, list))
    recorded = values[place][1]
    assert isinstance(recorded, list)
    changed = [*recorded[:-1], 99]
    values[place] = (kind, changed)
    done, _ = story.replay(rewritten(file, values))
    slices = sum(each is EntryKind.TURN for each, _ in values[:place])
    assert done.difference.startswith(f"slice {slices}: recorded: {kind.label} {changed!r}; replayed: ")
    assert done.difference.endswith(repr(recorded))


def test_a_reading_that_is_not_used_is_a_difference(tmp_path: Path) -> None:
    story, file = Story("llama", 2), tmp_path / "tape"
    story.record(file)
    values = entries(file)
    place = next(at for at, (kind, _) in enumerate(values) if kind is EntryKind.SECONDS)
    done, _ = story.replay(rewritten(file, values[:place] + values[place + 1 :]))
    assert "replayed: asks for: seconds" in done.difference


@pytest.mark.parametrize("prompt", [[], [-1], [1, VOCAB]])
def test_tokens_that_the_model_does_not_have_are_refused(prompt: list[int], tmp_path: Path) -> None:
    story, file = Story("llama", 2), tmp_path / "tape"
    arrived = Arrived(1, prompt, 5, SamplingOptions(seed=1), [], False, None, b"")
    tape = TapeFile(file, HEADER)
    tape.write([(EntryKind.ACTIVE, 0), (EntryKind.TURN, msgspec.msgpack.encode(Turn([arrived])))])
    with pytest.raises(RunnerError, match="request 1 has tokens that the model does not have"):
        story.replay(file)


def test_a_fault_that_cannot_be_met_again_is_named(tmp_path: Path) -> None:
    story, file = Story("llama", 4), tmp_path / "tape"
    with patch.object(SampledTokens, "read", side_effect=ValueError("it cannot be read")):
        story.record(file)
    done, _ = story.replay(file)
    assert "recorded: event [1, 'failed', 'ValueError: it cannot be read']; replayed: " in done.difference


def test_a_state_that_comes_back_stands_on_the_tape_once() -> None:
    bodies = [b"a", b"bb", b"a", b"ccc", b"bb", b"a", b"a", b"ccc"]
    with patch.object(taped_grammar, "_MOST_KNOWN_BYTES", 5):
        written, read = KnownStates(), KnownStates()
        found = []
        for body in bodies:
            found.append(place := written.place(body))
            assert written.body(place) == read.body(place) == body
    assert found == [b"a", b"bb", 0, b"ccc", 1, b"a", 3, 2], "the oldest is forgotten first"
    with pytest.raises(ValueError, match="no state 0"):
        read.body(0)


@pytest.mark.parametrize("state", [State(forced=[VOCAB]), State(forced=[-1]), State(tried=[b"\1", VOCAB])])
def test_no_state_on_a_tape_names_a_token_that_the_model_does_not_have(state: State) -> None:
    with pytest.raises(ValueError, match="a grammar names a token"):
        decode_state(msgspec.msgpack.encode(state), VOCAB)
