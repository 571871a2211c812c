"""The types for a model on disk: text files by name, and logical tensors as the headers describe them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.sources.safetensors import HeaderEntry, open_file

_LONGEST_TEXT_BYTES = 1 << 28
"""The limit for a text file: ten times the largest known tokenizer."""

ReportFault = Callable[[ModelError], None]
"""A callback for each fault after which opening can go on."""


def raise_fault(error: ModelError) -> None:
    """Raises `error`. This is the `ReportFault` of callers that accept only a model without faults."""
    raise error


class LogicalTensor(NamedTuple):
    """One tensor of a model: a plain weight, or packed words with their scales and biases.

    `name` is the name in the checkpoint, such as `model.norm.weight`. A plain tensor has only `weight`. Affine modes
    have `scale` and `bias` [..., out, in/group]. Other modes have a `scale` of bytes, and NVIDIA's exports a
    `global_scale`.
    """

    name: str
    weight: HeaderEntry
    scale: HeaderEntry | None = None
    bias: HeaderEntry | None = None
    global_scale: HeaderEntry | None = None

    @property
    def parts(self) -> tuple[HeaderEntry, ...]:
        return tuple(part for part in self[1:] if isinstance(part, HeaderEntry))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class File(NamedTuple):
    """A text file of the model. `size_bytes` is its size according to the manifest; None if there is no manifest."""

    path: Path
    size_bytes: int | None = None

    def read(self) -> bytes:
        """Returns the content. Raises a ModelError that names the path if reading fails or the size is wrong."""
        with open_file(self.path, self.size_bytes) as (file, found_bytes):
            if found_bytes > _LONGEST_TEXT_BYTES:
                raise ModelError(f"{self.path}: {found_bytes} bytes are too many for a text file")
            return file.read()


class Child(NamedTuple):
    """A manifest in a manifest list. A host chooses the manifest for the runner that it uses."""

    runner: str
    format: str
    digest: str = ""
    """`sha256-<64 hex>` of the manifest's blob; empty if the list holds the manifest itself."""
    is_local: bool = True

    def __str__(self) -> str:
        return f"{self.runner or 'no runner'} ({self.format or 'no format'}{'' if self.is_local else ', not pulled'})"


class ModelCheckpoint(NamedTuple):
    """A model in a store or a directory, without the data of its tensors.

    `name` is the name that the user gave, `path` is the manifest or the directory. Tensors in a store have the names of
    the source; in a directory, mlx-lm's conversion may have renamed them.
    """

    name: str
    path: Path
    files: Mapping[str, File]
    tensors: Mapping[str, LogicalTensor]
    from_store: bool
    missing_file: str
    """The message for a missing file, with `{}` in place of the file's name."""
    unreadable: Mapping[str, LogicalTensor] = {}
    """Placeholders for tensors of unreadable files. A tensor whose name is unknown has its file's or layer's name."""
    draft_bytes: Mapping[str, int] = {}
    """Layer name -> bytes, for the tensor layers of a draft model stored with this model. They were not opened."""
    manifest: Mapping[str, object] = {}
    """The store's manifest as it was read; empty for a directory."""
    children: Sequence[Child] = ()
    """All manifests of the list in which this manifest was found; empty without a list."""
    text_blobs: Mapping[str, File] = {}
    """The model's blobs without tensors, by their names in the manifest; empty for a directory."""
    warnings: Sequence[str] = ()
    """Messages about faults that did not prevent opening."""

    def file(self, name: str) -> bytes | None:
        """Returns the content of the text file `name`; None if there is no such file.

        Raises ModelError. In a store the path of a blob does not show which file it is, so the message has `name`.
        """
        file = self.files.get(name)
        try:
            return None if file is None else file.read()
        except ModelError as error:
            raise ModelError(f"layer {name}: {error}" if self.from_store else str(error)) from error

    def required_file(self, name: str) -> bytes:
        """Returns the content of the text file `name`. Raises ModelError; its message may lack the name."""
        file = self.files.get(name)
        if file is None:
            raise ModelError(self.missing_file.format(name))
        return file.read()


def placeholder_tensor(name: str, file: Path) -> LogicalTensor:
    """Returns a placeholder, without a shape, for a tensor of the unreadable `file`."""
    return LogicalTensor(name, HeaderEntry(file, name, "U8", ()))


def merge_tensors(
    groups: Iterable[Iterator[LogicalTensor]], report: ReportFault = raise_fault
) -> dict[str, LogicalTensor]:
    """Returns the tensors of all `groups` by name. Reports a name that is in two files, and keeps the first tensor."""
    tensors: dict[str, LogicalTensor] = {}
    for group in groups:
        for tensor in group:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                files = f"{other.weight.file} and {tensor.weight.file}"
                report(ModelError(f"tensor {tensor.name} is in two files: {files}"))
    return tensors
