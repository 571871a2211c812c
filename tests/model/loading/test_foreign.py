"""Whatever a stranger names in place of a model is recognized, and answered with what to do."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.errors import ModelError
from runner.model import open_model
from runner.model.architectures import family_of
from runner.model.sources import foreign
from scripts.tools.models.tensors import safetensors_bytes

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4000000000\n"
GGUF = b"GGUF\x03\0\0\0" + b"\0" * 64
SAFE = safetensors_bytes({})
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode()
POINTER = "is a pointer of git-lfs, not the file itself: `git lfs pull` fetches it$"
OLLAMA = (
    "GGUF, which stays with Ollama: write `FROM ./FILE.gguf` into a Modelfile, then `ollama create NAME -f Modelfile`$"
)


class Given(NamedTuple):
    """The files of a folder, what is named of it, and how the answer ends, as a regular expression."""

    files: dict[str, bytes]
    told: str
    named: str = ""


FOLDERS = {
    "weights a pointer": Given({"config.json": CONFIG, "model.safetensors": LFS}, f"^d/model.safetensors {POINTER}"),
    "config a pointer": Given(
        {"config.json": LFS, "model.safetensors": SAFE}, f"^failed to read config.json: d/config.json {POINTER}"
    ),
    "all a pointer": Given(
        {"config.json": CONFIG, "model-1.safetensors": LFS, "model.safetensors.index.json": LFS},
        f"^d/model-1.safetensors {POINTER}",
    ),
    "a web page": Given(
        {"config.json": b"<!DOCTYPE html><html>", "model.safetensors": SAFE}, "is a web page: download"
    ),
    "PyTorch by another name": Given(
        {"config.json": CONFIG, "model.safetensors": b"PK\3\4" * 9}, "checkpoint of PyTorch"
    ),
    "GGUF by another name": Given(
        {"config.json": CONFIG, "model.safetensors": GGUF}, f"^d/model.safetensors is {OLLAMA}"
    ),
    "GGUF alone": Given({"q4.gguf": GGUF, "README.md": b""}, f"in d, only q4.gguf: {OLLAMA}"),
    "GGUF beside config": Given({"q4.gguf": GGUF, "config.json": CONFIG}, f"in d, only q4.gguf: {OLLAMA}"),
    "adapter of PEFT": Given(
        {"adapter_config.json": b"{}", "adapter_model.safetensors": SAFE},
        r"only adapter_model.safetensors: it is an adapter \(adapter_config.json\); merge it into its base model",
    ),
    "adapter of mlx-lm": Given({"adapter_config.json": b"{}", "adapters.safetensors": SAFE}, "it is an adapter"),
    "PyTorch": Given(
        {"config.json": CONFIG, "pytorch_model.bin": b"PK"}, "only pytorch_model.bin: download a revision"
    ),
    "old mlx-lm": Given({"config.json": CONFIG, "weights.npz": b"PK"}, "only weights.npz: an mlx-lm of 2023 wrote it"),
    "other weights": Given({"config.json": CONFIG, "a.safetensors": SAFE}, "in d, only a.safetensors$"),
    "shards missing": Given(
        {"config.json": CONFIG, "model.safetensors.index.json": b"{}"},
        "index.json names are missing; continue the downl",
    ),
    "diffusers": Given({"model_index.json": b"{}", "unet/config.json": CONFIG}, "it is a pipeline of diffusers"),
    "cache of a hub": Given(
        {"refs/main": b"abc", "blobs/x": b"", "snapshots/abc/config.json": CONFIG}, "cache; name d/snapshots/abc$"
    ),
    "store": Given({"blobs/x": b"", "manifests/x": b""}, "it is an Ollama store; --models-dir d --model NAME"),
    "one level up": Given(
        {"4bit/config.json": CONFIG, "8bit/config.json": CONFIG}, "is in d/4bit; name that directory$"
    ),
    "empty": Given({}, "in d: it is empty$"),
    "unknown": Given({"notes.txt": b""}, "^failed to read config.json: open d/config.json: no such file or directory$"),
    "one file": Given(
        {"config.json": CONFIG, "model.safetensors": SAFE},
        "^open d/model.safetensors: not a directory; name the one that holds config.json: d$",
        "model.safetensors",
    ),
    "one GGUF file": Given({"q4.gguf": GGUF}, f"^d/q4.gguf is {OLLAMA}", "q4.gguf"),
}


@pytest.mark.parametrize("given", FOLDERS.values(), ids=FOLDERS)
@pytest.mark.parametrize("start", ["./", ""])
def test_a_folder_or_file_is_answered_with_what_to_do(
    given: Given, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    for name, content in given.files.items():
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(content)
    with pytest.raises(ModelError, match=given.told):
        open_model(f"{start}d/{given.named}".rstrip("/"), tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mlx-community/Qwen3-0.6B-4bit", "if mlx-community/Qwen3-0.6B-4bit is a Hugging Face id: download it with"),
        ("https://huggingface.co/mlx-community/Qwen3-0.6B-4bit", "it is a model of Hugging Face: download it with"),
        ("hf.co/mlx-community/Qwen3-0.6B-4bit/", "it is a model of Hugging Face: download it with"),
        (
            "https://www.huggingface.co/mlx-community/Qwen3-0.6B-4bit/tree/main",
            "it is a model of Hugging Face: download",
        ),
        ("qwen3:0.6b", ""),
        ("me/mine:q4", ""),
        ("example.org/me/mine", ""),
        ("a/../b", ""),
    ],
)
def test_a_name_of_hugging_face_is_answered_with_how_to_get_it(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^read manifest: ") as refused:
        open_model(name, tmp_path)
    for text in (str(refused.value), getattr(refused.value, "explained", str(refused.value))):
        assert ("`hf download mlx-community/Qwen3-0.6B-4bit --local-dir DIR`, then --model DIR" in text) == bool(told)
        assert told in text


def test_only_the_beginning_of_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []
    monkeypatch.setattr(foreign, "refuse_foreign", lambda _, head: heads.append(head))
    (tmp_path / "a.gguf").write_bytes(GGUF * 1000)
    with pytest.raises(ModelError, match="not a directory"):
        open_model(str(tmp_path / "a.gguf"), tmp_path)
    assert heads == [GGUF[: foreign.HEAD_BYTES]]


def test_a_directory_that_is_missing_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as refused:
        open_model("./nowhere", tmp_path)
    assert str(refused.value) == f"open {tmp_path}/nowhere: no such file or directory"
    assert refused.value.advice == "", "`mlx-runner check` would say the same"


def test_an_unknown_architecture_says_where_it_was_looked_for() -> None:
    with pytest.raises(ModelError, match=r"^unsupported architecture: Zorp$") as refused:
        family_of("Zorp", {"model_type": "zorp_moe\n" + "x" * 1000})
    for what in ("'Zorp'", "'zorp_moe", "mlx-lm 0.", "mlx_lm.models.zorp_moe", "mlx-vlm"):
        assert what in refused.value.advice
    assert len(refused.value.advice) < 500
