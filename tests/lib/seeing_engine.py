"""The language of tests about pictures in the engine: a `Scheduler` over a tiny model that sees.

    engine = SeeingEngine("qwen3.5-seeing")
    asked = engine.ask("what is [img-0]?", red())
    engine.finish()
    engine.check()  # every answer is what a plain loop without a cache says

As in `tests.lib.tiny_engine`, slices come from `advance` and nothing waits: pictures are decoded when the test says so.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from io import BytesIO
from typing import cast

import mlx.core as mx
import numpy as np
from PIL import Image

from protocol import CompletionRequest, Media
from protocol.request import Options
from runner.cache import make_cache
from runner.cache.sketch import Sketch
from runner.drafts.drafting import Drafting
from runner.engine.events import Failed, Refused
from runner.engine.generation import Forward
from runner.engine.memory import MemoryBudget
from runner.engine.policy import Slice, SlicePolicy, Workload
from runner.engine.request import Limits, Request
from runner.media.encoder import MediaEncoder, OwnTowers
from runner.media.families import Gemma4, Gemma4Unified, Glimmer, NemotronH, PictureFamily, Qwen35
from runner.media.forward import FeatureRows
from runner.media.header import media_kind
from runner.media.prompt import Item, MediaNames, Picture, Sound
from runner.media.row_store import FamilyPictures, MediaRows, RowStore
from runner.media.support import Hearing, MediaSupport
from runner.media.towers import Grid
from runner.sampling.sampler import Sampler
from runner.server.prepare import prepare
from scripts.tools.models.checkpoints import VOCABULARY_SIZE
from tests.lib.seeing import (
    BOTH_WAYS,
    END,
    MROPE,
    SOFT,
    SOUND,
    SOUND_END,
    SOUND_START,
    START,
    Place,
    Seeing,
    Shown,
    seeing,
    walk,
)
from tests.lib.steps import result_of
from tests.lib.tiny_engine import Clock, EngineClient, SlicedEngine, ZeroMeter, core_parts
from tests.unit.media.pictures import Here, spans

CONTEXT = 2000
TOLERANCE = 2e-4
"""Of log-probabilities."""


def family_of(name: str) -> PictureFamily:
    """Returns the preparation of a model's pictures, with small ones left small."""
    if name in MROPE:
        return Qwen35(min_pixels=1)
    if name.startswith("nemotron"):
        return NemotronH(min_patches=4)
    if name.startswith("glimmer"):
        return Glimmer()
    if name.startswith("gemma4-unified"):
        return Gemma4Unified(budget=12, bidirectional=True)
    return Gemma4(budget=12, bidirectional=name in BOTH_WAYS)


@cache
def picture(colour: str = "red", width: int = 96, height: int = 64) -> bytes:
    """Returns a PNG with noise of a colour."""
    noise = np.random.default_rng(len(colour)).integers(0, 60, (height, width, 3), dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(np.asarray(Image.new("RGB", (width, height), colour)) // 2 + noise).save(stream, "PNG")
    return stream.getvalue()


class Helper:
    """The thread that decodes; the test decides when it does."""

    def __init__(self) -> None:
        self.waits = False
        """True if pictures are decoded only by `run`."""
        self.tasks: deque[tuple[Future[object], Callable[[], object]]] = deque()

    def submit(
        self, function: Callable[[Picture, Callable[[], bool]], object], shown: Picture, left: Callable[[], bool]
    ) -> Future[object]:
        future: Future[object] = Future()
        self.tasks.append((future, lambda: function(shown, left)))
        if not self.waits:
            self.run()
        return future

    def run(self) -> None:
        """Decodes all pictures that wait."""
        while self.tasks:
            future, function = self.tasks.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # as an executor does
                    future.set_exception(error)


class Pixels(RowStore):
    """Counts what it decodes."""

    def __init__(self, pictures: FamilyPictures, helper: Helper) -> None:
        super().__init__(pictures, decoder=Here())
        self._thread = helper  # type: ignore[assignment]
        self.decoded = 0

    def _decoded(self, item: Item, left: Callable[[], bool]) -> MediaRows:
        self.decoded += 1
        return super()._decoded(item, left)


class NotingPolicy(SlicePolicy):
    """Notes what was done."""

    def __init__(self, chunk_tokens: int = 2048, max_gap_s: float = 0.1) -> None:
        super().__init__(chunk_tokens, max_gap_s)
        self.slices: list[Slice] = []

    def took(self, slice: Slice, work: Workload, seconds: float) -> None:  # noqa: A002
        self.slices.append(slice)
        super().took(slice, work, seconds)


class Asked(EngineClient):
    """A request with pictures."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request
        request.stream = self

    @property
    def error(self) -> str:
        end = self.received[-1] if self.received else None
        return end.text if isinstance(end, Failed | Refused) else ""

    @property
    def first_soft(self) -> int:
        """The place of the first picture."""
        return spans(self.request)[0].start

    @property
    def counts(self) -> tuple[int, int]:
        """The tokens that the prompt shared with the cache, and the cached ones."""
        assert self.session is not None
        return self.session.matched, self.session.cached


class SeeingEngine(SlicedEngine):
    """An engine over a model that sees, and all requests so far."""

    vocab_size: int = VOCABULARY_SIZE

    def __init__(
        self,
        name: str,
        policy: SlicePolicy | None = None,
        *,
        cache: str = "trie",
        room: int | None = None,
        drafting: Drafting | None = None,
        watch: Callable[[Forward], Forward] = lambda forward: forward,
    ) -> None:
        self.model: Seeing = seeing(name)
        clock = Clock()
        self.asked: list[Asked] = []
        self.helper = Helper()
        self.wakes = 0
        family = family_of(name)
        pictures = FamilyPictures(family, START, SOFT, END)
        self.store = Pixels(pictures, self.helper)
        heard = self.model.sound_family
        hearing = None if heard is None else Hearing(heard, SOUND_START, SOUND, SOUND_END)
        self.support = MediaSupport(pictures, MediaNames(), self.store, hearing)
        self.encoder = MediaEncoder(
            OwnTowers(self.model.tower, self.model.sound_tower),
            self.store,
            self.model.forward(),
            self._wake,
            splits=not family.bidirectional,
        )
        self.memory = MemoryBudget(ZeroMeter(), room, 2048, drop_unused=self.encoder.clear)
        facts = Sketch(self.model.loaded.make_layers, self.model.loaded.logits, VOCABULARY_SIZE).facts
        make = partial(make_cache, cache, facts)
        parts = core_parts(watch(self._forward), self.model.tokenizer, make, self.memory, drafting)
        parts.show, parts.shifted = self.encoder.begin, self.encoder.forward.shifted
        super().__init__(parts, policy or NotingPolicy(), 8, clock)

    def _wake(self) -> None:
        self.wakes += 1

    def _forward(self, tokens: mx.array, layers: list[object]) -> mx.array:
        self.clock.now += 0.010 + 0.001 * tokens.size
        return self.model.loaded.logits(tokens, layers)

    def ask(self, prompt: str, *files: bytes, max_tokens: int = 6, **options: float) -> Asked:
        """Prepares a request with these media, 0, 1, ..., and submits it. Every token has its log-probability."""
        wire = CompletionRequest(
            prompt=prompt,
            media=[Media(data=data, id=number, kind=media_kind(data)) for number, data in enumerate(files)],
            options=Options(num_predict=max_tokens, **options),  # type: ignore[arg-type]
            logprobs=True,
            top_logprobs=3,
        )
        limits = Limits(CONTEXT, self.vocab_size)
        steps = prepare(wire, self.model.tokenizer, limits, None, self.support)
        asked = Asked(result_of(steps, self.support))
        self.asked.append(asked)
        self.scheduler.add(asked.request)
        return asked

    def answer(self, prompt: str, *files: bytes, max_tokens: int = 6, **options: float) -> Asked:
        """Asks, and waits for the answer, which must be right."""
        asked = self.ask(prompt, *files, max_tokens=max_tokens, **options)
        self.finish()
        assert asked.finished is not None, asked.received[-1:]
        self.check_answer(asked)
        return asked

    def check(self) -> None:
        """Checks all answers, and that nothing is left of them."""
        for asked in self.asked:
            self.check_answer(asked)
        self.check_cache()

    def check_answer(self, asked: Asked) -> None:
        """Compares an answer so far with that of a plain loop."""
        if isinstance(asked.received[0] if asked.received else None, Refused):
            return
        right = self._plain_loop(asked.request, len(asked.tokens))
        drawn = Sampler(asked.request.sampling, asked.request.prompt, self.vocab_size, CONTEXT)
        for step, (token, logits) in enumerate(zip(asked.tokens, right(asked.tokens), strict=True)):
            if asked.request.grammar is None:
                assert token == drawn(logits[None]).read()[0].token, f"step {step} of {asked.tokens}"
            if step < len(asked.entries):
                wanted = (logits - mx.logsumexp(logits))[token].item()
                assert abs(asked.entries[step].logprob - cast("float", wanted)) <= TOLERANCE, f"step {step}"
        if asked.finished is not None:
            assert asked.finished.metrics.prompt_eval_count == len(asked.request.prompt)

    def _plain_loop(self, request: Request, steps: int) -> Callable[[Sequence[int]], list[mx.array]]:
        """Returns a function that computes the logits before each token of an answer: no cache, the prompt at once."""
        model, layers, forward = self.model, self.model.loaded.make_layers(), self.model.forward()
        places, parts = _places(request)
        rows = [
            FeatureRows(place.start, place.stop, self.features(span.item), isinstance(span.item, Sound))
            for place, span in zip(places, spans(request), strict=True)
        ]
        channels = [list(each) for each in zip(*walk(parts), strict=True)] if rows and model.name in MROPE else None
        shift = walk(parts, 1)[-1][0] - len(request.prompt) if channels else 0

        def compute(answer: Sequence[int]) -> list[mx.array]:
            found = [forward(request.prompt, layers, rows, channels, model.loaded.logits)[0, -1]]
            with forward.shifted([shift]):
                found += [model.loaded.logits(mx.array([[token]]), layers)[0, -1] for token in answer[: steps - 1]]
            return found[:steps]

        return compute

    def features(self, shown: Item) -> mx.array:
        """Returns what a tower makes of an item, all at once."""
        rows = RowStore._decoded(RowStore(self.support.pictures, decoder=Here()), shown, lambda: False)
        if isinstance(shown, Sound):
            assert self.model.sound_tower is not None
            assert shown.clip is not None
            *_, features = self.model.sound_tower.encode(mx.array(rows), shown.clip.rows)
            return features
        assert isinstance(shown, Picture)
        geometry = shown.geometry
        *_, features = self.model.tower.encode(mx.array(rows), Grid(geometry.rows, geometry.columns))
        return features


def four_together(engine: SeeingEngine, small: bytes, other: bytes, large: bytes) -> None:
    """Checks four answers, at least three of which share forwards: about these pictures, and about none."""
    engine.ask("see [img-0] and say", small, max_tokens=12)
    engine.ask("[img-0] is larger", large, max_tokens=12)
    engine.ask("a text without any picture", max_tokens=12)
    engine.ask("two [img-0] of [img-1] them", other, large, max_tokens=7)
    most = 0
    while not engine.scheduler.idle:
        engine.advance()
        most = max([most, *(len(batch.generations) for batch in engine.scheduler.batches.all)])
    assert most >= 3
    assert all(asked.finished for asked in engine.asked)
    engine.check()


def _places(request: Request) -> tuple[list[Place], list[list[int] | Shown]]:
    """Returns the pictures of a prompt, and its parts, for `walk`."""
    places, parts, at = [], list[list[int] | Shown](), 0
    for span in spans(request):
        shown = Shown(1, span.item.tokens)
        if isinstance(span.item, Picture):
            shown = Shown(span.item.geometry.token_rows, span.item.geometry.token_columns)
        parts += [request.prompt[at : span.start], shown]
        places.append(Place(span.start, span.stop, shown))
        at = span.stop
    return places, [*parts, request.prompt[at:]]
