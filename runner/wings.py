"""The wings of a runner. These lines are all that the rest knows of them: a wing that goes takes its folder and its
lines here. Imports no MLX, since a model is opened before."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runner.model.families import ChooseFamily, family_of
from runner.settings import CheckSettings, Settings

if TYPE_CHECKING:
    from runner.engine.parts import Wing


def chooser(settings: Settings | CheckSettings) -> ChooseFamily:
    """Returns the function that chooses the family of a model."""
    return next(_choosers(settings))


def _choosers(settings: Settings | CheckSettings) -> Iterator[ChooseFamily]:
    from runner.vlm.source import VlmChoice

    yield VlmChoice.of(settings)
    yield family_of


def wings_of(settings: Settings | CheckSettings) -> "Iterator[Wing]":
    """Yields the wings that an engine with these settings has, in the order in which they load."""
    from runner.drafts.opening import DraftsWing

    yield DraftsWing()
    from runner.media.wing import MediaWing

    yield MediaWing()
    from runner.vlm.wing import VlmWing

    yield VlmWing()
    from runner.grammar.wing import GrammarWing

    yield GrammarWing()
    from runner.embeddings.wing import EmbeddingsWing

    yield EmbeddingsWing()
    if settings.disk_cache is not None:
        from runner.disk.tier import DiskWing

        yield DiskWing()
