"""The towers that this runner knows: one row for each mlx-lm module of the text model."""

from collections.abc import Mapping
from typing import NamedTuple

from runner.model.towers.gemma4 import Gemma4Tower
from runner.model.towers.gemma4_unified import Gemma4UnifiedTower
from runner.model.towers.glimmer import GlimmerTower
from runner.model.towers.nemotron_h import NemotronTower
from runner.model.towers.qwen3_5 import Qwen35Tower
from runner.model.towers.tower import Tower


class Row(NamedTuple):
    """`name` is for people. The first of `towers` that fits the config is the model's.

    `preprocessor` are fields that `preprocessor_config.json` overrides in `config.json`, if it has them.
    """

    name: str
    towers: tuple[type[Tower], ...]
    preprocessor: tuple[str, ...] = ()

    def tower(self, config: Mapping[str, object]) -> type[Tower]:
        """Returns the class for a whole `config.json`."""
        return next((tower for tower in self.towers if tower.fits(config)), self.towers[-1])


_QWEN3_5 = Row("qwen3.5", (Qwen35Tower,))

TOWERS: dict[str, Row] = {
    "gemma4": Row("gemma4", (Gemma4Tower, Gemma4UnifiedTower)),
    "muse_glimmer": Row("glimmer", (GlimmerTower,)),
    "nemotron_h": Row("nemotron_h", (NemotronTower,), ("norm_mean", "norm_std", "patch_size", "downsample_ratio")),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_next": _QWEN3_5,
}
"""mlx-lm module (`Family.module`) -> its row."""
