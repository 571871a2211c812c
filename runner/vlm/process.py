"""A process with the processor of one model of mlx-vlm: turns pictures into the arrays that the tower encodes."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runner.errors import MediaError, ModelError, panics_as
from runner.media.decode_process import PictureOrder
from runner.media.header import PictureHeader
from runner.process.child import Channel
from runner.process.orders import Answer, OrderProcess, address_bytes, answer_order

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

_START_S = 120.0
"""The longest start of the process: transformers may have to be imported from a cold disk."""
_DEAD = "the process of mlx-vlm's processor did not start"
_GRACE_S = 1.0
"""The time that the process has to finish an order after its client has left: a new start takes longer."""
_LEAST_S, _MEGAPIXEL_S = 20, 1.0
"""The limit of processor time is `_LEAST_S`, plus `_MEGAPIXEL_S` for each megapixel of the picture."""
_SPARE_BYTES = 256 << 20
_PIXEL_BYTES = 12, 96
"""The most bytes for each pixel: in the file's picture while it is decoded, and in all copies of the resized one."""
MOST_PIXELS = 4096 * 4096
"""The most pixels of a picture for the processor. Larger pictures are shrunk first."""
USUAL_SOFT = -200
"""The id that stands for a picture if a config names none."""
PART = "/"
"""Stands between the name of a list of arrays and the place of an array in this list."""
BFLOAT16 = "~"
"""Ends the name of an array in bfloat16. NumPy lacks this type, so the array is sent as integers with its bits."""
_DROPPED = {"deepseekocr": " ", "deepseekocr_2": " "}
"""Package -> the end of each prompt in mlx-vlm's chat template. The package's processor drops this end."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

Arrays = dict[str, "npt.NDArray[np.generic]"]


class Setup(msgspec.Struct, array_like=True, frozen=True):
    """The first message to the process: the model whose processor it runs."""

    package: str
    placeholder: str
    """The text that stands for a picture before the processor replaces it."""
    files: Mapping[str, bytes]
    """The name of each text file of the model -> its content."""


class Prepared(msgspec.Struct, frozen=True):
    """The result of a processor for a prompt with one picture. A message with the bytes of each array follows."""

    ids: list[int]
    shapes: list[tuple[str, str, list[int]]]
    """The name, type and shape of each array."""
    grid: list[int] = []
    """The numbers of moments, rows and columns of patches; empty if the processor does not tell them."""


class Preparer(OrderProcess):
    """The runner's end of the process with the processor. Owner: one thread at a time."""

    module = __name__

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup = setup

    def start(self) -> None:
        """Starts the process. Raises ModelError if mlx-vlm's processor cannot be used for the model's files."""
        if self._child is None:
            self._start()

    def measure(self, width: int, height: int, left: Callable[[], bool]) -> Prepared:
        """Returns the result for a grey picture of this size. Ends the process and raises as `DecodeProcess` does."""
        header = PictureHeader("PNG", width, height, 1)
        found = self._answers(_order(header, 0, 0), [], _patient(left), "measure image", "picture")
        return msgspec.msgpack.decode(found[0], type=Prepared)

    def prepare(self, data: bytes, header: PictureHeader, left: Callable[[], bool]) -> Arrays:
        """Returns the arrays of a picture. Ends the process and raises as `DecodeProcess` does."""
        import numpy as np

        pieces = header.pieces(data)
        order = _order(header, len(data), len(pieces))
        first, *rest = self._answers(order, pieces, _patient(left), "decode image", "picture")
        shapes = msgspec.msgpack.decode(first, type=Prepared).shapes
        return {
            name: np.frombuffer(part, dtype).reshape(shape)
            for (name, dtype, shape), part in zip(shapes, rest, strict=True)
        }

    def _start(self) -> None:
        super()._start()
        try:
            error = self._asked([msgspec.msgpack.encode(self._setup)], _START_S, bool, "start")[0].error
        except (MediaError, EOFError, OSError):
            error = _DEAD
        if error:
            self._stop()
            raise ModelError(error)


def _order(header: PictureHeader, size: int, parts: int) -> PictureOrder:
    """Returns the order for a picture of this header. `parts` is the number of its parts, 0 for a grey picture."""
    width, height = resized(header.width, header.height)
    memory_bytes = prepare_bytes(header, size) + _SPARE_BYTES
    seconds = _LEAST_S + _MEGAPIXEL_S * header.width * header.height / 1e6
    return PictureOrder(memory_bytes, seconds, parts, header._replace(kept=()), width, height, "drop")


def resized(width: int, height: int) -> tuple[int, int]:
    """Returns the size in which the processor gets a picture: shrunk to MOST_PIXELS if it has more."""
    if width * height <= MOST_PIXELS:
        return width, height
    shrink = (MOST_PIXELS / (width * height)) ** 0.5
    return max(1, int(width * shrink)), max(1, int(height * shrink))


def prepare_bytes(header: PictureHeader, size: int) -> int:
    """Returns the most memory, in bytes, that preparing a picture needs. `size` is the size of its file."""
    width, height = resized(header.width, header.height)
    of_file, of_processor = _PIXEL_BYTES
    return header.width * header.height * of_file + width * height * of_processor + 3 * size


def _patient(left: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a function that returns True once _GRACE_S have passed since `left` first returned True."""
    since: list[float] = []

    def gone() -> bool:
        if left() and not since:
            since.append(monotonic())
        return bool(since) and monotonic() - since[0] > _GRACE_S

    return gone


def serve(channel: Channel) -> None:
    """Prepares pictures until the runner closes its end of `channel`."""
    os.putenv("OPENBLAS_NUM_THREADS", "1")
    setup = msgspec.msgpack.decode(channel.receive(), type=Setup)
    processor, fault = None, ""
    try:
        processor = Processor(setup)
        processor.warm_up()
    except Exception as error:  # processors of many authors raise errors of any type
        fault = f"mlx-vlm's processor cannot be used here: {_first_line(error)}"
    channel.send(msgspec.json.encode(Answer(fault, 0)))
    while processor is not None:
        order = msgspec.json.decode(channel.receive(), type=PictureOrder)
        data = b"".join([channel.receive() for _ in range(order.parts)])
        answer_order(channel, order, address_bytes(), partial(_prepared, processor, order, data))


def _prepared(processor: "Processor", order: PictureOrder, data: bytes) -> list[bytes]:
    """Returns the messages of the processor for an order. Turns the processor's exceptions into MediaError, except
    MemoryError, which ends the process."""
    try:
        return processor.answer(order, data)
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        raise MediaError(f"preprocess image: {_first_line(error)}") from error


class Processor:
    """mlx-vlm's processor for one model."""

    @panics_as(RuntimeError)
    def __init__(self, setup: Setup) -> None:
        """Loads the processor. Raises whatever the package's classes raise."""
        os.environ.update(_ENVIRONMENT)
        from runner.vlm.module import import_package

        classes = import_package(setup.package)  # lets transformers find the package's processor
        from mlx_vlm.models.base import BaseImageProcessor
        from mlx_vlm.utils import load_processor

        with tempfile.TemporaryDirectory() as folder:
            for name, content in setup.files.items():
                (Path(folder) / name).write_bytes(content)
            self._processor: Any = load_processor(folder, add_detokenizer=False)
        self.text = setup.placeholder
        self._end = _DROPPED.get(setup.package, "")
        self._soft = msgspec.json.decode(setup.files["config.json"]).get("image_token_index", USUAL_SOFT)
        kind = getattr(classes, "ImageProcessor", object)
        if issubclass(kind, BaseImageProcessor):  # joined to a tokenizer, as in mlx-vlm's own loader
            self._processor.image_processor = kind()
        elif hasattr(self._processor, "convert_tokens_to_ids"):
            raise ValueError("the files of the model describe a tokenizer alone")

    def warm_up(self) -> None:
        """Prepares a grey picture, to load libraries and buffers before the limits of a picture apply."""
        import runner.media.picture  # noqa: F401

        with suppress(Exception):  # the processor may refuse the size
            self.answer(_order(PictureHeader("PNG", 64, 64, 1), 0, 0), b"")

    @panics_as(RuntimeError)
    def answer(self, order: PictureOrder, data: bytes) -> list[bytes]:
        """Returns the messages for a picture: `Prepared`, and if the order has parts, the bytes of each array."""
        import numpy as np

        ids, arrays = self.prepared(self._picture(order, data))
        if not order.parts:
            return [msgspec.msgpack.encode(_described(ids, arrays))]
        plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        return [msgspec.msgpack.encode(_described(ids, plain)), *(array.tobytes() for array in plain.values())]

    def _picture(self, order: PictureOrder, data: bytes) -> "Image":
        if not order.parts:
            from PIL import Image

            return Image.new("RGB", (order.width, order.height), (127, 127, 127))
        from runner.media.picture import decode_picture

        return decode_picture(data, order.header, order.width, order.height)

    def prepared(self, picture: "Image") -> tuple[list[int], Arrays]:
        """Returns the ids for a picture, and its arrays by their names as arguments of the model's class."""
        arrays = self.together([picture], self.text)
        ids = arrays.pop("input_ids").reshape(-1).tolist()
        arrays.pop("attention_mask", None)
        inner = self._inner(ids)
        aligned = {name: each for name, each in arrays.items() if each.ndim and each.shape[-1] == len(ids) > 1}
        return ids[inner], {**arrays, **{name: each[..., inner] for name, each in aligned.items()}}

    def together(self, pictures: list["Image"], text: str) -> Arrays:
        """Returns the processor's arrays for a prompt `text` with `pictures`."""
        import numpy as np
        from mlx_vlm.utils import prepare_inputs

        text += self._end
        try:
            found = prepare_inputs(self._processor, images=pictures, prompts=text, image_token_index=self._soft)
        except ValueError:  # some processors refuse an argument that mlx-vlm passes
            found = dict(self._processor(text=[text], images=pictures))
        flat = dict(each for name, value in found.items() for each in _flat(name, value))
        arrays = {name: np.array(value) for name, value in flat.items() if value is not None}
        return _ended({name: array for name, array in arrays.items() if array.dtype.kind in "biuf"})

    def _inner(self, ids: list[int]) -> slice:
        """Returns the slice of `ids` without the tokens that the tokenizer adds at both ends of every text."""
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        first, last = (getattr(tokenizer, f"{side}_token_id", None) for side in ("bos", "eos"))
        around = tokenizer("").input_ids
        ends = bool(around) and around[-1] == last == ids[-1]
        return slice(int(ids[0] == first), len(ids) - ends)


def _ended(arrays: Arrays) -> Arrays:
    """Returns the arrays, with zeros after the crops of DeepSeek's pictures. mlx-vlm reads a row of crops for each tile
    until a row is zero, and would otherwise read foreign memory after the last crop."""
    import numpy as np

    crops, pixels = arrays.get("images_spatial_crop"), arrays.get("pixel_values")
    if crops is None or pixels is None or crops.ndim != 3 or crops.shape[1] >= pixels.shape[1]:
        return arrays
    return {**arrays, "images_spatial_crop": np.pad(crops, ((0, 0), (0, pixels.shape[1] - crops.shape[1]), (0, 0)))}


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields a value and its name; for a nested list, each array in it with a name that tells its place."""
    if _has_arrays(value):
        for at, each in enumerate(cast("Sequence[object]", value)):
            yield from _flat(f"{name}{PART}{at}", each)
    elif str(getattr(value, "dtype", "")).endswith(".bfloat16"):
        from runner.vlm.module import bits

        yield name + BFLOAT16, bits(cast("Any", value))
    else:
        yield name, value


def _has_arrays(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return hasattr(value[0], "shape") or _has_arrays(value[0])


def _described(ids: list[int], arrays: Arrays) -> Prepared:
    grid = arrays.get("image_grid_thw")
    shapes = [(name, str(array.dtype), list(array.shape)) for name, array in arrays.items()]
    return Prepared(ids, shapes, [] if grid is None else grid.reshape(-1).tolist())


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]
