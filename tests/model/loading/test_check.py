"""`mlx-runner check` predicts the result of serving, and reports all faults at once."""

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest

from runner.commands.check.examination import Amount
from runner.commands.check.inspection import ContextLimit, Inspection, LayerKind
from scripts.tools.models.checkpoints import CHUNK, GEMMA_WINDOW, VOCABULARY_SIZE, Kind
from scripts.tools.models.store import TENSOR, Store, write_store
from scripts.tools.models.tensors import Quantization, parse_metadata
from tests.model.loading.conftest import Checkpoints, checked
from tests.model.loading.malformed import (
    CASES,
    WEIGHT,
    cut,
    with_config,
    with_layer,
    with_packed,
    with_text,
    without_blob,
    zeros,
)

OTHER = "model.layers.1.mlp.up_proj.weight"


def check_store(store: Store, context: int | None = None) -> Inspection:
    return checked("tiny", store.models_dir, context_tokens=context)


def test_a_model_that_is_not_there_is_said_so_with_those_that_are(store: Store) -> None:
    for other in ("registry.ollama.ai/me/mine/q4", "registry.ollama.ai/library/other/1b", "hf.co/a/b/latest"):
        path = store.models_dir / "manifests" / other
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    CASES["manifest missing"].spoil(store)
    (problem,) = check_store(store).problems
    there = "it holds hf.co/a/b:latest, other:1b, me/mine:q4. `ollama pull tiny:latest` fetches it"
    assert problem.startswith(f"there is no model tiny:latest in {store.models_dir}: {there}")
    assert "read manifest" not in problem


def test_nothing_is_read_and_nothing_computed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load", "eval", "async_eval"):
        monkeypatch.setattr(mx, name, lambda *_, name=name, **__: pytest.fail(f"mx.{name}"))
    assert check_store(store).loads


@pytest.mark.parametrize(
    ("kind", "caches"),
    [
        (
            "gemma3_text",
            [
                LayerKind(f"sliding window {GEMMA_WINDOW}", "RotatingKVCache", 2),
                LayerKind("full attention", "KVCache", 2),
            ],
        ),
        ("falcon_h1", [LayerKind("recurrent state", "ArraysCache", 2), LayerKind("full attention", "KVCache", 2)]),
        (
            "llama4",
            [LayerKind(f"chunked attention {CHUNK}", "ChunkedKVCache", 3), LayerKind("full attention", "KVCache", 1)],
        ),
        ("deepseek_v41", [LayerKind("state of its own", "LayerCache", 3)]),
    ],
)
def test_caches_are_told_as_the_prefix_cache_takes_them(
    kind: Kind, caches: list[LayerKind], checkpoint: Checkpoints
) -> None:
    assert checked(checkpoint(kind)).caches == caches


@pytest.mark.parametrize("quantization", ["int4", "nvfp4"])
def test_packings_are_told_with_what_they_take(
    quantization: Quantization, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Against a sum over the blobs, by the types that Ollama wrote into them."""
    store = write_store(tmp_path, "tiny", checkpoint("llama"), quantization)
    wanted: dict[str, tuple[int, int]] = {}
    for layer in store.layers:
        if layer["mediaType"] == TENSOR:
            name = str(layer["name"])
            kind = parse_metadata(store.blob_of(name).read_bytes()).get("quant_type", "f32")
            kind = f"{kind} g64" if kind in ("int4", "int8") else kind
            tensors, size = wanted.get(kind, (0, 0))
            wanted[kind] = (tensors + 1, size + sum(len(tensor.data) for tensor in store.tensors(name).values()))
    found = checked("tiny", store.models_dir, dtype="keep")
    assert found.weights is not None
    assert {amount.name: (amount.tensors, amount.bytes) for amount in found.weights} == wanted
    assert quantization in wanted or f"{quantization} g64" in wanted
    assert found.read_bytes == sum(size for _, size in wanted.values())
    assert found.parameters == checked(checkpoint("llama")).parameters


def test_what_text_does_not_need_is_counted_by_what_it_is(checkpoint: Checkpoints, tmp_path: Path) -> None:
    store = write_store(tmp_path, "tiny", checkpoint("gemma3"))
    before = check_store(store)
    store.put_tensors("v1", {"vision_tower.patch_embed.weight": zeros("F32", 8, 8)})
    store.put_tensors("v2", {"multi_modal_projector.norm.weight": zeros("F32", 8)})
    store.put_tensors("a", {"model.audio_tower.conv.weight": zeros("F16", 8)})
    store.put_tensors("m", {"mtp.norm.weight": zeros("F32", 4)})
    store.put("draft.model.norm.weight", b"never opened", TENSOR)
    found = check_store(store)
    assert (found.loads, found.read_bytes, found.files) == (True, before.read_bytes, before.files)
    assert found.skipped == [
        Amount("vision", 2, 288),
        Amount("audio", 1, 16),
        Amount("mtp", 1, 16),
        Amount("draft", 1, 12),
    ]
    assert found.warnings == []


def test_several_faults_are_all_told_and_nothing_that_follows_from_them(store: Store) -> None:
    """The last two blobs of a layer are unreadable, so all of it is lost; its number is no fault of config.json."""
    for layer in list(store.layers):
        name = str(layer.get("name"))
        if name.startswith("model.layers.1.") and name not in (OTHER, "model.layers.1.input_layernorm.weight"):
            store.drop(name)
    for spoil in (
        without_blob(OTHER),
        cut("model.layers.1.input_layernorm.weight"),
        with_layer("lm_head.weight", digest="sha256:..", size=0),
        with_packed(bias=None),
        with_text("tokenizer.json", b"{"),
    ):
        spoil(store)
    problems = check_store(store).problems
    wanted = (
        r"parse manifest: .*: invalid digest 'sha256:\.\.' of layer 'lm_head\.weight'",
        r"layer model\.layers\.1\.input_layernorm\.weight: .*: size mismatch: .*",
        rf"layer {OTHER}: open .*: no such file or directory; .*",
        rf".*: tensor {WEIGHT}: want quantization biases .*, found none",
        r"parse tokenizer: tokenizer\.json: .*",
    )
    for line in wanted:
        assert sum(re.fullmatch(line, problem) is not None for problem in problems) == 1, problems
    assert not any("config.json" in problem for problem in problems)


def test_the_context_is_the_models_own_unless_a_shorter_one_is_asked_for(store: Store) -> None:
    assert check_store(store, 512).context == ContextLimit(512, "--context")
    assert check_store(store, 512).warnings == []
    found = check_store(store, 8192)
    assert found.context == ContextLimit(4096, "model")
    assert found.warnings == ["--context 8192 exceeds the model's own length: 4096 tokens apply"]


def test_a_model_without_a_length_gets_the_documented_one(store: Store) -> None:
    with_config(max_position_embeddings=None)(store)
    found = check_store(store)
    assert (found.loads, found.context) == (True, ContextLimit(32768, "default"))
    assert found.warnings == ["config.json states no context length: 32768 tokens are assumed; --context sets another"]
    found = check_store(store, 131072)
    assert (found.context, found.warnings) == (ContextLimit(131072, "--context"), [])


def test_a_tokenizer_with_more_tokens_than_rows_is_a_warning(store: Store) -> None:
    tokenizer = json.loads(store.blob_of("tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": VOCABULARY_SIZE, "content": "<|picture|>"})
    store.put_json("tokenizer.json", tokenizer)
    found = check_store(store)
    assert found.loads
    assert found.warnings == [
        f"the tokenizer has {VOCABULARY_SIZE + 1} tokens, but the model has rows for {VOCABULARY_SIZE}: prompts with"
        " others are refused"
    ]


def test_names_out_of_files_cannot_command_a_terminal(store: Store) -> None:
    store.put_tensors("x", {"model.\x1b[31m\u202e\ud800\nx.weight": zeros("F32", 2)})
    (problem,) = check_store(store).problems
    assert problem.isprintable()
    assert "model.\\u001b[31m\\u202e\\ud800 x.weight" in problem
