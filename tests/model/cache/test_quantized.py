"""Quantized keys and values: which layers get them, and how a model that cannot have them is found out."""

import gc
import logging
from collections.abc import Callable
from functools import cache
from typing import cast
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from runner.cache.layers import flatten
from runner.kv_bits.hadamard import BITS, HadamardKVCache
from runner.kv_bits.wing import Format, find_format, quantized
from scripts.tools.models.tiny import KINDS, LATENT, VOCAB, tiny
from tests.lib.memory import held_bytes

from mlx_lm.models import base, deepseek_v3, gpt_oss, llama  # isort: skip
from mlx_lm.models.cache import (  # isort: skip
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

PROMPT = [5, 9, 2, 60, 33, 17, 8, 41, 7, 3, 22, 50]


class Model:
    """A model of mlx-lm and the two things that are asked of it."""

    def __init__(self, module: Module) -> None:
        mx.eval(module.parameters())
        self.module = module

    def make_layers(self) -> list[object]:
        return list(make_prompt_cache(self.module))

    def forward(self, tokens: mx.array, layers: list[object]) -> mx.array:
        logits: mx.array = self.module(tokens, cache=layers)
        return logits

    def last(self, layers: list[object]) -> mx.array:
        """The logits after the prompt in two parts."""
        self.forward(mx.array([PROMPT[:7]]), layers)
        return self.forward(mx.array([PROMPT[7:]]), layers)[0, -1]

    def format(self, bits: int = 8, make_layers: Callable[[], list[object]] | None = None) -> Format:
        return find_format(make_layers or self.make_layers, self.forward, VOCAB, bits)


@cache
def a_llama(head_dim: int = 64, layers: int = 2) -> Model:
    mx.random.seed(1)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
    )
    module = llama.Model(args)
    module.set_dtype(mx.bfloat16)
    return Model(module)


@cache
def a_latent_model(rope_width: int = 32) -> Model:
    """Keys 64 wide, values (the keys' positions) 32."""
    mx.random.seed(1)
    widths = {"kv_lora_rank": 64, "qk_rope_head_dim": rope_width}
    args = deepseek_v3.ModelArgs(**{**LATENT, **widths})
    return Model(deepseek_v3.Model(args))


@cache
def a_model_with_sinks() -> Model:
    mx.random.seed(1)
    args = gpt_oss.ModelArgs(
        num_hidden_layers=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=32,
    )
    return Model(gpt_oss.Model(args))


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, dict[str, object]]]:
    return [(record.levelname, record.message, vars(record)["attributes"]) for record in caplog.records]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "runner.kv_bits.wing")


def test_only_plain_key_value_caches_are_quantized() -> None:
    class Special(KVCache):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # mlx-lm's is

    others: list[object] = [RotatingKVCache(8), ArraysCache(2), Special()]
    inner, deeper = KVCache(), KVCache()
    list_in_list = CacheList(others[1], CacheList(deeper, inner))
    layers = quantized([KVCache(), None, others[0], list_in_list, others[2], KVCache()], {0: 64, 1: 32, 3: 64}, 4)
    assert [type(layer_cache).__name__ for layer_cache in flatten(layers)] == [
        "HadamardKVCache", "RotatingKVCache", "ArraysCache", "HadamardKVCache", "KVCache", "Special",
        "HadamardKVCache",
    ]  # fmt: skip
    assert layers[1] is None
    assert layers[2] is others[0]
    assert layers[4] is others[2]
    assert layers[3] is list_in_list
    assert [(x.group_size, x.bits) for x in flatten(layers) if isinstance(x, HadamardKVCache)] == [
        (64, BITS[4]), (32, BITS[4]), (64, BITS[4]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "group"),
    [
        (a_llama(64), 64),
        (a_llama(128), 64),
        (a_llama(32), 32),
        (a_llama(96), 32),
        (a_llama(80), None),
        (a_latent_model(8), None),  # keys 64 wide, values 8
    ],
    ids=["64", "128", "32", "96", "80", "64 and 8"],
)
def test_the_group_is_64_or_32_as_the_widths_allow(
    model: Model, group: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = model.format()
    found = {getattr(layer, "group_size", None) for layer in chosen.make_layers()}
    assert (found, chosen.name) == ({group}, "kv8" if group else "")
    if group is None:
        assert "not multiples of 32" in str(lines(caplog)[0][2]["layers"])


@pytest.mark.parametrize("bits", BITS)
def test_a_number_takes_so_many_bits_and_half_a_bit_of_scales(bits: int) -> None:
    model = a_llama(64)
    plain, small = model.make_layers(), model.format(bits).make_layers()
    model.last(plain)
    model.last(small)
    before, after = (sum(layer.nbytes for layer in flatten(layers)) for layers in (plain, small))  # type: ignore[attr-defined]
    assert after * 16 == before * (bits + 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_runs_on_unquantized_where_it_must(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The heads of these are 8 wide."""
    model = tiny(kind)
    chosen = find_format(model.make_layers, lambda tokens, layers: model.model(tokens, cache=layers), VOCAB, 8)
    assert chosen == Format(model.make_layers, "")
    assert [line[:2] for line in lines(caplog)] == [("WARNING", "keys and values stay unquantized")]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (a_latent_model(), "2 KVCache: AttributeError: 'tuple' object has no attribute 'swapaxes'"),
        (a_model_with_sinks(), "1 RotatingKVCache, 1 KVCache: ValueError: Quantized SDPA does not support"),
    ],
    ids=["latent attention", "attention sinks"],
)
def test_a_model_whose_attention_knows_no_quantized_keys_says_so(
    model: Model, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert model.format() == Format(model.make_layers, "")
    ((_, message, attributes),) = lines(caplog)
    assert message == "keys and values stay unquantized"
    assert str(attributes["layers"]).startswith(said)


def test_only_the_layer_that_raises_stays_unquantized(caplog: pytest.LogCaptureFixture) -> None:
    model = a_llama(layers=4)

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        with patch.object(llama, "scaled_dot_product_attention", choosy(layers[2])):
            return model.forward(tokens, layers)

    chosen = find_format(model.make_layers, forward, VOCAB, 8)
    kinds = [type(layer).__name__ for layer in chosen.make_layers()]
    assert kinds == ["HadamardKVCache", "HadamardKVCache", "KVCache", "HadamardKVCache"]
    ((_, _, attributes),) = lines(caplog)
    assert (attributes["layers"], attributes["of"]) == (3, 4)
    assert attributes["unquantized"] == "1 KVCache: TypeError: an array is wanted"


def choosy(layer: object) -> Callable[..., mx.array]:
    """Attention that takes no quantized keys from this layer."""
    attend = base.scaled_dot_product_attention

    def choose(*arguments: object, **options: object) -> mx.array:
        if options["cache"] is layer and hasattr(layer, "bits"):
            raise TypeError("an array is wanted\nwhich this is not")
        return cast("Callable[..., mx.array]", attend)(*arguments, **options)

    return choose


def test_attention_that_goes_wrong_silently_is_found(caplog: pytest.LogCaptureFixture) -> None:
    model = a_llama()
    attend = cast("Callable[..., mx.array]", base.quantized_scaled_dot_product_attention)

    def unmasked(*arguments: object, **options: object) -> mx.array:
        return attend(*arguments, **{**options, "mask": None})

    with patch.object(base, "quantized_scaled_dot_product_attention", unmasked):
        assert [model.format(bits).name for bits in (8, 4)] == ["", ""]
    assert "the logits of a trial are off by" in str(lines(caplog)[0][2]["layers"])
    assert [model.format(bits).name for bits in (8, 4)] == ["kv8", "kv4"]


def test_four_bits_are_not_refused_for_being_few(caplog: pytest.LogCaptureFixture) -> None:
    """They may take this model's answers far, which the log says as a warning."""
    model = a_llama()

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        logits = model.forward(tokens, layers)
        return -logits if getattr(layers[0], "bits", BITS[8]) == BITS[4] else logits

    assert find_format(model.make_layers, forward, VOCAB, 4).name == "kv4"
    ((level, _, attributes),) = lines(caplog)
    assert level == "WARNING"
    assert attributes["difference"] == pytest.approx(2, abs=0.2)


def test_the_trial_leaves_no_memory_behind() -> None:
    """Not even until Python collects garbage."""
    model = a_llama()
    gc.disable()
    try:
        before = held_bytes()
        kept = [model.format(), model.format(4), a_latent_model().format()]
        assert held_bytes() == before
        assert mx.get_cache_memory() == 0
        model.last(kept[0].make_layers())
        mx.clear_cache()
        assert held_bytes() == before
    finally:
        gc.enable()
