"""Opens the sight and the hearing of a model: towers, the preparation of media, and the forward over media.

If a tower has a fault, the text model is still served. It refuses that tower's kind of media with the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from runner.engine.parts import Parts
from runner.engine.ports import NoVision
from runner.errors import ModelError, RunnerError
from runner.logs import Log
from runner.media.encoder import MediaEncoder, OwnTowers
from runner.media.families import Around
from runner.media.forward import MediaForward
from runner.media.header import AUDIO, IMAGE
from runner.media.prompt import MediaNames
from runner.media.row_store import FamilyPictures, RowStore
from runner.media.support import Hearing, MediaSupport
from runner.media.towers.tower import SoundTower, Tower
from runner.media.towers.tower_plan import (
    PREPROCESSOR,
    SOUND_TOWERS,
    TowerPlan,
    load_tower,
    plan_sound_tower,
    plan_tower,
)
from runner.model import OpenedModel
from runner.model.module_config import text_config
from runner.tokenizer import Tokenizer

log = Log(__name__)
_SECTIONS = [11, 11, 10]
"""The default `mrope_section` of mlx-lm."""
Opened = TypeVar("Opened")


class Sight(NamedTuple):
    """The parts with which a model sees and hears: `support` for any thread, `encoder` for the engine thread. Without
    both, `why` is the reason; it is empty for a text model."""

    support: MediaSupport | None = None
    encoder: MediaEncoder | None = None
    why: str = ""

    def plug(self, parts: Parts) -> None:
        """Adds `support` and `encoder` to an engine, or the reason why the model has none."""
        if self.support is None or self.encoder is None:
            parts.vision = NoVision(self.why)
            return
        store = self.support.store
        parts.vision, parts.names = self.support, self.support.names
        parts.show, parts.shifted = self.encoder.begin, self.encoder.forward.shifted
        parts.counts.media = self.encoder.counts
        if parts.shares_memory:
            store.room_bytes = parts.free_bytes
        parts.helper_bytes.append(lambda: store.nbytes)
        parts.drop_unused += [store.give_way, self.encoder.clear]


def open_sight(parts: Parts) -> Sight:
    """Loads the towers of a model, on the engine thread. Logs a fault of a tower or its files."""
    if parts.settings.no_media:
        return Sight(why="the runner was started with --no-media")
    plan, sound_plan = plan_tower(parts.model), plan_sound_tower(parts.model)
    if plan is None and sound_plan is None:
        return Sight(why=parts.model.family.unseen)
    faults: dict[str, str] = {}
    seen = plan and _unless_faulty(lambda: _open_pictures(parts, plan), faults, IMAGE)
    heard = sound_plan and _unless_faulty(lambda: _open_sounds(parts, sound_plan), faults, AUDIO)
    if seen is None and heard is None:
        return Sight(why="; ".join(faults.values()))
    seeing, forward, tower = seen or (None, MediaForward(parts.loaded.module), None)
    hearing, sound_tower = heard or (None, None)
    support, towers = supported(parts.model, seeing, hearing, faults), OwnTowers(tower, sound_tower)
    splits = seeing is None or not seeing.family.bidirectional
    return Sight(support, MediaEncoder(towers, support.store, forward, partial(parts.post, None), splits=splits))


def supported(
    model: OpenedModel, seeing: FamilyPictures | None, hearing: Hearing | None, faults: Mapping[str, str]
) -> MediaSupport:
    """Returns the preparation of requests. `faults` maps kinds of media to the reason why a tower does not work."""
    none = "this model does not support {} input"
    refusals = {kind: f"{none.format(kind)}: {why}" for kind, why in faults.items()}
    if seeing is None:
        refusals.setdefault(IMAGE, none.format(IMAGE))
    if hearing is None and model.family.module in SOUND_TOWERS:
        refusals.setdefault(AUDIO, none.format(AUDIO))
    return MediaSupport(seeing, MediaNames(), RowStore(seeing), hearing, refusals)


def _unless_faulty(load: Callable[[], Opened], faults: dict[str, str], kind: str) -> Opened | None:
    """Returns the result of `load`. If `load` fails, logs the reason, adds it to `faults` and returns None."""
    name, lost = {IMAGE: ("vision", "the model sees no pictures"), AUDIO: ("hearing", "the model hears nothing")}[kind]
    try:
        return load()
    except RunnerError as error:
        log.warning(lost, why=str(error))
        faults[kind] = f"its {name} is unavailable: {error}"
        return None


def _open_pictures(parts: Parts, plan: TowerPlan[Tower]) -> tuple[FamilyPictures, MediaForward, Tower]:
    seeing = seeing_of(parts.model, plan, parts.tokenizer)
    both_ways, sections = seeing.family.bidirectional, seeing.sections
    forward = MediaForward(parts.loaded.module, sections=sections, sees_both_ways=both_ways)
    tower = load_tower(plan, parts.settings.dtype, parts.free_bytes)
    log.info("the model sees pictures", tower=plan.family, bytes=plan.nbytes)
    return seeing, forward, tower


def _open_sounds(parts: Parts, plan: TowerPlan[SoundTower]) -> tuple[Hearing, SoundTower]:
    hearing = hearing_of(parts.model, plan, parts.tokenizer)
    tower = load_tower(plan, parts.settings.dtype, parts.free_bytes)
    log.info("the model hears", tower=plan.family, bytes=plan.nbytes)
    return hearing, tower


def seeing_of(model: OpenedModel, plan: TowerPlan[Tower], tokenizer: Tokenizer) -> FamilyPictures:
    """Returns the preparation of pictures for the tower of `plan`. Raises ModelError for any fault in the files."""
    if plan.fault:
        raise ModelError(plan.fault)
    family = plan.kind.family.from_config(model.config, model.json_file(PREPROCESSOR))
    start, soft, end = _ids(family.around(model.config), tokenizer, "pictures")
    return FamilyPictures(family, start, soft, end, _sections(model) if family.mrope else ())


def hearing_of(model: OpenedModel, plan: TowerPlan[SoundTower], tokenizer: Tokenizer) -> Hearing:
    """Returns the preparation of sounds for the tower of `plan`. Raises ModelError for any fault in the files."""
    if plan.fault:
        raise ModelError(plan.fault)
    family = plan.kind.family.from_config(model.config)
    return Hearing(family, *_ids(family.around(model.config), tokenizer, "sounds"))


def _ids(around: Around, tokenizer: Tokenizer, what: str) -> tuple[int, int, int]:
    found: list[int] = []
    for token in around:
        ids = [token] if isinstance(token, int) else tokenizer.encode_without_bos(token)
        if len(ids) != 1:
            raise ModelError(f"the tokenizer has no token {token!r}, which stands for {what}")
        found += ids
    start, soft, end = found
    return start, soft, end


def _sections(model: OpenedModel) -> Sequence[int]:
    text = text_config(model.config, model.family)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    sections = (rope.get("mrope_section") if isinstance(rope, dict) else None) or _SECTIONS
    if not (isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)):
        raise ModelError(f"config.json: mrope_section: want three numbers, found {sections!r}")
    return sections
