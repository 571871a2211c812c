"""One published model of the corpus: a table of a `*.toml` file beside this one, and the directory that it stands for.

Sizes are small and the vocabulary is cut. The names and forms of fields, and all that decides rotation, windows and
ends, are the publisher's. "#TEXT" in a table is the id of the token TEXT, "#size" the size of the vocabulary; data.py
explains `like`, `without`, "@name" and "null".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

import mlx.core as mx

from scripts.tools.models import data
from scripts.tools.models.checkpoints import write_weights
from scripts.tools.models.sources import published
from scripts.tools.models.sources_form import Config, Source, step
from scripts.tools.models.sources_steps import Weights
from scripts.tools.models.tensors import safetensors_bytes
from scripts.tools.models.tokenizers import ALL_BYTES, Document, byte_level, model_of_bytes, sentencepiece
from tests.lib.packed_sources import in_fp8

_FOLDER = Path(__file__).parent
_WORDS = ("He", "llo", "the", " the", " world", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published model.

    `config`, `generation` and `tokenizer` are `config.json`, `generation_config.json` and `tokenizer_config.json`;
    `files` are others. `ends` and the fields after it say what the model should be: what the publisher's files mean to
    transformers, never what this runner makes of them.
    """

    name: str
    of: str
    """The name under which it is published."""
    config: Config
    generation: Config = field(default_factory=dict)
    tokenizer: Config = field(default_factory=dict)
    files: Mapping[str, object] = field(default_factory=dict)

    module: Config = field(default_factory=dict)
    """Fields that mlx-lm's module needs for the shapes of the tensors, if those of `config` are not enough."""
    steps: tuple[object, ...] = ()
    """Steps from the module's tensors to the published ones, as in `scripts/tools/models/sources.toml`."""
    spare: Mapping[str, list[int]] = field(default_factory=dict)
    """Tensors that the text model does not need."""

    vocabulary: str = "byte-level"
    """`byte-level`, `sentencepiece`, `llama-2`, `tekken`, `tokenizer.model`."""
    tokens: tuple[str, ...] = ()
    """The special tokens, which follow the vocabulary."""
    texts: tuple[str, ...] = ()
    """Added tokens after them that are ordinary text."""
    lists: str = "both"
    """The files that list the added tokens: `tokenizer.json`, `tokenizer_config.json`, `added_tokens.json`, `both`."""
    template: str = "chat_template.jinja"
    """The place of the chat template: that file, `chat_template.json`, `tokenizer_config.json`; `several` are there,
    too; empty: none."""

    ends: tuple[str, ...]
    """The tokens that end an answer."""
    first: str = ""
    """The token that the runner itself puts before a prompt."""
    start: str = ""
    """The beginning of a chat."""
    user: tuple[str, str] = ("", "\n")
    """The texts before and after the words of a user."""
    assistant: tuple[str, str] = ("", "\n")
    context: int
    """The length of the context, in tokens."""
    tied: bool
    """True if the embedding is the output projection."""
    layers: str
    """A letter for each layer: f sees all tokens, s those in `window`, c those in its chunk of `window` tokens, n all,
    without rotation. S and F are s and f with the keys of an earlier layer; - has no attention."""
    window: int = 0
    rotary: Config = field(default_factory=dict)
    """The arguments of `measure.rotation` (theta, dims, ...) for layers f and s; {} for none."""
    local: Config = field(default_factory=dict)
    """The same for layers s, if they differ."""
    waits: str = ""
    """The reason why the row fails today. The test demands that it does: remove this with the fault."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each added token. They follow the vocabulary; in sentencepiece's they begin it."""
        before = 0 if self.vocabulary in _PREPENDS else 256 + len(_WORDS)
        return {text: before + index for index, text in enumerate((*self.tokens, *self.texts))}

    @property
    def size(self) -> int:
        """The rows of the embedding: padded, so one more than a byte-level tokenizer has tokens."""
        return 256 + len(_WORDS) + len(self.ids) + 1

    @property
    def talk(self) -> str:
        """A prompt of two turns, as a host renders it."""
        said = [self.start]
        for text in ("Hello", "the world"):
            said += [self.user[0], text, self.user[1], self.assistant[0]]
            said += ["Hello the world", self.assistant[1]]
        return "".join(said[:-2])

    def write(self, directory: Path) -> Path:
        """Writes the directory as it is published, with random weights, and returns it."""
        directory.mkdir()
        config = cast("Config", self._numbered(self.config))
        module = config | cast("Config", self._numbered(self.module))
        source = Source(module, config, tuple(map(step, self.steps)), spare={k: (*v,) for k, v in self.spare.items()})
        weights = published(source, "float32")
        quantization, published_as = config.get("quantization"), config.get("quantization_config")
        write_weights(directory, _packed(weights, quantization) if isinstance(quantization, dict) else weights)
        if isinstance(published_as, dict) and published_as.get("quant_method") == "fp8":
            tensors, _ = in_fp8(weights, 128 if published_as["weight_block_size"] else None)
            (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        for name, value in self._files(config).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
            (directory / name).write_text(text, encoding="utf-8")
        if self.vocabulary == "tokenizer.model":
            own = self.tokens[:-1]  # <unk> comes by itself
            (directory / "tokenizer.model").write_bytes(model_of_bytes(_VOCABULARY, own))
        return directory

    def _files(self, config: Config) -> dict[str, object]:
        files = {"config.json": config, "generation_config.json": self._numbered(self.generation)}
        files |= {name: self._numbered(value) for name, value in self.files.items()}
        tokenizer = cast("Config", self._numbered(self.tokenizer))
        if self.lists in ("both", "tokenizer_config.json"):
            flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
            tokenizer["added_tokens_decoder"] = {
                str(number): {"content": text, **flags, "special": text in self.tokens}
                for text, number in self.ids.items()
            }
        elif self.lists == "added_tokens.json":
            files["added_tokens.json"] = self.ids
        chat = _TEMPLATE.format(start=self.start, user=self.user, assistant=self.assistant)
        if self.template == "tokenizer_config.json":
            tokenizer["chat_template"] = chat
        elif self.template == "several":
            tokenizer["chat_template"] = [{"name": name, "template": chat} for name in ("default", "tool_use", "rag")]
        elif self.template:
            files[self.template] = {"chat_template": chat} if self.template.endswith(".json") else chat
        if self.vocabulary != "tokenizer.model":
            document = _document(self.vocabulary, [*self.ids])
            listed = (
                cast("list[Document]", document["added_tokens"]) if self.lists in ("both", "tokenizer.json") else []
            )
            document["added_tokens"] = [{**each, "special": each["content"] in self.tokens} for each in listed]
            files["tokenizer.json"] = document
        return {name: value for name, value in files.items() if value != {}} | {"tokenizer_config.json": tokenizer}

    def _numbered(self, value: object) -> object:
        """Returns `value` with ids in the place of their names."""
        if isinstance(value, dict):
            return {key: self._numbered(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._numbered(each) for each in value]
        if isinstance(value, str) and value.startswith("#"):
            return self.size if value == "#size" else self.ids[value[1:]]
        return value


_TEMPLATE = (
    "{start}{{% for m in messages %}}{{% if m.role == 'user' %}}{user[0]}{{{{ m.content }}}}{user[1]}"
    "{{% else %}}{assistant[0]}{{{{ m.content }}}}{assistant[1]}{{% endif %}}{{% endfor %}}"
)
_VOCABULARY = [*ALL_BYTES, *(word.encode() for word in _WORDS)]
_PREPENDS = {"sentencepiece": False, "llama-2": True}


def _document(vocabulary: str, added: list[str]) -> Document:
    if vocabulary in _PREPENDS:
        return sentencepiece((" ", *_WORDS), first=added, prepend_space=_PREPENDS[vocabulary])
    document = byte_level(_VOCABULARY, added)
    if vocabulary == "tekken":  # Devstral: the decoder of another kind of vocabulary
        parts: list[Document] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
        parts += [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        document["decoder"] = {"type": "Sequence", "decoders": parts}
    return document


def _packed(weights: Weights, quantization: Config) -> Weights:
    """Packs what mlx-community's converter packs: all matrices but those that the config sets to false."""
    packed: Weights = {}
    for name, array in weights.items():
        path, _, kind = name.rpartition(".")
        said = quantization.get(path, quantization)
        if kind != "weight" or array.ndim < 2 or "conv" in path or not isinstance(said, dict):
            packed[name] = array
            continue
        group, bits = cast("int", said["group_size"]), cast("int", said["bits"])
        parts = mx.quantize(array, group, bits, mode=cast("str", said.get("mode", "affine")))
        packed |= {f"{path}.{key}": part for key, part in zip(("weight", "scales", "biases"), parts, strict=False)}
    return packed


def _row(name: str, table: data.Table) -> Row:
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return Row(name=name, **found)  # type: ignore[arg-type]  # names and types are the table's own


ROWS: dict[str, Row] = {
    name: _row(name, table)
    for path in sorted(_FOLDER.glob("*.toml"))
    for name, table in data.read(path.stem, _FOLDER).items()
    if "of" in table
}
"""Every published model, by a short name."""
