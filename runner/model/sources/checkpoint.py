"""A model on disk, in either form: text files by name, and logical tensors as the headers describe them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.sources.safetensors import HeaderEntry, open_file

_LONGEST_TEXT_BYTES = 1 << 28
"""Ten times the largest tokenizer."""

ReportFault = Callable[[ModelError], None]
"""Takes each fault despite which opening can go on."""


def raise_fault(error: ModelError) -> None:
    """Raises the fault: the `ReportFault` of callers that accept only a sound model."""
    raise error


class LogicalTensor(NamedTuple):
    """One logical tensor: the weight, or packed words with their scales and biases.

    `name` is the name in the checkpoint, e.g. `model.norm.weight`. Dense: only `weight`. Affine: `scale` and `bias`
    `[..., out, in/group]`. Floating-point modes: `scale` of bytes; NVIDIA's exports also a scalar `global_scale`.
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
    """A text file of the model. `size_bytes` is its size according to a manifest, None without one."""

    path: Path
    size_bytes: int | None = None

    def read(self) -> bytes:
        """Returns the content. Raises a ModelError that names the path, also for a file of the wrong size."""
        with open_file(self.path, self.size_bytes) as (file, found_bytes):
            if found_bytes > _LONGEST_TEXT_BYTES:
                raise ModelError(f"{self.path}: {found_bytes} bytes are too many for a text file")
            return file.read()


class Child(NamedTuple):
    """A manifest in a list of manifests. Each host chooses one by its runner."""

    runner: str
    format: str
    digest: str = ""
    """`sha256-<64 hex>` of the manifest's blob; empty if the list holds the manifest itself."""
    is_local: bool = True

    def __str__(self) -> str:
        return f"{self.runner or 'no runner'} ({self.format or 'no format'}{'' if self.is_local else ', not pulled'})"


class ModelCheckpoint(NamedTuple):
    """A model in a store or a directory, without the data of its tensors.

    `name` is the user's, `path` the manifest or the directory. A store keeps the tensor names of the source; in a
    directory, mlx-lm's conversion may have changed them.
    """

    name: str
    path: Path
    files: Mapping[str, File]
    tensors: Mapping[str, LogicalTensor]
    from_store: bool
    missing_file: str
    """The message for a missing file; `{}` stands for its name."""
    unreadable: Mapping[str, LogicalTensor] = {}
    """Placeholders without a shape for tensors of unreadable files, under the best known name."""
    draft_bytes: Mapping[str, int] = {}
    """Layer name -> size, for the tensor layers of a draft model beside this one, which stay closed."""
    manifest: Mapping[str, object] = {}
    """The store's manifest as it was read; empty for a directory."""
    children: Sequence[Child] = ()
    """All manifests of the list in which this one was found."""
    text_blobs: Mapping[str, File] = {}
    """The store's blobs without tensors, by their name in the manifest; empty for a directory."""
    warnings: Sequence[str] = ()
    """Faults despite which the model was opened."""

    def file(self, name: str) -> bytes | None:
        """Returns the content of text file `name`; None if the model has none.

        Raises ModelError. For a store, the message names the file: the path of a blob does not.
        """
        file = self.files.get(name)
        try:
            return None if file is None else file.read()
        except ModelError as error:
            raise ModelError(f"layer {name}: {error}" if self.from_store else str(error)) from error

    def required_file(self, name: str) -> bytes:
        """Returns the content of text file `name`. Raises ModelError; the caller adds the name to the message."""
        file = self.files.get(name)
        if file is None:
            raise ModelError(self.missing_file.format(name))
        return file.read()


def placeholder_tensor(name: str, file: Path) -> LogicalTensor:
    """Returns a tensor without a shape, known only by its name."""
    return LogicalTensor(name, HeaderEntry(file, name, "U8", ()))


def merge_tensors(
    groups: Iterable[Iterator[LogicalTensor]], report: ReportFault = raise_fault
) -> dict[str, LogicalTensor]:
    """Merges the tensors of many files. Reports a name that occurs in two files, and keeps the first tensor."""
    tensors: dict[str, LogicalTensor] = {}
    for group in groups:
        for tensor in group:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                files = f"{other.weight.file} and {tensor.weight.file}"
                report(ModelError(f"tensor {tensor.name} is in two files: {files}"))
    return tensors
