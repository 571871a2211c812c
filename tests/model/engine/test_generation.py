"""A generation computes the same as a plain loop, slice by slice, whatever is in the cache."""

import json
from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import pytest

from protocol import DoneReason, Metrics
from runner.cache import make_cache
from runner.cache.interface import Cache
from runner.engine.events import Text
from runner.engine.output.stop_strings import StopStrings
from runner.engine.request import Request
from runner.sampling import SamplingOptions
from runner.sampling.sample import Sample
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tiny import KINDS, VOCAB, Forward, Tiny, tiny
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.lib.breaking import breaking
from tests.lib.single_request import SingleRequest

PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(50)]


def tokenizer(eos: Sequence[int] = ()) -> Tokenizer:
    """Returns a tokenizer whose token i is byte i + 1, so that every generated token is one ASCII character."""
    files = {
        "tokenizer.json": json.dumps(byte_level(ALL_BYTES[1 : VOCAB + 1])).encode(),
        "generation_config.json": json.dumps({"eos_token_id": list(eos)}).encode(),
    }
    return open_tokenizer(files.get)


@pytest.fixture
async def request_of() -> Callable[..., Request]:
    def make(
        prompt: Sequence[int] = PROMPT,
        max_tokens: int = 12,
        stop: Sequence[str] = (),
        metered: bool = False,
        **sampling: float,
    ) -> Request:
        options = SamplingOptions(**sampling)  # type: ignore[arg-type]  # names and types are the struct's own
        stops = StopStrings(stop) if stop else None
        return Request(prompt=list(prompt), max_tokens=max_tokens, sampling=options, stops=stops, metered=metered)

    return make


def greedy(kind: Tiny, prompt: Sequence[int], count: int) -> list[int]:
    """Computes the expected answer: no cache reuse, no chunks, no look-ahead."""
    layers = kind.make_layers()
    logits = kind.model(mx.array([list(prompt)]), cache=layers)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(cast("int", mx.argmax(logits[0, -1]).item()))
        logits = kind.model(mx.array([[tokens[-1]]]), cache=layers)
    return tokens


class Watched:
    """A forward that records the length of each call, and fails at a given one."""

    def __init__(self, model: Forward, fail_at: int | None = None) -> None:
        self.lengths: list[int] = []
        self._model = model
        self._fail_at = fail_at

    def __call__(self, tokens: mx.array, layers: list[object]) -> mx.array:
        self.lengths.append(tokens.shape[1])
        if len(self.lengths) == self._fail_at:
            raise RuntimeError("this forward fails")
        return self._model(tokens, cache=layers)


class Counted:
    """An evaluation of MLX that records the number of arrays in each call."""

    def __init__(self, evaluate: Callable[[list[mx.array]], None]) -> None:
        self.sizes: list[int] = []
        self._evaluate = evaluate

    def __call__(self, arrays: list[mx.array]) -> None:
        self.sizes.append(len(arrays))
        self._evaluate(arrays)


def generation(
    kind: Tiny,
    request: Request,
    cache: Cache | None = None,
    forward: Watched | None = None,
    chunk: int = 2048,
    eos: Sequence[int] = (),
) -> SingleRequest:
    return SingleRequest(
        request,
        forward or Watched(kind.model),
        cache or make_cache("none", kind.make_layers),
        tokenizer(eos),
        chunk,
    )


def text(tokens: Sequence[int]) -> str:
    return bytes(token + 1 for token in tokens).decode()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 2048])
async def test_every_kind_of_model_answers_as_a_plain_loop(
    name: str, chunk: int, request_of: Callable[..., Request]
) -> None:
    kind = tiny(name)
    cache = make_cache("single", kind.make_layers)
    expected = greedy(kind, PROMPT, 12)
    assert generation(kind, request_of(), cache, chunk=chunk).answer()[0] == text(expected)
    longer = [*PROMPT, *expected, 5, 6, 7]
    follow_up = generation(kind, request_of(longer), cache, chunk=chunk)
    assert follow_up.answer()[0] == text(greedy(kind, longer, 12))
    assert follow_up.generation.metrics().prompt_eval_cached_count >= len(PROMPT) + 11


async def test_prefill_goes_in_chunks_and_keeps_one_token_for_decode(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    forward = Watched(kind.model)
    generation(kind, request_of(max_tokens=3), forward=forward, chunk=20).answer()
    assert forward.lengths == [20, 20, 9, 1, 1, 1]


async def test_the_last_token_wanted_is_not_fed_back(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    forward = Watched(kind.model)
    _, end = generation(kind, request_of(max_tokens=1), forward=forward).answer()
    assert forward.lengths == [49, 1]
    assert (end.reason, end.metrics.eval_count) == (DoneReason.LENGTH, 1)


async def test_the_next_forward_is_dispatched_before_a_token_is_read(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    forward = Watched(kind.model)
    running = generation(kind, request_of(max_tokens=5), forward=forward)
    seen = [len(forward.lengths) for events in running.slices() if any(isinstance(e, Text) for e in events)]
    # Prefill and the first decode step are two forwards, and the first token is told at once; then each is told when
    # the forward after it has been dispatched, and the last after none.
    assert seen == [2, 4, 5, 6, 6]


async def test_every_step_is_started_before_it_is_read_and_every_chunk_is_computed(
    request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = tiny("llama")
    cache = make_cache("single", kind.make_layers)
    started = Counted(mx.async_eval)
    computed = Counted(mx.eval)
    monkeypatch.setattr(mx, "async_eval", started)
    monkeypatch.setattr(mx, "eval", computed)
    running = generation(kind, request_of(max_tokens=5), cache, chunk=20)
    assert [len(started.sizes) for _ in running.slices()] == [0, 0, 0, 1, 3, 4, 5, 5]
    assert computed.sizes == [
        4,
        4,
        4,
    ]  # keys and values of two layers after each chunk; decode never waits for the cache


async def test_buffers_that_the_layers_outgrew_are_given_back_while_a_long_answer_runs(
    request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = tiny("llama")
    clears = 0

    def clear() -> None:
        nonlocal clears
        clears += 1

    monkeypatch.setattr(mx, "clear_cache", clear)
    generation(kind, request_of([1], max_tokens=600)).answer()
    assert clears == 2


async def test_a_slice_is_one_chunk_or_one_token(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    running = generation(kind, request_of(max_tokens=4), chunk=20)
    phases = [(running.prefilling, len(events)) for events in running.slices()]
    assert phases == [(True, 0)] * 3 + [(False, 1)] * 3 + [(False, 2)]


async def test_the_end_of_sequence_token_is_neither_sent_nor_counted(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    expected = greedy(kind, PROMPT, 12)
    end_at = next(i for i in range(4, 12) if expected[i] not in expected[:i])
    told, end = generation(kind, request_of(), eos=[expected[end_at]]).answer()
    assert told == text(expected[:end_at])
    assert (end.reason, end.metrics.eval_count) == (DoneReason.STOP, end_at)


async def test_an_end_of_sequence_token_beyond_the_limit_is_never_looked_at(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    expected = greedy(kind, PROMPT, 12)
    end_at = next(i for i in range(4, 12) if expected[i] not in expected[:i])
    _, end = generation(kind, request_of(max_tokens=end_at), eos=[expected[end_at]]).answer()
    assert (end.reason, end.metrics.eval_count) == (DoneReason.LENGTH, end_at)


async def test_a_stop_string_ends_the_answer_before_it_and_the_cache_keeps_what_was_computed(
    request_of: Callable[..., Request],
) -> None:
    kind = tiny("llama")
    cache = make_cache("single", kind.make_layers)
    expected = greedy(kind, PROMPT, 12)
    whole = text(expected)
    stop = whole[4:7]
    told, end = generation(kind, request_of(stop=[stop]), cache).answer()
    assert told == whole[: whole.index(stop)]
    assert (end.reason, end.metrics.eval_count) == (DoneReason.STOP, whole.index(stop) + len(stop))
    again = generation(kind, request_of([*PROMPT, *expected[:6], 1]), cache)
    again.generation.close()
    assert again.generation.metrics().prompt_eval_cached_count == len(PROMPT) + 6


async def test_counters_tell_the_whole_prompt_and_its_cached_part(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    cache = make_cache("single", kind.make_layers)
    for cached in (0, len(PROMPT) - 1):
        _, end = generation(kind, request_of(), cache).answer()
        assert end.metrics.prompt_eval_count == len(PROMPT)
        assert end.metrics.prompt_eval_cached_count == cached
        assert end.metrics.prompt_eval_duration > 0
        assert end.metrics.eval_duration > 0


async def test_metered_lines_count_up_and_others_carry_nothing(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    for metered, expected in ((True, [1, 2, 3, 4]), (False, [None] * 4)):
        told = [e for events in generation(kind, request_of(max_tokens=4, metered=metered)).slices() for e in events]
        counts = [event.metrics and event.metrics.eval_count for event in told if isinstance(event, Text)]
        assert counts == expected


async def test_logprobs_are_those_of_the_raw_logits(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    request = request_of(max_tokens=3, logprobs=True, top_logprobs=2, repeat_penalty=1.5, repeat_last_n=8)
    told = [e for events in generation(kind, request).slices() for e in events if isinstance(e, Text)]
    logits = kind.model(mx.array([PROMPT]), cache=kind.make_layers())[0, -1]
    raw = logits - mx.logsumexp(logits)
    best = cast("list[int]", mx.argsort(-raw)[:2].tolist())
    entry = told[0].logprobs[0]
    assert [top.token for top in entry.top_logprobs] == [chr(token + 1) for token in best]
    assert [top.logprob for top in entry.top_logprobs] == pytest.approx([raw[token].item() for token in best], abs=1e-5)
    assert entry.logprob == pytest.approx(raw[ord(entry.token) - 1].item(), abs=1e-5)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fail_at", [1, 2, 3, 6])
async def test_after_a_fault_in_any_forward_the_next_answer_is_right(
    name: str, fail_at: int, request_of: Callable[..., Request]
) -> None:
    kind = tiny(name)
    cache = make_cache("single", kind.make_layers)
    failing = generation(kind, request_of(), cache, Watched(kind.model, fail_at), chunk=30)
    with pytest.raises(RuntimeError, match="this forward fails"):
        failing.answer()
    assert generation(kind, request_of(), cache).answer()[0] == text(greedy(kind, PROMPT, 12))


async def test_a_fault_outside_of_forwards_leaves_nothing_in_the_cache(request_of: Callable[..., Request]) -> None:
    """The fault may be that of a computation that MLX had put off, so the layers are not trusted."""
    kind = tiny("llama")
    cache = make_cache("single", kind.make_layers)
    failing = generation(kind, request_of(), cache, chunk=30)
    with breaking(Sample, "read", 2), pytest.raises(MemoryError):
        failing.answer()
    failing.generation.close()
    again = generation(kind, request_of(), cache)
    assert again.generation.metrics().prompt_eval_cached_count == 0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
async def test_after_a_cancel_in_any_phase_the_work_is_kept_and_the_next_answer_is_right(
    name: str, stop_after: int, request_of: Callable[..., Request]
) -> None:
    kind = tiny(name)
    cache = make_cache("single", kind.make_layers)
    cancelled = generation(kind, request_of(), cache, chunk=20)
    for _ in range(stop_after):
        cancelled.advance()
    cancelled.generation.close()
    retry = generation(kind, request_of([*PROMPT, 9]), cache, chunk=20)
    if stop_after <= 3:
        assert retry.generation.metrics().prompt_eval_cached_count == min(20 * stop_after, len(PROMPT) - 1)
    assert retry.answer()[0] == text(greedy(kind, [*PROMPT, 9], 12))


async def test_closing_twice_is_a_no_op(request_of: Callable[..., Request]) -> None:
    kind = tiny("llama")
    running = generation(kind, request_of())
    running.advance()
    running.generation.close()
    ended: Metrics = running.generation.metrics()
    running.generation.close()
    assert running.generation.metrics() == ended
