"""A prompt that was computed recently has its first token without a forward: the one that it would have anyway."""

import mlx.core as mx
import pytest

from runner.engine.first_tokens import FirstTokens
from runner.sampling import SamplingOptions
from runner.sampling.sample import Choice, SampledTokens
from scripts.tools.models.tiny import KINDS, words
from tests.lib.tiny_engine import RequestSpec, TinyEngine, oracle_answer, text_of
from tests.lib.told_drafts import OPTIONS, seen

WAYS: dict[str, dict[str, object]] = {
    **{name: OPTIONS[name] for name in ("greedy", "drawn")},
    "greedy with log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "greedy with penalties": {"repeat_penalty": 1.5, "presence_penalty": 0.3, "repeat_last_n": 16},
}


def spec(options: str = "greedy", max_tokens: int = 20, prompt: tuple[int, ...] = ()) -> RequestSpec:
    wanted = SamplingOptions(**WAYS[options])  # type: ignore[arg-type]  # names and types are the struct's own
    return RequestSpec(prompt or tuple(words(30)), max_tokens, wanted)


def taken(engine: TinyEngine) -> int:
    return engine.journal.known


PLAIN = [way for way in WAYS if "log" not in way]
LONG = tuple(words(140))
"""A prompt long enough for a checkpoint near its end, where layers need one."""


def forwards_before_text(engine: TinyEngine, asked: RequestSpec) -> int:
    """Asks, and returns how many forwards there were before the first text. Finishes the answer."""
    before = len(engine.forward.calls)
    client = engine.submit(asked)
    engine.until(lambda: bool(client.text) or client.finished is not None)
    count = len(engine.forward.calls) - before
    engine.finish()
    return count


@pytest.mark.parametrize(("name", "way"), [*((name, "drawn") for name in KINDS), *(("llama", way) for way in PLAIN)])
def test_a_repeat_has_its_first_token_at_once(name: str, way: str) -> None:
    engine = TinyEngine(name, first_tokens=True)
    counts = [forwards_before_text(engine, spec(way, prompt=LONG)) for _ in range(3)]
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
    assert taken(engine) == 2
    engine.check()
    engine.check_cache()


def test_another_seed_draws_another_token_from_the_same_logits() -> None:
    engine = TinyEngine("llama", first_tokens=True)
    asked = [spec("drawn")._replace(options=spec("drawn").options.__replace__(seed=seed)) for seed in range(9)]
    counts = [forwards_before_text(engine, each) for each in asked]
    assert counts[1:] == [0] * 8
    assert len({client.tokens[0] for client in engine.requests}) > 1
    engine.check()


@pytest.mark.parametrize("cache", ["trie", "single"])
def test_only_the_same_prompt_has_one(cache: str) -> None:
    engine = TinyEngine("llama", cache=cache, parallel=1, first_tokens=True)
    prompt = tuple(words(30))
    for other in (prompt[:-1], (*prompt, 5), (*prompt[:-1], prompt[-1] ^ 1), (9, *prompt[1:])):
        forwards_before_text(engine, spec(prompt=prompt))
        assert forwards_before_text(engine, spec(prompt=prompt)) == 0
        assert forwards_before_text(engine, spec(prompt=other)) > 0
    engine.check()


@pytest.mark.parametrize(
    "other",
    [
        spec("greedy with log-probabilities"),
        spec()._replace(grammar="start: /[0-9]{4,8}/"),
        spec(max_tokens=1),
    ],
    ids=["log-probabilities", "grammar", "one token"],
)
def test_what_needs_more_than_a_token_is_computed(other: RequestSpec) -> None:
    engine = TinyEngine("llama", first_tokens=True)
    for asked in (spec(), other, spec()):
        forwards_before_text(engine, asked)
    assert taken(engine) == 1
    engine.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_that_was_evicted_is_computed_first(name: str) -> None:
    engine = TinyEngine(name, first_tokens=True)
    forwards_before_text(engine, spec(prompt=LONG))
    engine.scheduler.cache.detach()
    assert forwards_before_text(engine, spec(prompt=LONG)) > 0
    assert taken(engine) == 0
    engine.check()


def test_an_answer_that_ends_at_once_is_computed() -> None:
    first = oracle_answer("llama", spec()).tokens[0]
    engine = TinyEngine("llama", eos=frozenset({first}), first_tokens=True)
    for _ in range(2):
        forwards_before_text(engine, spec()._replace(eos=frozenset({first})))
    assert taken(engine) == 0
    engine.check()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_first_token_that_completes_a_stop_string_is_computed(name: str) -> None:
    """The answer that it ends leaves what a computed one leaves."""
    first = oracle_answer(name, spec(prompt=LONG)).tokens[0]
    nodes = []
    for first_tokens in (False, True):
        engine = TinyEngine(name, first_tokens=first_tokens)
        forwards_before_text(engine, spec(prompt=LONG))
        for _ in range(2):
            engine.submit(spec(prompt=LONG)._replace(stop=text_of([first])))
            engine.finish()
        forwards_before_text(engine, spec(prompt=LONG))
        assert taken(engine) == int(first_tokens)
        engine.check()
        nodes.append(seen(engine).nodes)
    assert nodes[0] == nodes[1]


@pytest.mark.parametrize("name", KINDS)
def test_a_client_that_leaves_after_it_spoils_nothing(name: str) -> None:
    engine = TinyEngine(name, first_tokens=True)
    forwards_before_text(engine, spec(prompt=LONG))
    client = engine.submit(spec(prompt=LONG))
    engine.until(lambda: bool(client.text))
    client.request.cancel()
    engine.finish()
    forwards_before_text(engine, spec("drawn", prompt=LONG))
    engine.check_cache()
    assert taken(engine) == 2
    for each in engine.requests[::2]:
        each.check_answer()


@pytest.mark.parametrize("name", KINDS)
def test_answers_that_began_together_are_repeated_together(name: str) -> None:
    engine = TinyEngine(name, first_tokens=True)
    asked = [spec(prompt=tuple(words(140 + 3 * number, number))) for number in range(4)]
    for _ in range(2):
        for each in asked:
            engine.submit(each)
        engine.finish()
    assert taken(engine) == 4
    engine.check()
    engine.check_cache()


def test_the_oldest_are_forgotten_where_there_are_many() -> None:
    kept = FirstTokens(64, most_bytes=3 * 4 * 50)
    for number in range(5):
        kept.keep([number, 7], mx.arange(50, dtype=mx.float32)[None])
        kept.keep([0, 7], mx.zeros((1, 50)))
    assert kept._nbytes == 3 * 4 * 50 == sum(each.nbytes for each in kept._kept.values())
    kept.clear()
    assert (kept._nbytes, len(kept._kept)) == (0, 0)


def test_logits_of_a_forward_that_failed_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TinyEngine("llama", first_tokens=True)
    with monkeypatch.context() as patch:
        patch.setattr(SampledTokens, "read", fails)
        engine.submit(spec())
        engine.finish()
    assert engine.requests[0].failed
    kept = engine.parts.first_tokens
    assert kept is not None
    assert not kept._kept
    forwards_before_text(engine, spec())
    assert len(kept._kept) == 1
    engine.requests[1].check_answer()


def fails(_: SampledTokens) -> list[Choice]:
    raise RuntimeError("the device is gone")
