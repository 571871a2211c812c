"""The model that the runners of a soak serve: a made one or a real one."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from scripts.tools.models.checkpoints import SPECIAL_TOKENS, Kind, write_checkpoint
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import Quantization
from scripts.tools.real import chat

MODEL = "soak:latest"
REAL: Literal["real"] = "real"
_GENERATION_CONFIG = "generation_config.json"
_BEGIN, _END, _USER, _ASSISTANT = SPECIAL_TOKENS
_DRAWING: Mapping[str, object] = {"temperature": 0.8, "top_k": 4}
_REAL_DRAWING: Mapping[str, object] = {"temperature": 0.8, "top_p": 0.9}
"""No top-k: on CPUs the order of its candidates depends on the rounding of every score of a large vocabulary, and with
the order the token that a seed draws (runner/sampling/filters.py)."""

Write = Callable[[str, Sequence[str]], str]
"""Returns the prompt for a system message and the messages of user and assistant in turn, the user first."""


class Limits(NamedTuple):
    """The memory that a model's runner may use, in bytes.

    `cache` is the cache's budget: small, so that it is full within seconds and evicts from then on. `workspace` is what
    MLX's memory may exceed weights and cache by while requests run, `growth` what memory may grow by after the warm-up.
    """

    cache: int
    workspace: int
    growth: int


TINY_LIMITS = Limits(cache=1 << 20, workspace=4 << 20, growth=4 << 20)
REAL_LIMITS = Limits(cache=64 << 20, workspace=256 << 20, growth=64 << 20)
"""A token takes 45 KiB, so the cache holds three prompts. Six running requests of 512 tokens, each in layers of its own
and in a batch, take 270 MiB, of which the cache counts a part."""


class Subject(NamedTuple):
    """A model by its name for `--model`, the store that has it, the form of its prompts, options with which its answers
    are drawn, and what it may use."""

    model: str
    models_dir: Path | None
    write: Write
    drawing: Mapping[str, object]
    limits: Limits


def made_subject(directory: Path, kind: Kind, seed: int, packed: Quantization | None = None) -> Subject:
    """Makes a tiny model of this kind in a store in this directory, its weights `packed` as `ollama create` does it. A
    head is packed only if it is another tensor than the embeddings."""
    overrides = {"tie_word_embeddings": False} if packed else None
    source = write_checkpoint(directory / "source", kind, seed=seed, overrides=overrides)
    _suppress(source / _GENERATION_CONFIG, [*range(32), *range(127, 256)])
    store = write_store(directory / "models", MODEL, source, packed)
    return Subject(MODEL, store.models_dir, _write, _DRAWING, TINY_LIMITS)


def real_subject(directory: Path, model: Path) -> Subject:
    """Makes a directory of links to the files of the real model, which itself is left as it is."""
    for file in model.iterdir():
        if file.name != _GENERATION_CONFIG:
            (directory / file.name).symlink_to(file)
    config = directory / _GENERATION_CONFIG
    config.write_bytes((model / _GENERATION_CONFIG).read_bytes())
    _suppress(config, _unreadable(model / "tokenizer.json", kept=chat.END))
    return Subject(str(directory), None, _write_real, _REAL_DRAWING, REAL_LIMITS)


def _suppress(generation_config: Path, tokens: Sequence[int]) -> None:
    """Keeps tokens that are no text out of the answers: a prompt with them would not become the same tokens again."""
    config = json.loads(generation_config.read_text())
    generation_config.write_text(json.dumps({**config, "suppress_tokens": tokens}))


def _unreadable(tokenizer_json: Path, kept: str) -> list[int]:
    """Returns the tokens that are special or parts of characters, but for the one that ends an answer."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    texts = tokenizer.decode_batch([[token] for token in range(tokenizer.get_vocab_size())])
    end = tokenizer.token_to_id(kept)
    return [token for token, text in enumerate(texts) if token != end and (not text or "\ufffd" in text)]


def _write(system: str, messages: Sequence[str]) -> str:
    roles = (_USER, _ASSISTANT)
    turns = (f"{roles[number % 2]}{message}{_END}" for number, message in enumerate(messages))
    return f"{_BEGIN}{system}{''.join(turns)}{_ASSISTANT}"


def _write_real(system: str, messages: Sequence[str]) -> str:
    turns = ((("user", "assistant")[number % 2], message) for number, message in enumerate(messages))
    return chat.render([("system", system), *turns])
