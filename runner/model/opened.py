"""Opens a model: finds its files, and checks its config and the headers of its weights. Needs no MLX."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from runner import json_files
from runner.errors import ModelError
from runner.model.architectures import (
    UNNEEDED,
    ChooseFamily,
    Config,
    Family,
    architecture_of,
    family_of,
    select_tensors,
)
from runner.model.layer_counts import check_depths, check_extra_layers, extra_layers
from runner.model.module_config import (
    EMBEDDINGS,
    HEAD,
    context_length,
    is_tied,
    module_config,
    read_config,
    text_config,
    vocabulary_size,
)
from runner.model.packing import check_companions
from runner.model.sources.checkpoint import LogicalTensor, ModelCheckpoint, ReportFault, raise_fault
from runner.model.sources.foreign import is_weights
from runner.model.sources.manifest import find_manifest
from runner.model.sources.model_directory import open_directory
from runner.model.sources.name import parse_model_name
from runner.model.sources.ollama_store import TOKENIZERS, open_store

_REPOSITORY = "models--"


class OpenedModel(NamedTuple):
    """A model whose files are found and whose headers are checked. Immutable; any thread may read it.

    `config` is `config.json` as stored; mlx-lm's module is built from `module_config`. `tensors` are the tensors that
    loading reads, by the names that the module's `sanitize` knows.
    """

    name: str
    architecture: str
    family: Family
    config: Config
    module_config: Config
    tensors: Mapping[str, LogicalTensor]
    context_length: int
    """In tokens; 0 if unknown."""
    vocab_size: int
    checkpoint: ModelCheckpoint
    unreadable: frozenset[str] = frozenset()
    """The names of tensors that the model needs but that could not be read; `tensors` lacks them."""

    @property
    def directory(self) -> str:
        """The absolute path of the model's directory; empty for a model in a store."""
        return "" if self.checkpoint.from_store else _printable(os.path.abspath(self.checkpoint.path))  # noqa: PTH100 - keeps links

    @property
    def title(self) -> str:
        """The model's name for people: in a store the model's name, in a directory the directory's. A directory in
        Hugging Face's cache has the name of its repository."""
        if not self.directory:
            return parse_model_name(self.name).short
        *_, repository, folder, last = ("", "", *Path(self.directory).parts)
        is_cached = folder == "snapshots" and repository.startswith(_REPOSITORY)
        return repository.removeprefix(_REPOSITORY).replace("--", "/") if is_cached else last

    @property
    def total_bytes(self) -> int:
        """The number of bytes that loading reads."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def suppressed_tokens(self) -> list[int]:
        """The ids of tokens that no answer may contain, from `generation_config.json`."""
        try:
            listed = self.json_file("generation_config.json").get("suppress_tokens")
        except ModelError:
            return []  # the tokenizer reads the file too, and raises the error
        tokens = listed if isinstance(listed, list) else []
        return [token for token in tokens if type(token) is int and 0 <= token < self.vocab_size]

    @property
    def has_vision(self) -> bool:
        """True if the model has tensors of a tower for pictures, or its config describes one."""
        return self._has_tower("vision")

    @property
    def has_audio(self) -> bool:
        """True if the model has tensors of a tower for sound, or its config describes one."""
        return self._has_tower("audio")

    def _has_tower(self, part: str) -> bool:
        described = isinstance(self.config.get(f"{part}_config"), dict)
        return described or any(map(UNNEEDED[part].match, self.checkpoint.tensors))

    def file(self, name: str) -> bytes | None:
        """Returns the content of a text file such as `tokenizer.json`; None if the model has no such file."""
        return self.checkpoint.file(name)

    def json_file(self, name: str) -> dict[str, object]:
        """Returns the object in the JSON file `name`; {} if there is no such file. Raises ModelError if it is
        broken."""
        try:
            found = json_files.parse(self.file(name) or b"{}")
        except ValueError as error:
            raise ModelError(f"{name} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ModelError(f"{name}: want an object, found {type(found).__name__}")
        return found


def open_model(model: str, models_dir: Path, choose: ChooseFamily = family_of) -> OpenedModel:
    """Opens `model`: the name of a model in the store `models_dir`, or the path of a directory. Needs only
    milliseconds, because it reads no weights. Raises ModelError if anything is missing or broken."""
    return open_checkpoint(find_checkpoint(model, models_dir), choose=choose)


def open_checkpoint(
    checkpoint: ModelCheckpoint,
    report: ReportFault = raise_fault,
    family: Family | None = None,
    choose: ChooseFamily = family_of,
) -> OpenedModel:
    """Returns the opened model of a checkpoint, checked by the rules of `family` or, without it, of the family from
    `choose`. Passes a fault to `report` if opening can go on; raises ModelError for any other fault."""
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=checkpoint.from_store)
    family = family or choose(architecture, config, from_store=checkpoint.from_store)
    if checkpoint.from_store and checkpoint.files.keys().isdisjoint(TOKENIZERS):
        report(ModelError(f"load tokenizer config: {checkpoint.missing_file.format(TOKENIZERS[0])}"))
    text = text_config(config, family)
    beyond = extra_layers((*checkpoint.tensors, *checkpoint.unreadable), text)
    try:
        check_extra_layers(beyond, text)
    except ModelError as error:
        report(error)
    tensors = select_tensors(family, checkpoint.tensors, beyond)
    unreadable = select_tensors(family, checkpoint.unreadable, beyond)
    for name, tensor in list(tensors.items()):
        try:
            check_companions(tensor)
        except ModelError as error:
            report(error)
            unreadable[name] = tensors.pop(name)
    if family.library is not None:
        mended = family.library.module_config(family, lambda name: read_config(checkpoint, nulls=True, name=name))
        check_depths(mended, len(unreadable) + len(tensors))
    else:
        mended = module_config(config, family, {**unreadable, **tensors})
        if is_tied(mended, family):
            tensors = _without_head(tensors)
    return OpenedModel(
        name=checkpoint.name,
        architecture=architecture,
        family=family,
        config=config,
        module_config=mended,
        tensors=tensors,
        context_length=context_length(config, family),
        vocab_size=vocabulary_size(mended, family, tensors),
        checkpoint=checkpoint,
        unreadable=frozenset(unreadable),
    )


def _without_head(tensors: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """Returns the tensors of a tied model without its head. If there is no embedding, the head becomes the embedding:
    some writers store a shared tensor only under the first of its two names."""
    heads = [name for name in tensors if HEAD.fullmatch(name)]
    kept = {name: tensor for name, tensor in tensors.items() if name not in heads}
    if len(heads) == 1 and not any(name.endswith(EMBEDDINGS) for name in kept):
        name = heads[0].replace("lm_head", "model.embed_tokens")
        kept[name] = tensors[heads[0]]._replace(name=name)
    return kept


def find_checkpoint(model: str, models_dir: Path, report: ReportFault = raise_fault) -> ModelCheckpoint:
    """Opens the checkpoint `model`: a path if it looks like one, else a name in the store, else a relative path.

    The path of a weight file is opened as a directory too: `open_directory` then explains the mistake in an error.
    """
    if model.startswith(("/", ".", "~")) or Path(model).is_absolute():
        # Path.expanduser raises an error for an unknown user.
        return open_directory(Path(os.path.expanduser(model)), _printable(model), report)  # noqa: PTH111
    # Path.is_dir raises an error for long names.
    is_there = os.path.isdir(model) or (is_weights(model) and os.path.isfile(model))  # noqa: PTH112, PTH113
    if is_there and not _is_stored(model, models_dir):
        return open_directory(Path(model), _printable(model), report)
    return open_store(model, models_dir, report)


def _printable(path: str) -> str:
    """Returns `path` with every byte that is not UTF-8 replaced, so that it can be written as JSON."""
    return os.fsencode(path).decode(errors="replace")


def _is_stored(model: str, models_dir: Path) -> bool:
    try:
        return find_manifest(models_dir, parse_model_name(model)) is not None
    except ModelError:
        return False
