"""A model on disk, whatever its form: text files by name and logical tensors, as the headers describe them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.header import Entry, reason


class Tensor(NamedTuple):
    """One logical tensor: the weight, or packed words with what is needed to unpack them.

    `name` is the name in the checkpoint, e.g. `model.norm.weight`. Dense: only `weight`. Affine: `scale` and `bias`
    `[..., out, in/group]`. Floating-point modes: `scale` of bytes; NVIDIA's exports also a scalar `global_scale`.
    """

    name: str
    weight: Entry
    scale: Entry | None = None
    bias: Entry | None = None
    global_scale: Entry | None = None

    @property
    def parts(self) -> tuple[Entry, ...]:
        return tuple(part for part in self[1:] if isinstance(part, Entry))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class File(NamedTuple):
    """A text file of the model. `size_bytes` is what a manifest promises, None where nothing does."""

    path: Path
    size_bytes: int | None = None

    def read(self) -> bytes:
        """The content. Raises ModelError that names the path."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ModelError(f"open {self.path}: {reason(error)}") from error
        if self.size_bytes is not None and len(data) != self.size_bytes:
            raise ModelError(f"{self.path}: size mismatch: want {self.size_bytes} bytes, found {len(data)}")
        return data


class Checkpoint(NamedTuple):
    """What a store or a directory holds. Nothing of the tensors' data has been read.

    `name` is what the user called the model. `from_store` tells whose tensor names these are: Ollama's, which are those
    of the source, or a directory's, which mlx-lm's own conversion may have made.
    """

    name: str
    files: Mapping[str, File]
    tensors: Mapping[str, Tensor]
    from_store: bool
    missing_file: str
    """What to say of a file that is not there; `{}` stands for its name."""

    def file(self, name: str) -> bytes | None:
        """The text file called `name`; None if the model has none."""
        file = self.files.get(name)
        return None if file is None else file.read()

    def required_file(self, name: str) -> bytes:
        data = self.file(name)
        if data is None:
            raise ModelError(self.missing_file.format(name))
        return data


def merge(groups: Iterable[Iterator[Tensor]]) -> dict[str, Tensor]:
    """The tensors of many files in one table. Raises ModelError for a name that two files hold."""
    tensors: dict[str, Tensor] = {}
    for group in groups:
        for tensor in group:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise ModelError(f"tensor {tensor.name} is in two files: {other.weight.file} and {tensor.weight.file}")
    return tensors
