"""What is asked of an architecture with `--all` alone: every way back, batches, packed stores, unknown layers."""

import json
from collections.abc import Mapping
from random import Random
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from runner.cache.none import NullCache
from runner.model import open_model
from runner.model.weights.load import load
from scripts.tools.models.store import PACKINGS, Quantization, Store, write_store
from scripts.tools.models.tiny import VOCAB, find_fault, words
from tests.lib.driver import ask, ask_uncached, check_equal
from tests.lib.rounds import ask_in_rounds
from tests.model.architectures.caching import NOT_DRAFTING
from tests.model.architectures.subject import Subject, oracle, run
from tests.model.architectures.talk import Talk
from tests.model.cache.test_batch_models import journey

TURNS = {
    "afm7": "the logits of a trial are off",  # counts the positions of its last layers from the length of the buffers
    "deepseek_v41": "no batch of LayerCache",
    "gemma2": "cannot be broadcast",  # soft-capped attention by hand, for which the mask lacks a dimension
    "gpt_bigcode": "only length-1 arrays",  # numpy's arange over positions
    "llama4": "no batch of ChunkedKVCache",
    "phi3small": "cannot be broadcast",  # as gemma2
}
"""The architectures whose requests take turns, and why."""

BY_SLOT = {
    # Attention to whole blocks of keys, once there are more than it may choose: they are cut over the slots of the
    # cache, padding included. No trial of a few tokens sees it, and mlx-lm means it so.
    "minimax_m3_vl",
}
"""The architectures of which a long row that is padded looks at other blocks than it does alone."""

# What the oracle itself cannot do, not the loader.
NOT_COMPARED = {
    "afm7": "its layers know affine packings only",
    "baichuan_m1": "its sanitize normalizes lm_head, before the oracle packs it",
    "prism_hadamard_qwen35": "its layers are packed from the start",
}


def a_prompt_comes_back_where_no_class_of_layers_is_known(it: Subject) -> None:
    """With the generic adapter alone."""  # scenario 46
    with patch("runner.cache.layers._ADAPTERS", {}):
        talk = Talk(it.tiny, it.root / "unknown")
        for number in (2, 3):
            prompt, answer = talk.asked[number]
            assert (answer.session.matched, answer.session.cached) == (41, 41)
            plain = ask_uncached(it.tiny, prompt, say=len(answer.tokens), chunk=talk.chunk)
            check_equal(it.tiny, answer, plain)


def goes_back_to_behind_any_token(it: Subject) -> None:
    if it.name in NOT_DRAFTING:
        return
    for length in (4, 15, 41):
        prompt = words(length, seed=4)
        plain = ask(it.tiny, NullCache(it.tiny.make_layers), prompt, say=16, chunk=16)
        for k in (1, 2, 4, 7):
            for right in range(1, k + 2):
                cache = NullCache(it.tiny.make_layers)
                answer = ask_in_rounds(it.tiny, cache, prompt, plain, [(k + 1, right)], chunk=16)
                check_equal(it.tiny, answer, plain)


def can_be_batched_or_says_why_not(it: Subject) -> None:
    said = find_fault(it.tiny.make_layers, lambda tokens, layers: it.tiny.model(tokens, cache=layers), VOCAB)
    assert TURNS.get(it.name, "").lower() in said.lower()
    assert bool(said) == (it.name in TURNS)


def says_the_same_in_a_batch(it: Subject) -> None:
    """Prompts around the ends of all windows; rows join, leave, and join again."""
    if it.name in BY_SLOT:
        with pytest.raises(AssertionError, match="logits differ"):  # once this fails, they belong below
            journey(it.tiny, Random(5), rounds=6)
    elif it.name not in TURNS:
        journey(it.tiny, Random(5), rounds=5)


def loads_from_packed_stores(it: Subject) -> None:
    """As that module of mlx-lm's with exactly these layers quantized by MLX, or unpacked where it has no such class."""
    if it.name in NOT_COMPARED:
        return
    kinds: tuple[Quantization, ...] = ("mxfp8", "nvfp4")
    for quantization in kinds:
        store = write_store(it.root, quantization, it.directory, quantization)
        module = oracle(it.directory)
        assert _quantize_as_stored(module, store) > 0
        found = run(load(open_model(quantization, it.root)).module)
        assert mx.array_equal(found, run(module))
        assert mx.isfinite(found).all()


def _quantize_as_stored(module: Module, store: Store) -> int:
    """Gives the layers of `module` the packing that the blobs of `store` declare; returns how many there are."""
    kinds = packed(store)
    leaves = dict(tree_flatten(module.leaf_modules(), is_leaf=Module.is_module))
    for name, kind in kinds.items():
        if not hasattr(leaves.get(name), "to_quantized"):
            arrays = mx.load(str(store.blob_of(f"{name}.weight")), format="safetensors")
            assert isinstance(arrays, dict)
            rows, scales = arrays[f"{name}.weight"], arrays[f"{name}.weight.scale"]
            group_size, bits, mode = PACKINGS[kind]
            dense = mx.dequantize(rows, scales, None, group_size, bits, mode=mode)
            module.load_weights([(f"{name}.weight", dense)], strict=False)

    def options(path: str, layer: Module) -> bool | dict[str, object]:
        if path not in kinds or not hasattr(layer, "to_quantized"):
            return False
        return PACKINGS[kinds[path]]._asdict()

    quantize(module, class_predicate=options)
    return len(kinds)


def packed(store: Store) -> Mapping[str, str]:
    """The `quant_type` of each packed layer of `store`, by the layer's path."""
    found = {}
    for layer in store.layers:
        name = str(layer["name"])
        if name.endswith(".weight") and f"{name}.scale" in store.tensors(name):
            raw = store.blob_of(name).read_bytes()
            header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            found[name.removesuffix(".weight")] = header["__metadata__"]["quant_type"]
    return found
