"""The header of a tape: which model it belongs to, what computed it, and by which settings."""

import importlib.metadata
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from runner import __version__, blas
from runner.errors import RunnerError, UsageError
from runner.model import OpenedModel
from runner.model.weights.dtype import device
from runner.settings import Settings
from runner.sizes import Bound
from runner.tape.file import VERSION, Choices, Header, Identity, check_blas

_TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_WHOLE_BYTES = 1 << 20
"""A smaller file counts as a whole."""
_SAMPLES, _SAMPLE_BYTES = 64, 1024
_MOST_HEADER_BYTES = 100_000_000
_BOUNDS = {name: (f"{name}_bytes", f"{name}_percent") for name in ("cache_memory", "memory")}
_PLAIN = [name for name in Choices.__struct_fields__ if name in Settings.__struct_fields__]
"""The choices that have the names and the values of settings."""


def header_of(settings: Settings, model: OpenedModel) -> Header:
    """Returns the header for an engine with these settings. Raises OSError if the weights cannot be read."""
    return Header(settings.model, _identity(settings, model), _choices(settings, model))


def check_recordable(settings: Settings, model: OpenedModel) -> None:
    """Raises UsageError for what cannot be recorded."""
    if settings.disk_cache is not None:
        raise UsageError("--record does not record what comes from a disk: leave out --disk-cache")
    if model.has_vision and not settings.no_media:
        raise UsageError("--record does not record pictures: add --no-media for a model that sees")
    check_blas(settings.blas)


def check_identity(header: Header, settings: Settings, model: OpenedModel) -> None:
    """Raises RunnerError, with both values, for the first thing that differs here from where the tape was recorded."""
    for what, recorded, found in differences(header, settings, model):
        raise RunnerError(f"this cannot be replayed here: {what}: recorded with {recorded}, found {found}")


def differences(header: Header, settings: Settings, model: OpenedModel) -> Iterator[tuple[str, object, object]]:
    """Yields what differs here from where the tape comes from, in words: its name, its value there, and here."""
    here = _identity(settings, model)
    for name in Identity.__struct_fields__:
        there, found = getattr(header.identity, name), getattr(here, name)
        if there != found:
            yield name.replace("_", "-"), there, found


def settings_of(
    header: Header, model: str | None, models_dir: Path, log_level: int, ranks: int = 1, ranks_here: int = 1
) -> Settings:
    """Returns the settings of a replay, or of one of several ranks. `model` is where the model is, if not where it
    was."""
    choices = header.choices
    fields = {name: getattr(choices, name) for name in _PLAIN}
    fields |= {name: Bound(*(getattr(choices, part) for part in parts)) for name, parts in _BOUNDS.items()}
    return Settings(
        **fields,
        model=model or header.model,
        port=0,
        models_dir=models_dir,
        ranks=ranks,
        ranks_here=ranks_here,
        log_level=log_level,
        watch_parent=False,
    )


def _choices(settings: Settings, model: OpenedModel) -> Choices:
    fields = {name: getattr(settings, name) for name in _PLAIN}
    for name, (nbytes, percent) in _BOUNDS.items():
        bound = getattr(settings, name)
        fields |= {nbytes: bound.bytes, percent: bound.percent}
    return Choices(**{**fields, "context_tokens": model.context_length})


def _identity(settings: Settings, model: OpenedModel) -> Identity:
    version = importlib.metadata.version
    return Identity(
        format=VERSION,
        runner=__version__,
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        llguidance=version("llguidance"),
        weights=_digest(model),
        device=device(),
        blas=blas.detect(settings.blas, settings.blas_threads).name,
    )


def _digest(model: OpenedModel) -> str:
    """Returns a digest of the texts, of the headers of the weights, and of samples of them: the same wherever the files
    lie, and read in a moment."""
    digest = blake2b(digest_size=16)
    for name in _TEXTS:
        digest.update(model.file(name) or b"")
    files = {part.file for tensor in model.checkpoint.tensors.values() for part in tensor.parts}
    for path in sorted(files, key=lambda path: path.name):
        with path.open("rb") as file:
            count = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(count, _MOST_HEADER_BYTES)))
            start, end = file.tell(), file.seek(0, os.SEEK_END)
            if end < _WHOLE_BYTES:
                file.seek(start)
                digest.update(file.read())
                continue
            for place in range(start, end, max(1, (end - start) // _SAMPLES)):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
