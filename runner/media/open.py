"""Opens the sight of a model: the tower, the preparation of pictures, and the forward that takes them.

Whatever is wrong with a tower costs pictures only: the text model is served, and says why it sees none.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import isqrt
from typing import NamedTuple

from runner.engine.parts import Examined, Facts, Parts
from runner.engine.request import NoVision, Vision
from runner.errors import MediaError, ModelError, RunnerError
from runner.logs import Log
from runner.media.encoder import MediaEncoder
from runner.media.families import Family
from runner.media.forward import MediaForward
from runner.media.header import MAX_PIXELS
from runner.media.prompt import MediaNames
from runner.media.rows import RowStore
from runner.media.support import MediaSupport
from runner.media.towers.load import PREPROCESSOR, TowerPlan, load_tower, plan_tower, plan_weights
from runner.media.towers.tower import Tower
from runner.model import OpenedModel
from runner.model.config import text_config
from runner.model.inspect import contents
from runner.model.vlm.source import NOT_INSTALLED, Choice, blindness
from runner.settings import CheckSettings
from runner.sizes import counted, shown
from runner.tokenizer import Tokenizer

log = Log(__name__)
_SECTIONS = [11, 11, 10]
"""Of a config that names none; as in mlx-lm."""


class Sight(NamedTuple):
    """The parts that a model sees with: one for any thread, one for the engine thread. None if it sees nothing, for
    which `why` is the reason if it is not simply a text model."""

    support: MediaSupport | None = None
    encoder: MediaEncoder | None = None
    why: str = ""

    @property
    def vision(self) -> Vision:
        """What requests are prepared with."""
        return NoVision(self.why) if self.support is None else self.support

    @property
    def nbytes(self) -> int:
        """The bytes of decoded pictures, and of what decodes one at present. Any thread may ask."""
        return 0 if self.support is None else self.support.store.nbytes

    def drop_features(self) -> None:
        """Frees what pictures take: features that are kept for later prompts, and pixels that no tower reads yet."""
        if self.support is not None:
            self.support.store.give_way()
        if self.encoder is not None:
            self.encoder.clear()


def open_sight(parts: Parts) -> Sight:
    """Loads the tower of a model that has one, on the engine thread.

    Without sight if anything is wrong with the tower or the files about it: the log says what."""
    plan = plan_tower(parts.model)
    if parts.settings.no_media:
        return Sight(why="the runner was started with --no-media")
    if plan is None:
        return Sight(why="" if blindness(parts.model.config, Choice.of(parts.settings)) else NOT_INSTALLED)
    try:
        support, sections = prepare(parts.model, plan, parts.tokenizer)
        family = support.family
        forward = MediaForward(parts.loaded.module, sections=sections, sees_both_ways=family.bidirectional)
        tower = load_tower(plan, parts.settings.dtype, parts.free_bytes)
    except RunnerError as error:
        log.warning("the model sees no pictures", why=str(error))
        return Sight(why=f"its vision is unavailable: {error}")
    log.info("the model sees pictures", tower=plan.family, bytes=plan.nbytes)
    wake = partial(parts.post, None)
    return Sight(support, MediaEncoder(tower, support.store, forward, wake, splits=family.splits))


def prepare(model: OpenedModel, plan: TowerPlan[Tower], tokenizer: Tokenizer) -> tuple[MediaSupport, Sequence[int]]:
    """Returns what the files say about the pictures of a model with this tower: its support, and the numbers of
    frequencies that turn by time, row and column, empty for positions of one channel.

    Raises ModelError for any fault, say a token that stands for pictures and is missing.
    """
    if plan.fault:
        raise ModelError(plan.fault)
    family = plan.kind.family.from_config(model.config, model.json_file(PREPROCESSOR))
    start, soft, end = (_id(token, tokenizer) for token in family.around(model.config))
    support = MediaSupport(family, start, soft, end, MediaNames(), RowStore(family))
    return support, _sections(model) if family.mrope else ()


def _id(token: int | str, tokenizer: Tokenizer) -> int:
    if isinstance(token, int):
        return token
    ids = tokenizer.encode_without_bos(token)
    if len(ids) != 1:
        raise ModelError(f"the tokenizer has no token {token!r}, which stands for pictures")
    return ids[0]


def _sections(model: OpenedModel) -> Sequence[int]:
    text = text_config(model.config, model.family)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    sections = (rope.get("mrope_section") if isinstance(rope, dict) else None) or _SECTIONS
    if not (isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)):
        raise ModelError(f"config.json: mrope_section: want three numbers, found {sections!r}")
    return sections


# --- The line of `mlx-runner check`, from headers alone.

_WIDTH = isqrt(MAX_PIXELS)
_HEIGHTS = range(250, _WIDTH + 1, 250)
"""Heights that are tried for a picture of that width: the shape decides how many tokens fit into a budget."""


class MediaFacts(Facts, frozen=True, kw_only=True):
    """If the model sees none, `why` says why and the other fields are None; of mlx-vlm's models `tower` alone is known
    without loading them."""

    sees: bool
    why: str | None = None
    tower: str | None = None
    blocks: int | None = None
    dtype: str | None = None
    bytes: int | None = None
    """The tower's weights in memory."""
    tokens: int | None = None
    """The most soft tokens of one picture."""

    @property
    def text(self) -> str:
        if not self.sees:
            return f"no: {self.why or ''}"
        if self.bytes is None:
            return f"yes (with {self.tower})"
        blocks = f"{counted(self.blocks, 'block')}, " if self.blocks else ""
        return (
            f"yes ({self.tower} tower, {blocks}{self.dtype}, {shown(self.bytes)}; up to"
            f" {counted(self.tokens or 0, 'token')} a picture)"
        )


def media_facts(settings: CheckSettings, found: Examined) -> MediaFacts:
    """Returns whether a model would see."""
    model, plan = found.model, plan_tower(found.model)
    blind = blindness(model.config, Choice.of(settings))
    if model.family.of_mlx_vlm or (plan is None and not blind):
        why = blind if model.family.of_mlx_vlm else NOT_INSTALLED
        return MediaFacts(sees=False, why=why) if why else MediaFacts(sees=True, tower=model.family.import_name)
    if plan is None:
        family = f"pictures are not known here for the family {model.family.module}"
        return MediaFacts(sees=False, why=family if model.has_vision else "a text model")
    try:
        support, _ = prepare(model, plan, found.tokenizer)
        tower, types = plan_weights(plan, settings.dtype, found.budget_bytes)
    except ModelError as error:
        return MediaFacts(sees=False, why=str(error))
    amounts, _ = contents(tower, types)
    return MediaFacts(
        sees=True,
        tower=plan.family,
        blocks=plan.blocks,
        dtype=types.computes,
        bytes=sum(amount.bytes for amount in amounts),
        tokens=max(_tokens(support.family)),
    )


def _tokens(family: Family) -> Iterator[int]:
    """Yields the numbers of soft tokens of large pictures."""
    for height in _HEIGHTS:
        try:
            yield family.geometry(_WIDTH, height).tokens
        except MediaError:  # too narrow, or too wide
            continue
