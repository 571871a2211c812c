"""An engine over a tiny model of mlx-vlm that sees, whose answers are compared with mlx-vlm's own computation.

engine = VlmEngine("qwen3_vl")
engine.answer("what is [img-0]?", picture("red"))  # compared, as all answers
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import mlx.core as mx
import msgspec
from PIL import Image

from runner.cache import make_cache
from runner.cache.sketch import Sketch
from runner.engine.memory import MemoryBudget
from runner.engine.policy import SlicePolicy
from runner.engine.request import Request
from runner.errors import MediaError
from runner.media.decode_process import PictureOrder
from runner.media.encoder import MediaEncoder
from runner.media.header import PictureHeader
from runner.media.prompt import MediaNames, Picture, Sound
from runner.media.row_store import RowStore
from runner.media.support import MediaSupport
from runner.model import OpenedModel
from runner.model.opened import open_checkpoint
from runner.model.sources.model_directory import open_directory
from runner.model.weights.loading import LoadedModel, load
from runner.tokenizer import Tokenizer, open_tokenizer
from runner.vlm.module import Served
from runner.vlm.pictures import VlmPictures
from runner.vlm.process import Arrays, Prepared, Preparer, Processor, Setup
from runner.vlm.sight import VlmForward, VlmTower, named_arrays, pictures_of, setup_of
from runner.vlm.source import mlx_vlm_family
from scripts.tools.models import vlm_seeing
from tests.lib.seeing_engine import Asked, Helper, NotingPolicy, SeeingEngine
from tests.lib.tiny_engine import Clock, SlicedEngine, ZeroMeter, core_parts
from tests.unit.media.pictures import spans
from tests.vlm import oracle


class Loaded(NamedTuple):
    """A model that was opened once, for tests that leave it as it is; and the same in mlx-vlm's hands."""

    opened: OpenedModel
    loaded: LoadedModel
    tokenizer: Tokenizer
    setup: Setup
    processor: Processor
    oracle: Any
    known: dict[object, mx.array]
    """What mlx-vlm has computed before, by tokens and pictures."""

    @property
    def module(self) -> Served:
        return cast("Served", self.loaded.module)


@cache
def loaded(package: str) -> Loaded:
    """Returns the model of a package."""
    with TemporaryDirectory() as folder:
        directory = vlm_seeing.write(package, Path(folder) / package)
        family = mlx_vlm_family(package, vlm_seeing.config(package))
        opened = open_checkpoint(open_directory(directory, package), family=family)
        mx.disable_compile()
        setup, tokenizer, theirs = setup_of(opened), open_tokenizer(opened.file), oracle.load(directory)
        return Loaded(opened, load(opened, "float32"), tokenizer, setup, Processor(setup), theirs, {})


class HerePreparer(Preparer):
    """Prepares in this process."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self.measured = self.prepared = 0

    def measure(self, width: int, height: int, left: Callable[[], bool]) -> Prepared:
        self.measured += 1
        order = PictureOrder(0, 0, 0, PictureHeader("PNG", width, height, 1), width, height, "drop")
        return msgspec.msgpack.decode(self._processor.answer(order, b"")[0], type=Prepared)

    def prepare(self, data: bytes, header: PictureHeader, left: Callable[[], bool]) -> Arrays:
        if left():
            raise MediaError("decode image: the client has left")
        self.prepared += 1
        return self._processor.prepared(Image.open(BytesIO(data)).convert("RGB"))[1]


class _Store(RowStore):
    """Counts what it prepares, when the test says so."""

    def __init__(self, pictures: VlmPictures, helper: Helper) -> None:
        super().__init__(pictures)
        self._thread = helper  # type: ignore[assignment]
        self.decoded = 0

    def _decode(self, item: Picture | Sound, left: Callable[[], bool]) -> Any:
        self.decoded += 1
        return super()._decode(item, left)


class VlmEngine(SeeingEngine):
    """An engine over a package, and all requests so far."""

    def __init__(
        self,
        package: str,
        policy: SlicePolicy | None = None,
        *,
        cache: str = "trie",
        parallel: int = 8,
        budget: int | None = None,
    ) -> None:
        self.vlm = loaded(package)
        self.model = cast("Any", self.vlm)  # of which the base class takes `tokenizer` and `loaded`
        self.make_layers = self.vlm.loaded.make_layers
        self.vocab_size = self.vlm.opened.vocab_size
        facts = Sketch(self.make_layers, self.vlm.loaded.logits, self.vocab_size).facts
        clock = Clock()
        self.asked: list[Asked] = []
        self.texts: dict[int, str] = {}
        """The prompt of each request, which is kept in `asked`."""
        self.helper = Helper()
        self.wakes = 0
        self.preparer = HerePreparer(self.vlm.processor)
        module = self.vlm.module
        self.pictures = pictures_of(self.vlm.opened, module, self.preparer)
        self.pictures.alone = False  # the tests ask whether it could take several
        self.store = cast("Any", _Store(self.pictures, self.helper))
        self.support = MediaSupport(self.pictures, MediaNames(), self.store)
        towers = VlmTower(module, self.pictures)
        self.encoder = MediaEncoder(towers, self.store, VlmForward(module), self._wake, splits=True)
        self.memory = MemoryBudget(ZeroMeter(), None, 2048, drop_unused=self.encoder.clear)
        make = partial(make_cache, cache, facts, budget_bytes=budget)
        parts = core_parts(self._forward, self.vlm.tokenizer, make, self.memory)
        parts.show, parts.shifted = self.encoder.begin, self.encoder.forward.shifted
        parts.unbatchable = self.vlm.loaded.unbatchable
        SlicedEngine.__init__(self, parts, policy or NotingPolicy(), parallel, clock)

    def _plain_loop(self, request: Request, steps: int) -> Callable[[Sequence[int]], list[mx.array]]:
        """Returns a function that has mlx-vlm compute the logits before each token: all pictures at once, no cache."""
        ids, arrays = self._prepared_by_mlx_vlm(request)

        shown = tuple(span.item.data for span in spans(request))

        def compute(answer: Sequence[int]) -> list[mx.array]:
            key = (*ids, *answer[: steps - 1]), shown
            found = self.vlm.known.get(key)
            if found is None:
                found = oracle.logits(self.vlm.oracle, ids, answer[: steps - 1], **arrays)[0, len(request.prompt) - 1 :]
                self.vlm.known[key] = found
            return [*found][:steps]

        return compute

    def takes_sizes(self, *pictures: bytes) -> bool:
        """True if mlx-vlm's processor takes pictures of these sizes together."""
        images = [Image.open(BytesIO(data)).convert("RGB") for data in pictures]
        try:
            return bool(self.vlm.processor.together(images, " ".join([self.vlm.processor.text] * len(images))))
        except ValueError:
            return False

    def ask(self, prompt: str, *pictures: bytes, max_tokens: int = 6, **options: float) -> Asked:
        asked = super().ask(prompt, *pictures, max_tokens=max_tokens, **options)
        self.texts[id(asked.request)] = prompt
        return asked

    def _prepared_by_mlx_vlm(self, request: Request) -> tuple[Sequence[int], dict[str, Any]]:
        """Returns what mlx-vlm's processor makes of the whole prompt, whose tokens are ours: ids, and arrays."""
        pictures = [Image.open(BytesIO(span.item.data)).convert("RGB") for span in spans(request)]
        if not pictures:
            return request.prompt, {}
        text = re.sub(r"\[img-[0-9]+\]", lambda _: self.vlm.processor.text, self.texts[id(request)])
        found = self.vlm.processor.together(pictures, text)
        ids = found.pop("input_ids").reshape(-1).tolist()
        made = self._expanded(ids, request)
        more = len(made) - len(request.prompt)  # a token that begins any text, which the host did not ask for
        assert more in (0, 1), "mlx-vlm makes more tokens of the prompt"
        assert made[more:] == request.prompt, "mlx-vlm makes other tokens of the prompt"
        found.pop("attention_mask", None)
        found = {
            name: each[..., more:] if each.ndim and each.shape[-1] == len(ids) else each for name, each in found.items()
        }
        return ids[more:], named_arrays({name: mx.array(array) for name, array in found.items()})

    def _expanded(self, ids: Sequence[int], request: Request) -> list[int]:
        """Returns ids in which those that a processor has for a picture are the ones that the tower makes of them."""
        shown: dict[int, Sequence[int]] = {}
        for span in spans(request):
            assert isinstance(span.item, Picture)
            found = self.pictures.expansion(span.item.header)
            each = len(found.own) // max(len(found.other), 1)
            shown |= dict.fromkeys(found.other, found.own[:each])
        return [each for token in ids for each in shown.get(token, [token])]
