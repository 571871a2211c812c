"""What is asked of an architecture before it serves: that it loads, as what, and what it refuses."""

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from runner.errors import ModelError
from runner.model import OpenedModel, open_model
from runner.model.architectures import Config
from runner.model.module_config import EMBEDDINGS, HEAD
from runner.model.weights.assembly import build_module, rehearse
from runner.model.weights.loading import load
from runner.model.weights.parameters import parameters_of
from scripts.tools.models.store import write_store
from tests.model.architectures.subject import HEAD_IS_CHANGED, Subject, halved, run

_COARSE = {"afm7": 0.4}
"""Tolerances of architectures that lose more in 16 bits, relative to the norm of logits: twice the worst seen."""
PACKED_HEADS = ("llama", "gemma2", "glm4", "phi3")
"""Of the ways in which a module ties, one each: by a flag of the module, always, never, and by a flag it forgets."""
TIED_OTHERWISE = {
    "baichuan_m1": "mlx-lm's forward wants a head that its module then lacks",
    "prism_hadamard_qwen35": "its weights are packed from the first",
    "qwen3_vl_moe": "mlx-lm's sanitize wants a head",
    "talkie": "its head is no module",
}
"""No such model is tied."""
_LAYER = re.compile(r"(.*?(?:layers|h|blocks)\.)(\d+)\.")
Field: TypeAlias = tuple[Config, str]
Outcome: TypeAlias = tuple[OpenedModel | None, str]
_NAMES = ("text_config", "llm_config", "model_type", "architectures")


def loads_from_a_directory(it: Subject) -> None:
    """Bit for bit what mlx-lm computes from it."""
    found = run(load(it.opened).module)
    assert mx.array_equal(found, it.expected)
    assert mx.isfinite(found).all()


def loads_from_a_store_of_16_bits(it: Subject) -> None:
    """In float32 bit for bit what the same numbers give from the directory; near that in 16 bits, where it can.

    Layers of unpacked experts cannot: MLX's CPU backend has them in float32 only.
    """
    if it.name == HEAD_IS_CHANGED:
        it.store(it.directory)
        assert mx.array_equal(run(load(open_model("m", it.root)).module), it.expected)
        return
    it.store(it.write("16 bits", {name: halved(array) for name, array in it.weights.items()}))
    opened = open_model("m", it.root)
    converted = load(opened, "float32").module
    assert {array.dtype for _, array in _floats(converted.parameters())} == {mx.float32}
    assert mx.array_equal(run(converted), it.expected)
    kept = load(opened, "keep").module
    assert mx.bfloat16 in {array.dtype for _, array in _floats(kept.parameters())}
    try:
        coarse = run(kept).astype(mx.float32)
    except RuntimeError as error:
        assert "GatherMM" in str(error)  # noqa: PT017  # only some raise
        return
    fine = it.expected.astype(mx.float32)
    assert mx.linalg.norm(coarse - fine) < _COARSE.get(it.name, 0.2) * mx.linalg.norm(fine)


def _floats(parameters: object) -> Iterator[tuple[str, mx.array]]:
    for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(parameters)):
        if mx.issubdtype(array.dtype, mx.floating):
            yield name, array


def reads_no_head_of_a_tied_model(it: Subject) -> None:
    """The embedding is the head, whatever else the files hold; packed in a store, too."""
    if it.name in TIED_OTHERWISE:
        return
    embedding = next(name for name in it.weights if name.endswith(EMBEDDINGS))
    usual = "language_model.lm_head.weight" if "language_model" in embedding else "lm_head.weight"
    head = next((name for name in it.weights if HEAD.fullmatch(name)), usual)
    directory = it.write("tied", {**it.weights, head: it.weights[embedding][::-1]})
    value = json.loads((directory / "config.json").read_text())
    for part in (value, *(value[key] for key in _NAMES[:2] if key in value)):
        part["tie_word_embeddings"] = True
    (directory / "config.json").write_text(json.dumps(value))
    models = [str(directory)]
    if it.name in PACKED_HEADS:
        write_store(it.root, "tied", directory, "int8")
        models.append("tied")
    for model in models:
        opened = open_model(model, it.root)
        assert head not in opened.tensors
        module = load(opened).module
        found = parameters_of(module)
        for name in filter(HEAD.fullmatch, found):
            assert mx.array_equal(found[name], found[f"{embedding.removesuffix('weight')}{name.rpartition('.')[2]}"])
        assert mx.isfinite(run(module)).all()


def refuses_a_layer_after_the_last_by_its_name(it: Subject) -> None:
    """From a directory and from a store; most of mlx-lm's modules would ignore it."""
    places = {match[1]: int(match[2]) for match in map(_LAYER.match, it.weights) if match}
    prefix = max(places, key=lambda prefix: (places[prefix], prefix))
    last = max(int(match[2]) for match in map(_LAYER.match, it.weights) if match and match[1] == prefix)
    stray = {
        key.replace(f"{prefix}{last}.", f"{prefix}{last + 1}.", 1): array
        for key, array in it.weights.items()
        if key.startswith(f"{prefix}{last}.")
    }
    assert stray
    directory = it.write("stray", {**it.weights, **stray})
    it.store(directory)
    for model in (str(directory), "m"):
        with pytest.raises(ModelError, match=re.escape(f"{prefix}{last + 1}")):
            rehearse(open_model(model, it.root))


def reads_a_null_as_a_missing_field(it: Subject) -> None:
    directory = it.write("nulls", it.weights)
    check_nulls(directory, json.loads((directory / "config.json").read_text()))


def check_nulls(directory: Path, value: Config) -> None:
    """Each null is read as a missing field, or is a value to the module; a missing field is named."""
    demanded = _demanded(open_model(str(directory), directory).family.module)
    optional = [(part, key) for part, key in _fields(value) if key not in demanded]
    if not _are_alike(directory, value, optional):
        for field in optional:
            _check_null(directory, value, field, demanded)
    for field in _fields(value):
        if field[1] in demanded:
            _check_null(directory, value, field, demanded)


def _are_alike(directory: Path, value: Config, fields: Sequence[Field]) -> bool:
    """True if these fields may all be missing, and all be null instead."""
    (without, _), (with_null, _) = _outcomes(directory, value, fields)
    return without is not None and with_null is not None and with_null.module_config == without.module_config


def _check_null(directory: Path, value: Config, field: Field, demanded: frozenset[str]) -> None:
    (without, said), (with_null, also_said) = _outcomes(directory, value, [field])
    key = field[1]
    assert said == also_said, key
    if without is None or with_null is None:
        assert key in said or key == "rope_parameters", said  # of that, a field is named
    elif with_null.module_config != without.module_config:
        module, _ = build_module(with_null)
        mx.eval(module(mx.array([[1, 2, 3]])))
    elif key in demanded:
        why = _refusal(without)
        assert not why or re.search(rf"\b{key}\b", why), why


def _fields(value: Config) -> list[Field]:
    """Every field of the text model, with the object that contains it."""
    text = value.get("text_config", value.get("llm_config"))
    parts = (value, text) if isinstance(text, dict) else (value,)
    return [(cast("Config", part), key) for part in parts for key in part if key not in _NAMES]


def _outcomes(directory: Path, value: Config, fields: Sequence[Field]) -> tuple[Outcome, Outcome]:
    """What comes of the config without these fields, and with null in them."""
    kept = [part.pop(key) for part, key in fields]
    without = _outcome(directory, value)
    for part, key in fields:
        part[key] = None
    with_null = _outcome(directory, value)
    for (part, key), was in zip(fields, kept, strict=True):
        part[key] = was
    return without, with_null


def _outcome(directory: Path, value: Config) -> Outcome:
    """Returns the model opened with that config, or the error."""
    (directory / "config.json").write_text(json.dumps(value))
    try:
        return open_model(str(directory), directory), ""
    except ModelError as error:
        return None, str(error)


@cache
def _demanded(name: str) -> frozenset[str]:
    """The fields of an architecture's own classes that have no default."""
    classes = [
        item for item in vars(importlib.import_module(f"mlx_lm.models.{name}")).values() if isinstance(item, type)
    ]
    return frozenset(
        field.name
        for cls in classes
        if dataclasses.is_dataclass(cls)
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def _refusal(opened: OpenedModel) -> str:
    """Returns the fields that mlx-lm's classes miss; nothing if they accept the config."""
    try:
        build_module(opened)
    except ModelError as error:
        return str(error)
    return ""
