"""The decisions of a memory budget, from numbers alone, and the recovery when MLX finds no memory."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from runner.engine.events import Failed, Refused
from runner.engine.memory import MemoryBudget, Meter, WorkspaceEstimate
from runner.engine.policy import SlicePolicy
from runner.logs import lacks_memory
from runner.sampling import SamplingOptions
from runner.settings import LEAST_SLICE_TOKENS
from scripts.tools.models.tiny import words
from tests.lib.tiny_engine import RequestSpec, TinyEngine
from tests.process.faults.fault_points import NO_MEMORY

TOKEN_BYTES = 256  # of the llama


class Dial(Meter):
    """A meter that shows a number set by the test."""

    def __init__(self, active: int = 0) -> None:
        self.now = active
        self.most = 0
        self.cleared = 0
        self.late = 0
        """Bytes that are still to be released, which happens when somebody waits for it."""

    def active(self) -> int:
        return self.now + self.late

    def peak(self) -> int:
        return self.most

    def restart(self) -> None:
        self.most = 0

    def clear(self) -> None:
        self.cleared += 1

    def settle(self) -> None:
        self.late = 0


def test_a_token_costs_no_less_with_a_longer_context_and_grows_along_a_line() -> None:
    workspace = WorkspaceEstimate()
    workspace.learn(100, 100, 1000 * 100)
    workspace.learn(100, 300, 2000 * 100)
    assert workspace.likely_bytes(100, 50) == workspace.likely_bytes(100, 100) == 100_000
    assert workspace.likely_bytes(100, 300) == 200_000
    assert workspace.likely_bytes(100, 500) == 300_000
    assert workspace.certain_bytes(100, 500) == 200_000
    assert workspace.certain_bytes(100, 200) == 100_000


def test_the_most_bytes_of_a_kind_of_slice_count_and_one_kind_scales_in_proportion() -> None:
    workspace = WorkspaceEstimate()
    for nbytes in (3200, 6400, 1600):
        workspace.learn(16, 40, nbytes)
    assert workspace.likely_bytes(16, 40) == 6400
    assert workspace.likely_bytes(16, 80) == 12_800
    assert workspace.certain_bytes(16, 80) == 6400


def test_a_slice_takes_the_tokens_that_fit_and_never_fewer_than_the_least() -> None:
    workspace = WorkspaceEstimate()
    assert workspace.tokens_in(10 << 20, 100) == LEAST_SLICE_TOKENS, "nothing is known yet"
    assert workspace.tokens_in(50 << 20, 100) == 50
    workspace.learn(100, 100, 100_000)
    assert workspace.tokens_in(50_000, 100) == 50
    assert workspace.tokens_in(50_000, 200) == 25
    assert workspace.tokens_in(0, 100) == LEAST_SLICE_TOKENS


def make_engine(budget_bytes: int | None, dial: Dial, chunk: int = 64, cache_bytes: int | None = None) -> TinyEngine:
    return TinyEngine(
        "llama", SlicePolicy(chunk, 0.1), memory=MemoryBudget(dial, budget_bytes, chunk), budget=cache_bytes
    )


def check_words(text: str) -> None:
    """Checks a message about the budget: a host that reads `out of memory` unloads all its models, in vain."""
    assert "memory" not in text.replace("--memory", "")


def test_the_cache_gets_what_computing_leaves() -> None:
    room = 2000 * TOKEN_BYTES
    engine = make_engine(room, Dial())
    engine.ask(words(300), 4)
    engine.finish()
    assert engine.trie.budget_bytes == room
    engine.scheduler.memory.workspace.learn(64, 320, 100_000)
    engine.ask(words(300, 2), 4)
    engine.until(lambda: bool(engine.scheduler.batches.all))
    assert engine.trie.budget_bytes == room - 100_000 - 256 * TOKEN_BYTES, "a chunk, and what an answer may grow by"
    engine.scheduler.memory.workspace.learn(64, 320, 300_000)
    engine.scheduler._make_room()
    assert engine.trie.budget_bytes == room - room // 4 - 256 * TOKEN_BYTES, (
        "no more than a share for the sake of speed"
    )
    engine.finish()
    engine.check()


def test_memory_of_other_users_is_not_the_caches() -> None:
    dial = Dial()
    engine = make_engine(3000 * TOKEN_BYTES, dial)
    engine.ask(words(300), 4)
    engine.finish()
    dial.now = engine.trie.nbytes + 1000
    engine.scheduler._make_room()
    assert engine.trie.budget_bytes == 3000 * TOKEN_BYTES - 1000


def test_slices_are_cut_to_the_room_that_is_left() -> None:
    engine = make_engine(3000 * TOKEN_BYTES, Dial(), chunk=128)
    engine.ask(words(40), 1)
    engine.finish()
    engine.scheduler.memory.workspace.learn(128, 2000, 128 * 10_000)
    engine.forward.calls.clear()
    engine.ask(words(600, 3), 1)
    engine.finish()
    lengths = [length for _, length in engine.forward.calls]
    assert LEAST_SLICE_TOKENS < max(lengths) < 3000 * TOKEN_BYTES // 10_000 < 128
    engine.check()


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers_and_the_next_one_works() -> None:
    engine = make_engine(1000 * TOKEN_BYTES, Dial())
    first = engine.ask(words(100), 2)
    engine.finish()
    large, small = engine.ask(words(1100, 2), 5), engine.ask(words(50, 3), 5)
    engine.finish()
    (event,) = large.received
    assert isinstance(event, Refused)
    for part in ("1100 tokens", "281.6 KB", "the budget is 256.0 KB", "Shorten the prompt", "--kv-bits 8", "--memory"):
        assert part in event.text
    check_words(event.text)
    assert first.finished
    assert small.finished
    engine.check()


def test_even_the_first_prompt_of_all_is_refused_before_it_is_computed() -> None:
    engine = make_engine(1000 * TOKEN_BYTES, Dial())
    large, small = engine.ask(words(1100), 5), engine.ask(words(50, 3), 5)
    engine.finish()
    (event,) = large.received
    assert isinstance(event, Refused)
    assert "1100 tokens take about 281.6 KB" in event.text
    check_words(event.text)
    assert engine.forward.tokens <= 55
    assert small.finished
    engine.check()


def test_an_answer_that_outgrows_the_room_ends_alone_with_the_numbers() -> None:
    engine = make_engine(1400 * TOKEN_BYTES, Dial())
    engine.ask(words(20), 1)
    engine.finish()
    old = engine.ask(words(300, 2), 900)
    young = engine.ask(words(100, 3), 900)
    engine.finish()
    assert old.finished
    assert isinstance(young.received[-1], Failed)
    for part in ("no room to go on", "the budget is 358.4 KB", "--kv-bits 8", "--memory", "--parallel"):
        assert part in young.received[-1].text
    check_words(young.received[-1].text)
    after = engine.ask(words(300, 4), 10)
    engine.finish()
    assert after.finished
    engine.check()


def test_memory_that_is_released_late_ends_no_request() -> None:
    dial = Dial()
    engine = make_engine(1000 * TOKEN_BYTES, dial)
    asked = engine.ask(words(300), 20)
    while not (asked.finished or asked.failed):
        dial.late = 2000 * TOKEN_BYTES
        engine.advance()
    assert asked.finished
    engine.check()


def test_what_nobody_uses_is_freed_before_a_request_ends() -> None:
    engine = make_engine(1000 * TOKEN_BYTES, Dial())
    kept = [2000 * TOKEN_BYTES]
    memory = engine.scheduler.memory
    memory._grammar_bytes, memory._drop_unused = lambda: sum(kept), kept.clear
    asked = engine.ask(words(300), 20)
    engine.finish()
    assert asked.finished
    assert not kept


@pytest.mark.parametrize("again", [False, True])
def test_one_slice_that_seemed_to_take_everything_ends_no_request_but_two_do(again: bool) -> None:
    dial = Dial()
    engine = make_engine(1000 * TOKEN_BYTES, dial)
    memory = engine.scheduler.memory
    memory._step_bytes = 1000 * TOKEN_BYTES
    memory.workspace.learn(16, 16, 600 * TOKEN_BYTES)
    for number in range(2):
        asked = engine.ask(words(300, 2 + number), 20)
        while not (asked.tokens or asked.failed):
            engine.advance()
        if again:
            memory._step_bytes = 1000 * TOKEN_BYTES
            engine.scheduler._memory_changed = True
        engine.finish()
        assert (asked.failed, bool(asked.finished)) == (again, not again)
    engine.check()


def test_a_request_with_a_grammar_waits_until_there_is_room_for_both() -> None:
    digits = RequestSpec(tuple(words(100)), 20, SamplingOptions(), grammar="start: /[0-9]{30}/")
    for grammar_tokens, together in ((100, 2), (1300, 1)):
        engine = make_engine(2400 * TOKEN_BYTES, Dial())
        engine.ask(words(20), 1)
        engine.finish()
        engine.scheduler.memory.one_grammar_bytes = grammar_tokens * TOKEN_BYTES
        running = engine.ask(words(300, 2), 40)
        engine.advance(10)
        asked = engine.submit(digits)
        engine.advance(4)
        assert engine.running() == together
        engine.finish()
        assert running.finished
        assert asked.finished
        engine.check()


def test_the_cost_of_a_step_is_forgotten_slowly() -> None:
    dial = Dial()
    memory = MemoryBudget(dial, 10**9, 64)
    forward = memory.measured(lambda tokens, layers: tokens)
    taken = []
    for step in range(3000):
        forward(mx.array([[0]]), [])
        dial.most = 1_000_000 if step == 0 else 1000
        memory.stepped(1)
        taken.append(memory._step_bytes)
    assert taken[0] == 1_000_000
    assert 900_000 < taken[100] < 1_000_000
    assert 1000 <= taken[-1] < 100_000


def test_a_round_of_drafts_does_not_raise_the_cost_of_a_step() -> None:
    """No answer needs it: where memory is short, none may end for it."""
    dial = Dial()
    memory = MemoryBudget(dial, 10**9, 64)
    forward = memory.measured(lambda tokens, layers: tokens)
    for rows, nbytes in ((1, 1000), (8, 8000), (1, 900)):
        forward(mx.array([[0] * rows]), [])
        dial.most = nbytes
        memory.stepped(rows)
        assert 900 < memory._step_bytes <= 1000


@pytest.mark.parametrize(
    ("budget_bytes", "cache_bytes", "allowed"),
    [(10_000_000, None, True), (10_000_000, 500_000, True), (5_000_000, None, False), (5_000_000, 500_000, False)],
)
def test_drafts_take_what_the_cache_may_not_hold(budget_bytes: int, cache_bytes: int | None, allowed: bool) -> None:
    """A small budget of the cache does not mean that memory is short."""
    engine = make_engine(budget_bytes, Dial(), cache_bytes=cache_bytes)
    engine.scheduler.memory._step_bytes = 500_000
    engine.ask(words(300), 4)
    engine.until(lambda: bool(engine.scheduler.batches.all))
    assert 100_000 < engine.trie.nbytes < 500_000
    assert engine.scheduler.memory.allows_drafts(engine.trie) is allowed


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (RuntimeError(NO_MEMORY), True),
        (RuntimeError("[broadcast] shapes"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_for_lack_of_memory_are_recognized(error: BaseException, lacks: bool) -> None:
    assert lacks_memory(error) is lacks


ERRORS: dict[str, Callable[[str], Exception]] = {"python": MemoryError, "mlx": lambda _: RuntimeError(NO_MEMORY)}


@pytest.mark.parametrize(("name", "error"), [("llama", "python"), ("qwen3_next", "mlx")])
def test_a_request_that_finds_no_memory_restarts_and_its_answer_is_right(name: str, error: str) -> None:
    """Any of its forwards may be the one that fails."""
    at = 0
    while True:
        engine = TinyEngine(name, SlicePolicy(16, 0.1))
        engine.forward.error = ERRORS[error]
        engine.forward.breaks = lambda _rows, _length, at=at, engine=engine: len(engine.forward.calls) == at + 1  # type: ignore[misc]  # mypy knows no defaults of lambdas
        asked = engine.ask(words(50), 8, temperature=0.8, seed=4)
        engine.finish()
        assert asked.finished
        engine.check()
        if len(engine.forward.calls) <= at:
            break
        at += 3
    assert at >= 9


def test_a_request_that_finds_no_memory_twice_ends_alone_and_the_next_one_works() -> None:
    engine = TinyEngine("llama", SlicePolicy(16, 0.1))
    engine.forward.error = MemoryError
    first = engine.ask(words(40), 30)
    engine.until(lambda: len(first.tokens) > 3)
    broken = engine.ask(words(60, 2), 5)
    engine.forward.breaks = lambda rows, length: length > 1  # prompts: the first one has been read
    engine.finish()
    assert isinstance(broken.received[-1], Failed)
    assert broken.received[-1].text.startswith("out of memory: ")
    assert first.finished
    engine.forward.breaks = lambda rows, length: False
    after = engine.ask(words(60, 2), 5)
    engine.finish()
    assert after.finished
    engine.check()


def test_another_fault_is_not_tried_again() -> None:
    engine = TinyEngine("llama", SlicePolicy(16, 0.1))
    engine.forward.breaks = lambda rows, length: len(engine.forward.calls) == 2
    asked = engine.ask(words(50), 8)
    engine.finish()
    assert asked.failed
    assert len(engine.forward.calls) == 2


def test_unused_memory_is_freed_before_a_restart() -> None:
    dial = Dial()
    engine = make_engine(10**9, dial)
    for number in range(3):
        engine.ask(words(100, number + 2), 2)
        engine.finish()
    running = engine.ask(words(30, 9), 40)
    engine.until(lambda: len(running.tokens) > 3)
    held = engine.trie.nbytes
    engine.forward.error = MemoryError
    calls = len(engine.forward.calls)
    engine.forward.breaks = lambda rows, length: len(engine.forward.calls) == calls + 1
    engine.advance()
    assert engine.trie.nbytes < held
    assert dial.cleared == 1
    engine.finish()
    assert all(asked.finished for asked in engine.requests)
    engine.check()
