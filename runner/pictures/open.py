"""Opens the sight of a model: the tower, the preparation of pictures, and the forward that takes them.

Whatever is wrong with a tower costs pictures only: the text model is served, and says why it sees none.
"""

from collections.abc import Callable, Sequence

from runner.errors import ModelError, RunnerError
from runner.logs import Log
from runner.model import OpenedModel
from runner.model.config import text_config
from runner.model.weights.load import LoadedModel
from runner.pictures.encoder import PictureEncoder
from runner.pictures.forward import PictureForward
from runner.pictures.pixels import PixelStore
from runner.pictures.prompt import PictureNames
from runner.pictures.sight import Sight
from runner.pictures.support import PictureSupport
from runner.pictures.towers.load import PREPROCESSOR, TowerPlan, load_tower, plan_tower
from runner.settings import Settings
from runner.tokenizer import Tokenizer

log = Log(__name__)
_SECTIONS = [11, 11, 10]
"""Of a config that names none; as in mlx-lm."""


def open_sight(
    model: OpenedModel,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    settings: Settings,
    budget_bytes: int,
    wake: Callable[[], None],
    *,
    slow_blas: bool,
) -> Sight:
    """Loads the tower of a model that has one, on the engine thread. `wake` is called when pixels are there.

    Without sight if anything is wrong with the tower or the files about it: the log says what."""
    plan = plan_tower(model)
    if plan is None:
        return Sight()
    if settings.no_media:
        return Sight(why="the runner was started with --no-media")
    try:
        support, sections = prepare(model, plan, tokenizer)
        family = support.family
        forward = PictureForward(loaded.module, sections=sections, sees_both_ways=family.bidirectional)
        tower = load_tower(plan, settings.dtype, budget_bytes, slow_blas=slow_blas)
    except RunnerError as error:
        log.warning("the model sees no pictures", why=str(error))
        return Sight(why=f"its vision is unavailable: {error}")
    log.info("the model sees pictures", tower=plan.family, bytes=plan.nbytes)
    return Sight(support, PictureEncoder(tower, support.pixels, forward, wake, splits=family.splits))


def prepare(model: OpenedModel, plan: TowerPlan, tokenizer: Tokenizer) -> tuple[PictureSupport, Sequence[int]]:
    """Returns what the files say about the pictures of a model with this tower: its support, and the numbers of
    frequencies that turn by time, row and column, empty for positions of one channel.

    Raises ModelError for any fault, say a token that stands for pictures and is missing.
    """
    if plan.fault:
        raise ModelError(plan.fault)
    family = plan.kind.family.from_config(model.config, model.json_file(PREPROCESSOR))
    start, soft, end = (_id(token, tokenizer) for token in family.around(model.config))
    support = PictureSupport(family, start, soft, end, PictureNames(), PixelStore(family))
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
