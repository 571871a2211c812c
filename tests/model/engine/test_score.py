"""The scores of candidates, over the real scheduler: those of a plain forward, whatever else is computed."""

import mlx.core as mx
import pytest

from runner.engine.events import Scored
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.tiny_engine import ClientRequest, RequestSpec, TinyEngine, plain_forward

CANDIDATES = (5, 0, VOCAB - 1)
KINDS = ("llama", "gemma3", "mamba2", "qwen3_next", "quantized", "llama4", "deepseek_v3")


def expected(name: str, prompt: list[int]) -> list[float]:
    kind = tiny(name)
    logits = plain_forward(kind)(mx.array([prompt]), kind.make_layers())[0, -1].astype(mx.float32)
    log_probs = logits - mx.logsumexp(logits)
    return [log_probs[each].item() for each in CANDIDATES]  # type: ignore[misc]  # floats


def ask(engine: TinyEngine, prompt: list[int]) -> ClientRequest:
    options = SamplingOptions(candidates=CANDIDATES)
    return engine.submit(RequestSpec(tuple(prompt), 1, options))


def scores(asked: ClientRequest) -> list[float]:
    (scored,) = [event for event in asked.received if isinstance(event, Scored)]
    finished = asked.finished
    assert finished is not None
    assert finished.metrics.eval_count == 0
    return scored.logprobs


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cache", ["trie", "single"])
def test_rows_beside_an_answer_are_those_of_a_plain_forward(name: str, cache: str) -> None:
    engine = TinyEngine(name, cache=cache)
    answer = engine.ask(words(30, 9), max_tokens=20)
    engine.until(lambda: len(answer.tokens) > 2)
    common = words(70)
    prompts = [common + words(9, seed) for seed in range(5)] + [common, common[:1], common + words(9, 2)]
    rows = [ask(engine, prompt) for prompt in prompts]
    engine.finish()
    for prompt, row in zip(prompts, rows, strict=True):
        assert scores(row) == pytest.approx(expected(name, prompt), abs=2e-4)
    if cache == "trie":
        assert engine.forward.tokens == 30 + 19 + 70 + 6 * 9 + 6, "what rows share is computed once"
    engine.check_cache()
    again = ask(engine, prompts[-1])
    engine.finish()
    assert scores(again) == pytest.approx(scores(rows[-1]), abs=2e-4)
    assert cache == "single" or again.cached >= 70
