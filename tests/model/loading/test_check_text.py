"""The output of `mlx-runner check`, for people and for programs."""

from pathlib import Path

import msgspec
import pytest

from runner.commands.check.inspection import Inspection, Token
from runner.commands.check.report_text import as_json, as_text
from scripts.tools.models.sources import Published
from scripts.tools.models.store import Store, write_store
from tests.model.loading.conftest import checked
from tests.model.loading.malformed import WEIGHT, with_config, with_text, without, without_blob

KEYS = (
    *("model", "loads", "source", "path", "children", "architecture", "module", "defaults", "layers", "parameters"),
    *("caches", "weights", "read_bytes", "files", "skipped", "device", "computes", "blas", "kernels", "context"),
    *("tokenizer", "pictures", "sound", "drafts", "format", "ranks", "trial", "embeddings", "disk", "warnings"),
    "problems",
)


def check(store: Store, dtype: str = "auto") -> Inspection:
    return checked("tiny", store.models_dir, dtype=dtype)


def labels(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]


def value(text: str, label: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{label} "))
    return line.removeprefix(label).strip()


def test_a_sound_model_is_a_table_with_its_verdict_last(store: Store) -> None:
    text = as_text(check(store))
    wanted = "model store architecture layers parameters weights reads computes BLAS kernels context tokenizer BOS EOS"
    assert labels(text) == [*wanted.split(), "pictures", "drafts", "ranks", "verdict"]
    assert value(text, "architecture") == "LlamaForCausalLM, run by mlx_lm.models.llama"
    assert value(text, "layers") == "2: 2 full attention (KVCache)"
    assert value(text, "parameters") == "109.12 K"
    assert value(text, "weights") == "f32 21 tensors 436.5 KB"
    assert value(text, "reads") == "436.5 KB from 21 files"
    assert value(text, "context") == "4096 tokens (the model's own)"
    assert value(text, "tokenizer") == (
        "BPE of tokenizer.json: 274 tokens (the model scores 274), 4 added, 4 of them special"
    )
    assert value(text, "BOS") == '270 "<|bos|>"'
    assert value(text, "pictures") == "no: a text model"
    assert value(text, "verdict") == "would load"


def test_problems_stand_last_each_on_a_line_of_its_own(store: Store) -> None:
    for spoil in (without_blob(WEIGHT), without("tokenizer.json"), with_config(max_position_embeddings=None)):
        spoil(store)
    found = check(store)
    lines = as_text(found).splitlines()
    assert lines[-len(found.problems) :] == [f"PROBLEM       {problem}" for problem in found.problems]
    assert lines[-len(found.problems) - 1 - len(found.warnings)] == "verdict       would not load: 2 problems"
    assert sum(line.startswith("warning ") for line in lines) == len(found.warnings) > 0
    assert any(len(line) > 100 for line in lines), "none is wrapped"


def test_a_flood_of_problems_is_cut_for_the_eye_only(store: Store) -> None:
    found = msgspec.structs.replace(check(store), loads=False, problems=[f"p{number}" for number in range(700)])
    lines = as_text(found).splitlines()
    assert lines[-2:] == ["PROBLEM       p29", "PROBLEM       and 670 more, which --json lists"]
    assert value(as_text(found), "verdict") == "would not load: 700 problems"
    assert len(msgspec.json.decode(msgspec.json.encode(found))["problems"]) == 700


def test_no_name_of_others_commands_a_terminal(store: Store) -> None:
    evil = "a\x1b[2J\x9bA\u202eé"
    sound = check(store)
    assert sound.tokenizer
    eos = msgspec.structs.replace(sound.tokenizer, file=evil, eos=[Token(1, evil)])
    found = msgspec.structs.replace(sound, model=evil, tokenizer=eos, defaults={evil: evil}, warnings=[evil])
    assert all(line.isprintable() for line in as_text(found).splitlines())
    assert as_text(found).count("[2J\\u009bA\\u202eé") == 6
    assert all(line.isprintable() and line.isascii() for line in as_json(found).splitlines())
    assert msgspec.json.decode(as_json(found)) == msgspec.to_builtins(found)


def test_the_keys_of_the_object_are_always_the_same(store: Store) -> None:
    """Every field is present for programs; unknown values are null."""
    sound = msgspec.json.decode(msgspec.json.encode(check(store)))
    assert tuple(sound) == KEYS
    assert sound["caches"] == [{"name": "full attention", "cache": "KVCache", "count": 2}]
    assert sound["weights"] == [{"name": "f32", "tensors": 21, "bytes": 436480}]
    assert sound["context"] == {"tokens": 4096, "source": "model"}
    assert sound["tokenizer"]["eos"] == [{"id": 271, "text": "<|eos|>"}]
    with_text("config.json", b"{")(store)
    broken = msgspec.json.decode(msgspec.json.encode(check(store)))
    assert tuple(broken) == KEYS
    assert [key for key in KEYS if broken[key] is None] == [
        *("architecture", "module", "layers", "parameters", "caches", "weights", "read_bytes", "files", "skipped"),
        *("computes", "context", "pictures", "sound", "drafts", "format", "ranks", "trial", "embeddings", "disk"),
    ]


@pytest.mark.parametrize(
    ("name", "kind", "told", "tokens"),
    [
        ("qwen3.5-seeing", "pictures", "yes (qwen3.5 tower, 2 blocks, float32, ", 16384),
        ("gemma4-unified-seeing", "pictures", "yes (gemma4 tower, float32, ", 280),
        ("gemma4-hearing", "sound", "yes (gemma4 tower, 2 blocks, float32, ", 25),
        ("gemma4-unified-hearing", "sound", "yes (gemma4 tower, float32, ", 25),
    ],
)
def test_a_model_that_sees_or_hears(
    name: str, kind: str, told: str, tokens: int, published: Published, tmp_path: Path
) -> None:
    found = check(write_store(tmp_path, "tiny", published(name)), "keep")
    text = value(as_text(found), kind)
    assert found.loads
    assert text.startswith(told)
    assert text.endswith(
        f"; up to {tokens} tokens a picture)" if kind == "pictures" else f"; {tokens} tokens a second)"
    )
    read = {"vision"} if kind == "pictures" else {"audio", "vision"}
    assert not read & {amount.name for amount in found.skipped or ()}, "the towers are read"
    data = msgspec.json.decode(msgspec.json.encode(found))[kind]
    assert (data["sees" if kind == "pictures" else "hears"], data["why"], data["tokens"]) == (True, None, tokens)
    assert kind == "sound" or 0 < data["bytes"] < (found.read_bytes or 0)


def test_a_tower_that_is_not_whole_costs_no_text(published: Published, tmp_path: Path) -> None:
    store = write_store(tmp_path, "tiny", published("qwen3.5-seeing"))
    store.drop("model.visual.blocks.1.attn.qkv.weight")
    found = check(store)
    assert found.loads
    text = " ".join(as_text(found).split())
    assert " pictures no: " in text
    assert "blocks.1.attn.qkv" in text
    assert "vision" in {amount.name for amount in found.skipped or ()}
