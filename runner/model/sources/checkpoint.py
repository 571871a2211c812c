"""A model on disk, whatever its form: text files by name and logical tensors, as the headers describe them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.sources.header import HeaderEntry, open_file, os_reason

_LONGEST_TEXT_BYTES = 1 << 28
"""Ten times the largest tokenizer; more than that is no text."""

ReportFault = Callable[[ModelError], None]
"""What becomes of a fault that leaves something to go on with."""


def raise_fault(error: ModelError) -> None:
    """Raises it: the report of everyone who wants a sound model or none."""
    raise error


class Tensor(NamedTuple):
    """One logical tensor: the weight, or packed words with what is needed to unpack them.

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
    """A text file of the model. `size_bytes` is what a manifest promises, None where nothing does."""

    path: Path
    size_bytes: int | None = None

    def read(self) -> bytes:
        """The content. Raises ModelError that names the path; a file of the wrong size is not read."""
        with open_file(self.path, self.size_bytes) as (file, found_bytes):
            if found_bytes > _LONGEST_TEXT_BYTES:
                raise ModelError(f"{self.path}: {found_bytes} bytes are too many for a text file")
            try:
                return file.read()
            except OSError as error:
                raise ModelError(f"read {self.path}: {os_reason(error)}") from error


class Checkpoint(NamedTuple):
    """What a store or a directory holds. Nothing of the tensors' data has been read.

    `name` is what the user called the model, `path` the manifest or the directory. `from_store` tells whose tensor
    names these are: Ollama's, which are those of the source, or a directory's, which mlx-lm's own conversion may have
    made.
    """

    name: str
    path: Path
    files: Mapping[str, File]
    tensors: Mapping[str, Tensor]
    from_store: bool
    missing_file: str
    """What to say of a file that is not there; `{}` stands for its name."""
    unreadable: Mapping[str, Tensor] = {}
    """Tensors whose file was reported as unreadable: stand-ins without a shape, under the best name that is known."""
    draft_bytes: Mapping[str, int] = {}
    """What belongs to a speculative draft model and was left unopened, by the names of the layers."""
    text_blobs: Mapping[str, File] = {}
    """The store's blobs that hold no tensors, by what a manifest calls them; a directory has no blobs."""

    def file(self, name: str) -> bytes | None:
        """The text file called `name`; None if the model has none. The name of a blob would not tell which it is."""
        file = self.files.get(name)
        try:
            return None if file is None else file.read()
        except ModelError as error:
            raise ModelError(f"layer {name}: {error}" if self.from_store else str(error)) from error

    def required_file(self, name: str) -> bytes:
        """The text file called `name`. Raises ModelError without the name, which the caller tells."""
        file = self.files.get(name)
        if file is None:
            raise ModelError(self.missing_file.format(name))
        return file.read()


def placeholder_tensor(name: str, file: Path) -> Tensor:
    """A tensor of which no more is known than its name."""
    return Tensor(name, HeaderEntry(file, name, "U8", ()))


def merge_tensors(groups: Iterable[Iterator[Tensor]], report: ReportFault = raise_fault) -> dict[str, Tensor]:
    """The tensors of many files in one table. A name that two files hold is reported, and the first one kept."""
    tensors: dict[str, Tensor] = {}
    for group in groups:
        for tensor in group:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                report(
                    ModelError(f"tensor {tensor.name} is in two files: {other.weight.file} and {tensor.weight.file}")
                )
    return tensors
