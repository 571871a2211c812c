"""A process with the processor of one model of mlx-vlm: pictures in, the arrays of its tower out."""

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
"""The time for importing transformers from a cold disk."""
_DEAD = "the process of mlx-vlm's processor did not start"
_GRACE_S = 1.0
"""The time that a process gets to finish for a client that has left: starting another takes longer."""
_LEAST_S, _MEGAPIXEL_S = 20, 1.0
"""The most processor time: for any picture, and for each megapixel."""
_SPARE_BYTES = 256 << 20
_PIXEL_BYTES = 12, 96
"""The most bytes of a pixel: of the file during decoding, and of the processor's picture in all its copies."""
MOST_PIXELS = 4096 * 4096
"""The most pixels that a tower takes: the processor gets a larger picture in a smaller size."""
USUAL_SOFT = -200
"""The id that stands for a picture if a config names none."""
PART = "/"
"""Stands between the name of a list of arrays and the place of an array in it."""
BFLOAT16 = "~"
"""Ends the name of an array of such numbers, which NumPy lacks: it crosses as the integers of their bits."""
_DROPPED = {"deepseekocr": " ", "deepseekocr_2": " "}
"""Package -> the end of each prompt by mlx-vlm's chat template, which its processor drops."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

Arrays = dict[str, "npt.NDArray[np.generic]"]


class Setup(msgspec.Struct, array_like=True, frozen=True):
    """The model of the processor."""

    package: str
    placeholder: str
    """The text that stands for a picture before the processor replaces it."""
    files: Mapping[str, bytes]
    """The text files of the model by their names."""


class Prepared(msgspec.Struct, frozen=True):
    """The result of a processor for a prompt with one picture. The bytes of the arrays follow."""

    ids: list[int]
    shapes: list[tuple[str, str, list[int]]]
    """The names, types and shapes of the arrays."""
    grid: list[int] = []
    """Moments, rows and columns of patches, if the processor names them."""


class Preparer(OrderProcess):
    """The runner's side. Owner: one thread at a time."""

    module = __name__

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup = setup

    def start(self) -> None:
        """Starts the process. Raises ModelError if mlx-vlm has no processor for these files here."""
        if self._child is None:
            self._start()

    def measure(self, width: int, height: int, left: Callable[[], bool]) -> Prepared:
        """Returns the result for any picture of this size. Ends the process and raises as `DecodeProcess`."""
        header = PictureHeader("PNG", width, height, 1)
        found = self._answers(_order(header, 0, 0), [], _patient(left), "measure image", "picture")
        return msgspec.msgpack.decode(found[0], type=Prepared)

    def prepare(self, data: bytes, header: PictureHeader, left: Callable[[], bool]) -> Arrays:
        """Returns the arrays of a picture. Ends the process and raises as `DecodeProcess`."""
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
    """Returns the order for a picture of this header; of a grey one without `parts` and bytes."""
    width, height = resized(header.width, header.height)
    memory_bytes = prepare_bytes(header, size) + _SPARE_BYTES
    seconds = _LEAST_S + _MEGAPIXEL_S * header.width * header.height / 1e6
    return PictureOrder(memory_bytes, seconds, parts, header._replace(kept=()), width, height, "drop")


def resized(width: int, height: int) -> tuple[int, int]:
    """Returns the size in which the processor gets a picture: its own, or MOST_PIXELS."""
    if width * height <= MOST_PIXELS:
        return width, height
    shrink = (MOST_PIXELS / (width * height)) ** 0.5
    return max(1, int(width * shrink)), max(1, int(height * shrink))


def prepare_bytes(header: PictureHeader, size: int) -> int:
    """Returns the most bytes that preparing a picture from a file of `size` bytes takes at once."""
    width, height = resized(header.width, header.height)
    of_file, of_processor = _PIXEL_BYTES
    return header.width * header.height * of_file + width * height * of_processor + 3 * size


def _patient(left: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a function that returns True _GRACE_S after `left` does."""
    since: list[float] = []

    def gone() -> bool:
        if left() and not since:
            since.append(monotonic())
        return bool(since) and monotonic() - since[0] > _GRACE_S

    return gone


def serve(channel: Channel) -> None:
    """Prepares pictures until the runner closes its end."""
    os.putenv("OPENBLAS_NUM_THREADS", "1")
    setup = msgspec.msgpack.decode(channel.receive(), type=Setup)
    processor, fault = None, ""
    try:
        processor = Processor(setup)
        processor.warm_up()
    except Exception as error:  # processors of many authors raise anything
        fault = f"mlx-vlm's processor cannot be used here: {_first_line(error)}"
    channel.send(msgspec.json.encode(Answer(fault, 0)))
    while processor is not None:
        order = msgspec.json.decode(channel.receive(), type=PictureOrder)
        data = b"".join([channel.receive() for _ in range(order.parts)])
        answer_order(channel, order, address_bytes(), partial(_prepared, processor, order, data))


def _prepared(processor: "Processor", order: PictureOrder, data: bytes) -> list[bytes]:
    """Returns the answer of the processor. Turns its exceptions into MediaError, except MemoryError, which ends the
    process."""
    try:
        return processor.answer(order, data)
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        raise MediaError(f"preprocess image: {_first_line(error)}") from error


class Processor:
    """mlx-vlm's processor of one model."""

    @panics_as(RuntimeError)
    def __init__(self, setup: Setup) -> None:
        """Raises any exception of the package's classes."""
        os.environ.update(_ENVIRONMENT)
        from runner.vlm.module import import_package

        classes = import_package(setup.package)  # lets transformers find its processor
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
        if issubclass(kind, BaseImageProcessor):  # beside a tokenizer, as mlx-vlm's own loader has it
            self._processor.image_processor = kind()
        elif hasattr(self._processor, "convert_tokens_to_ids"):
            raise ValueError("the files of the model describe a tokenizer alone")

    def warm_up(self) -> None:
        """Prepares a grey picture, so that libraries and their buffers count towards the limits of no picture."""
        import runner.media.picture  # noqa: F401

        with suppress(Exception):  # the processor may refuse the size
            self.answer(_order(PictureHeader("PNG", 64, 64, 1), 0, 0), b"")

    @panics_as(RuntimeError)
    def answer(self, order: PictureOrder, data: bytes) -> list[bytes]:
        """Returns the messages for a picture: `Prepared`, and unless it only measures, the bytes of arrays."""
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
        """Returns the ids for a picture, and its arrays by their names for the model's class."""
        arrays = self.together([picture], self.text)
        ids = arrays.pop("input_ids").reshape(-1).tolist()
        arrays.pop("attention_mask", None)
        inner = self._inner(ids)
        aligned = {name: each for name, each in arrays.items() if each.ndim and each.shape[-1] == len(ids) > 1}
        return ids[inner], {**arrays, **{name: each[..., inner] for name, each in aligned.items()}}

    def together(self, pictures: list["Image"], text: str) -> Arrays:
        """Returns the processor's arrays for a prompt with pictures."""
        import numpy as np
        from mlx_vlm.utils import prepare_inputs

        text += self._end
        try:
            found = prepare_inputs(self._processor, images=pictures, prompts=text, image_token_index=self._soft)
        except ValueError:  # some processors do not know all arguments that mlx-vlm passes
            found = dict(self._processor(text=[text], images=pictures))
        flat = dict(each for name, value in found.items() for each in _flat(name, value))
        arrays = {name: np.array(value) for name, value in flat.items() if value is not None}
        return _ended({name: array for name, array in arrays.items() if array.dtype.kind in "biuf"})

    def _inner(self, ids: list[int]) -> slice:
        """Returns the part of ids between the tokens that begin and end every text."""
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        first, last = (getattr(tokenizer, f"{side}_token_id", None) for side in ("bos", "eos"))
        around = tokenizer("").input_ids
        ends = bool(around) and around[-1] == last == ids[-1]
        return slice(int(ids[0] == first), len(ids) - ends)


def _ended(arrays: Arrays) -> Arrays:
    """Returns the arrays with a row of zeros after the crops of DeepSeek's pictures: mlx-vlm reads a row for each tile
    until one is zero, and would read foreign memory after the last crop."""
    import numpy as np

    crops, pixels = arrays.get("images_spatial_crop"), arrays.get("pixel_values")
    if crops is None or pixels is None or crops.ndim != 3 or crops.shape[1] >= pixels.shape[1]:
        return arrays
    return {**arrays, "images_spatial_crop": np.pad(crops, ((0, 0), (0, pixels.shape[1] - crops.shape[1]), (0, 0)))}


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields a value with its name, or the arrays of a nested list with names of their own."""
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
