"""The lines of `mlx-runner check` about media. Reads the headers of a model's files, but no weights."""

from collections.abc import Iterator
from math import isqrt

from runner.engine.parts import Examined, Facts
from runner.errors import MediaError, ModelError
from runner.media.families import PictureFamily
from runner.media.header import MAX_PIXELS
from runner.media.open import hearing_of, seeing_of
from runner.media.sound_header import RATE
from runner.media.towers.tower_plan import AnyTower, TowerPlan, plan_sound_tower, plan_tower, plan_weights
from runner.settings import CheckSettings
from runner.sizes import counted, sized

_WIDTH = isqrt(MAX_PIXELS)
_HEIGHTS = range(250, _WIDTH + 1, 250)
"""The heights that `_tokens` tries with `_WIDTH`: the number of soft tokens depends on a picture's shape."""
_SECONDS = 20


class TowerFacts(Facts, frozen=True, kw_only=True):
    """The facts about one tower. If the model does not accept the tower's media, `why` is the reason and the other
    fields are None. For a model of mlx-vlm, only `tower` is known before the model is loaded."""

    why: str | None = None
    tower: str | None = None
    blocks: int | None = None
    dtype: str | None = None
    bytes: int | None = None
    """The size of the tower's weights in memory."""

    def _text(self, extent: str) -> str:
        if self.tower is None:
            return f"no: {self.why or ''}"
        if self.bytes is None:
            return f"yes (with {self.tower})"
        blocks = f"{counted(self.blocks, 'block')}, " if self.blocks else ""
        return f"yes ({self.tower} tower, {blocks}{self.dtype}, {sized(self.bytes)}; {extent})"


class PictureFacts(TowerFacts, frozen=True, kw_only=True):
    sees: bool
    tokens: int | None = None
    """The most soft tokens of one picture."""

    @property
    def text(self) -> str:
        return self._text(f"up to {counted(self.tokens or 0, 'token')} a picture")


class SoundFacts(TowerFacts, frozen=True, kw_only=True):
    hears: bool
    tokens: float | None = None
    """The number of soft tokens for a second of sound."""

    @property
    def text(self) -> str:
        return self._text(f"{self.tokens or 0:g} tokens a second")


def picture_facts(settings: CheckSettings, found: Examined) -> PictureFacts:
    model, plan = found.model, plan_tower(found.model)
    if plan is None:
        family = f"this runner knows no pictures for the family {model.family.module}"
        return PictureFacts(sees=False, why=model.family.unseen or (family if model.has_vision else "a text model"))
    try:
        tokens = max(_tokens(seeing_of(model, plan, found.tokenizer).family))
        dtype, nbytes = _weights(settings, found, plan)
    except ModelError as error:
        return PictureFacts(sees=False, why=str(error))
    return PictureFacts(sees=True, tower=plan.family, blocks=plan.blocks, dtype=dtype, bytes=nbytes, tokens=tokens)


def sound_facts(settings: CheckSettings, found: Examined) -> SoundFacts | None:
    """Returns the facts about a model's hearing; None if neither its config nor its tensors mention sound."""
    model, plan = found.model, plan_sound_tower(found.model)
    if plan is None:
        family = f"this runner knows no sound for the family {model.family.module}"
        return SoundFacts(hears=False, why=family) if model.has_audio else None
    try:
        clip = hearing_of(model, plan, found.tokenizer).family.clip(_SECONDS * RATE)
        dtype, nbytes = _weights(settings, found, plan)
    except ModelError as error:
        return SoundFacts(hears=False, why=str(error))
    tokens = None if clip is None else clip.tokens / _SECONDS
    return SoundFacts(hears=True, tower=plan.family, blocks=plan.blocks, dtype=dtype, bytes=nbytes, tokens=tokens)


def _weights(settings: CheckSettings, found: Examined, plan: TowerPlan[AnyTower]) -> tuple[str, int]:
    """Returns the type in which a tower computes, and the bytes of its weights. Raises as `plan_weights` does."""
    tower, types = plan_weights(plan, settings.dtype, found.budget_bytes)
    return types.computes, types.nbytes(tower)


def _tokens(family: PictureFamily) -> Iterator[int]:
    """Yields the number of soft tokens of a large picture, for each height in `_HEIGHTS`."""
    for height in _HEIGHTS:
        try:
            yield family.geometry(_WIDTH, height).tokens
        except MediaError:  # the family refuses the shape
            continue
