"""Pictures in a model of mlx-vlm: finds the tokens of a picture, which follow from its size alone, and its arrays."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, cast

from runner.errors import MediaError, RequestError
from runner.media.decode_process import DecodeProcess
from runner.media.geometry import Geometry
from runner.media.header import PictureHeader
from runner.media.prompt import Item, MediaPrompt, Picture, UnmeasuredPicture
from runner.media.row_store import MediaRows, Pictures
from runner.model.fields import Config, section, size
from runner.vlm.packages import ALONE
from runner.vlm.process import Arrays, Preparer, prepare_bytes

PLACEHOLDERS = {
    package: text
    for text, packages in {
        "<image>": "aya_vision deepseekocr deepseekocr_2 idefics2 idefics3 internvl_chat lfm2_vl llmjpvl smolvlm",
        "<image>\n": (
            "deepseek_vl_v2 fastvlm granite4_vision granite_vision llava llava_bunny llava_next llava_onevision "
            "phi4_siglip"
        ),
        "<|vision_start|><|image_pad|><|vision_end|>": (
            "mage_vl mimo_v2 qwen2_5_vl qwen2_vl qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp zaya1_vl"
        ),
        "<|begin_of_image|><|image|><|end_of_image|>": "glm4v glm4v_moe glm5_next glm_ocr",
        "<|image|>": "jina_vlm llama4 molmo2",
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>": "kimi_k25 kimi_k3 kimi_vl",
        "<image>./</image>": "minicpmo minicpmv4_6 minicpmv4_7",
        "[IMG]": "mistral3 pixtral",
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>": "cohere_compass",
        "<|img|><|imgpad|><|endofimg|>": "dots_ocr",
        "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>": "ernie4_5_moe_vl",
        "<start_of_image>": "gemma3",
        "<IMG_CONTEXT>": "internvl",
        "<image-1>": "locateanything",
        "]<]image[>[": "minimax_m3_vl",
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>": "paddleocr_vl",
        "<|image_1|>": "phi3_v",
        "<im_patch>": "step3p7",
    }.items()
    for package in packages.split()
}
"""Package -> the text that stands for a picture in the package's chat template."""
_MOST_SIZES = 4096


class Expansion(NamedTuple):
    """The tokens of a picture: `own` tokens, whose embeddings are features, and the tokens `before` and `after`."""

    before: Sequence[int]
    own: Sequence[int]
    after: Sequence[int]
    rows: int = 0
    columns: int = 0
    """`rows` and `columns` are the grid of `own`, if positions have three channels; else 0."""
    other: Sequence[int] = ()
    """The ids that the processor has in the place of `own`; empty if both are equal. They are one id, for which the
    tower makes several rows, or ids outside the vocabulary."""

    @property
    def ids(self) -> list[int]:
        return [*self.before, *self.own, *self.after]

    @property
    def asked(self) -> list[int]:
        """The ids as the processor makes them, for the tower."""
        return [*self.before, *(self.other or self.own), *self.after]


class VlmPictures(Pictures):
    """The tokens and arrays that mlx-vlm's processor makes of pictures, one picture at a time."""

    soft = -1  # each picture has ids of its own

    def __init__(
        self,
        package: str,
        library_version: str,
        preparer: Preparer,
        config: Config,
        soft: Sequence[int],
        *,
        mrope: bool,
        tokens: int = 0,
    ) -> None:
        """`soft` are the ids that may stand for pictures. If the processor has one token for a picture, `tokens` is the
        number of rows that the tower makes of any picture, else 0."""
        self.name = f"mlx_vlm {library_version} {package}"
        self.title = package
        self.mrope = mrope
        self.alone = package in ALONE
        self._preparer = preparer
        self._soft = soft
        self._merge = size(section(config, "vision_config"), "spatial_merge_size", 2)  # merge x merge patches a token
        self._tokens = tokens
        self._busy = Lock()
        self._lock = Lock()
        self._sizes: OrderedDict[tuple[int, int], Expansion] = OrderedDict()

    def picture(self, data: bytes, header: PictureHeader) -> Item:
        with self._lock:
            found = self._sizes.get((header.width, header.height))
        if found is None:
            return UnmeasuredPicture(data=data, header=header)
        grid = (found.rows, found.columns)
        geometry = Geometry(header.width, header.height, *grid, len(found.own), *grid)
        before, after, ids = found.before, found.after, tuple(found.own)
        return Picture(data=data, header=header, geometry=geometry, before=before, after=after, ids=ids)

    def check_prompt(self, prompt: MediaPrompt, context_length: int) -> None:
        if self.alone and len({span.item.name for span in prompt.spans}) > 1:
            raise RequestError(f"{self.title} takes only one picture in a prompt")
        if prompt.spans and prompt.spans[-1].stop == len(prompt.ids) <= context_length:
            raise RequestError("the prompt ends in a picture: add a text after it")  # the last token runs alone

    def measure(self, header: PictureHeader, left: Callable[[], bool]) -> None:
        self.expansion(header, left)

    def expansion(self, header: PictureHeader, left: Callable[[], bool] = lambda: False) -> Expansion:
        """Returns the tokens of a picture of this header's size. The first call for a size may last a second. Raises
        MediaError if the processor fails, and once `left` returns True."""
        key = header.width, header.height
        with self._lock:
            found = self._sizes.get(key)
        if found is None:
            with self._busy:
                measured = self._preparer.measure(*key, left)
            found = split_ids(measured.ids, self._soft)
            if self._tokens or min(found.own) < 0:
                own = [max(token, 0) for token in found.own]
                found = found._replace(other=found.own, own=own * self._tokens if self._tokens else own)
            if self.mrope:
                found = _with_grid(found, measured.grid, self._merge)
            with self._lock:
                self._sizes[key] = found
                if len(self._sizes) > _MOST_SIZES:
                    self._sizes.popitem(last=False)
        return found

    def needed_bytes(self, picture: Picture) -> int:
        return prepare_bytes(picture.header, len(picture.data))

    def rows(self, picture: Picture, decoder: DecodeProcess, left: Callable[[], bool]) -> "MediaRows":
        del decoder
        with self._busy:
            return cast("MediaRows", VlmRows(self._preparer.prepare(picture.data, picture.header, left)))


def split_ids(ids: Sequence[int], soft: Sequence[int]) -> Expansion:
    """Splits `ids`: `own` begins and ends with the first of `soft` in `ids`, or else with the most common id."""
    known = [token for token in soft if token in ids]
    token = known[0] if known else Counter(ids).most_common(1)[0][0]
    start, stop = ids.index(token), len(ids) - [*reversed(ids)].index(token)
    return Expansion(ids[:start], ids[start:stop], ids[stop:])


def _with_grid(found: Expansion, grid: Sequence[int], merge: int) -> Expansion:
    """Adds the grid of `own`, whose tokens have `merge` x `merge` patches. Raises MediaError for a wrong grid."""
    if len(grid) != 3:
        raise MediaError("preprocess image: the model's processor returned no grid of patches")
    times, rows, columns = grid
    if times != 1 or rows * columns != len(found.own) * merge**2:
        raise MediaError(f"preprocess image: {rows} x {columns} patches do not make {len(found.own)} tokens")
    return found._replace(rows=rows // merge, columns=columns // merge)


@dataclass(frozen=True)
class VlmRows:
    """The arrays of one picture, by their names as arguments of the model's class."""

    arrays: Arrays

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())
