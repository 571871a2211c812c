"""The scores of candidates, over the real scheduler: those of a plain forward, whatever else is computed."""

from functools import partial

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.switch_layers import SwitchLinear

from protocol.stats import ScoreCounts
from runner.cache import make_cache
from runner.engine.events import Scored
from runner.engine.policy import Slice, SlicePolicy
from runner.engine.request import Request
from runner.model.weights.dtype import in_float32
from runner.model.weights.loading import LoadedModel
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS, VOCAB, tiny, words
from tests.lib.driver import facts_of
from tests.lib.seeing import fresh
from tests.lib.seeing_engine import NotingPolicy
from tests.lib.tiny_engine import (
    ClientRequest,
    Clock,
    EngineClient,
    RequestSpec,
    SlicedEngine,
    TinyEngine,
    core_parts,
    plain_forward,
    tokenizer,
)
from tests.model.numbers.test_counts import stats

CANDIDATES = (5, 0, VOCAB - 1)


def expected(name: str, prompt: list[int]) -> list[float]:
    kind = tiny(name)
    logits = plain_forward(kind)(mx.array([prompt]), kind.make_layers())[0, -1].astype(mx.float32)
    log_probs = logits - mx.logsumexp(logits)
    return [log_probs[each].item() for each in CANDIDATES]  # type: ignore[misc]  # floats


def ask(engine: TinyEngine, prompt: list[int]) -> ClientRequest:
    options = SamplingOptions(candidates=CANDIDATES)
    return engine.submit(RequestSpec(tuple(prompt), 1, options))


def scores(asked: EngineClient) -> list[float]:
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
    (counts, cached) = (stats(engine).scores, sum(row.cached for row in rows))
    assert counts == ScoreCounts(rows=8, tokens=sum(map(len, prompts)), cached=cached)
    if cache == "trie":
        assert engine.forward.tokens == 30 + 19 + sum(map(len, prompts)) - cached
        assert all(row.cached >= 69 for row in (*rows[1:6], rows[7])), "what rows share is computed once"
    engine.check_cache()
    again = ask(engine, prompts[-1])
    engine.finish()
    assert scores(again) == pytest.approx(scores(rows[-1]), abs=2e-4)
    assert cache == "single" or again.cached >= 70


def slices_of(options: SamplingOptions) -> list[Slice]:
    """The slices that three prompts take beside two answers."""
    policy = NotingPolicy(16, 0.05)
    engine = TinyEngine("llama", policy)
    answers = [engine.ask(words(30, seed), max_tokens=60) for seed in (9, 10)]
    engine.until(lambda: all(len(answer.tokens) > 2 for answer in answers))
    policy.slices.clear()
    rows = [engine.submit(RequestSpec(tuple(words(200, seed)), 1, options)) for seed in (4, 5, 6)]
    engine.until(lambda: all(row.finished for row in rows))
    return policy.slices


def test_rows_take_turns_with_answers_as_prompts_of_one_token_do() -> None:
    found = slices_of(SamplingOptions(candidates=CANDIDATES))
    assert found == slices_of(SamplingOptions())
    kinds = "".join(type(each).__name__[0] for each in found)
    assert kinds.count("P") > 30
    assert "PPP" not in kinds


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_row_whose_client_has_left_computes_no_further_chunk(chunks: int) -> None:
    engine = TinyEngine("llama", SlicePolicy(16, 0.1))
    row = ask(engine, words(200))
    engine.until(lambda: engine.forward.tokens >= 16 * chunks)
    row.request.cancel()
    engine.finish()
    assert engine.forward.tokens == 16 * chunks
    engine.check_cache()


def bfloat16(name: str, quantized: str = "experts") -> Module:
    """A model whose layers of one kind are quantized: on CPUs MLX multiplies no experts of bfloat16."""
    module = fresh(name)
    module.set_dtype(mx.bfloat16)
    kinds = {"experts": SwitchLinear, "linear": Linear}
    quantize(module, 32, 8, class_predicate=lambda path, layer: type(layer) is kinds[quantized])
    return module


def tied(module: Module) -> Module:
    """The same model, whose head is its table of embeddings."""
    text = module.language_model
    del text.lm_head
    text.args.tie_word_embeddings = True
    return module


def scored(module: Module, prompt: list[int]) -> mx.array:
    """The scores of the last row of two, beside an answer, by an engine that knows of heads in float32."""
    loaded = LoadedModel(module)
    parts = core_parts(loaded.logits, tokenizer(), partial(make_cache, "trie", facts_of(loaded), budget_bytes=None))
    parts.scoring = partial(in_float32, module)
    engine = SlicedEngine(parts, SlicePolicy(2048, 0.1), 8, Clock())
    asked = [EngineClient() for _ in range(3)]
    for number, each in enumerate(asked):
        candidates = CANDIDATES if number else ()
        sampling = SamplingOptions(candidates=candidates)
        each.request = Request(
            prompt=prompt[number:], max_tokens=9, sampling=sampling, stops=None, metered=False, stream=each
        )
        engine.scheduler.add(each.request)
    engine.finish()
    return mx.array(scores(asked[2]))


def distance(one: mx.array, other: mx.array) -> float:
    """Of two rows of scores, to each of which any number may be added."""
    apart = one - other
    return float(mx.abs(apart - apart[0]).max())


@pytest.mark.parametrize("name", ["qwen3.5-seeing", "qwen3.5-moe-seeing"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied"])
def test_qwen_multiplies_its_head_in_float32(name: str, is_tied: bool) -> None:
    module = bfloat16(name)
    text = tied(module).language_model if is_tied else module.language_model
    prompt = words(40)
    hidden = text.model(mx.array([prompt[2:]]), LoadedModel(module).make_layers())[0, -1]
    weight = text.model.embed_tokens.weight if is_tied else text.lm_head.weight
    assert (hidden.dtype, weight.dtype) == (mx.bfloat16, mx.bfloat16)
    rows, usual = weight[mx.array(CANDIDATES)].astype(mx.float32), (hidden @ weight.T).astype(mx.float32)
    found = scored(module, prompt)
    assert distance(found, rows @ hidden.astype(mx.float32)) < 1e-5
    assert distance(found, usual[mx.array(CANDIDATES)]) > 1e-4
    assert type(text.get("lm_head", text.model.embed_tokens)) in (Linear, Embedding), "as it was"


@pytest.mark.parametrize(
    ("name", "quantized"),
    [("qwen3.5-seeing", "linear"), ("qwen3-next-seeing", "experts"), ("gemma4-seeing", "experts")],
)
def test_other_heads_give_their_usual_logits(name: str, quantized: str) -> None:
    module, prompt = bfloat16(name, quantized), words(40)
    usual = LoadedModel(module).logits(mx.array([prompt[2:]]), LoadedModel(module).make_layers())[0, -1]
    assert distance(scored(module, prompt), usual.astype(mx.float32)[mx.array(CANDIDATES)]) < 1e-5
