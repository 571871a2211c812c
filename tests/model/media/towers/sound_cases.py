"""Tiny towers of Gemma 4 for sound, with noise as their weights and rows, the same on every machine.

`recorded/sound.safetensors` has what mlx-vlm makes of them (see `record_gemma`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx

from runner.media.sound_header import MEL_BINS
from runner.media.towers.gemma4_sound import Gemma4SoundTower, Gemma4UnifiedSoundTower
from runner.media.towers.tower import SoundTower
from tests.model.media.towers.gemma_cases import WIDTH, Config, make_weights

RECORDED = Path(__file__).parent / "recorded" / "sound.safetensors"
CONFORMER: Config = {
    "model_type": "gemma4_audio",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "conv_kernel_size": 5,
    "residual_weight": 0.5,
    "attention_chunk_size": 12,
    "attention_context_left": 13,
    "attention_context_right": 0,
    "attention_logit_cap": 5.0,
    "attention_invalid_logits_value": -1e9,
    "gradient_clipping": 1e10,
    "rms_norm_eps": 1e-6,
    "output_proj_dims": 40,
}
UNIFIED: Config = {"model_type": "gemma4_unified_audio", "audio_samples_per_token": 64, "rms_norm_eps": 1e-6}


class Case(NamedTuple):
    """A tower, and the numbers of rows of sounds for it."""

    tower: type[SoundTower]
    audio: Config
    counts: tuple[int, ...]
    clamped: bool = False
    bits: int = 0
    """Of packed linears; 0 for none."""

    @property
    def config(self) -> Config:
        return {"text_config": {"hidden_size": WIDTH}, "audio_config": self.audio}


LENGTHS = (1, 12, 13, 24, 25)
"""Soft tokens: around one block and two."""
_ROWS = tuple(4 * each for each in LENGTHS)
CASES: Mapping[str, Case] = {
    "conformer": Case(Gemma4SoundTower, CONFORMER, (*_ROWS, 3, 49, 50)),
    "conformer-clamped": Case(Gemma4SoundTower, CONFORMER, _ROWS, clamped=True),
    "conformer-clipped": Case(Gemma4SoundTower, {**CONFORMER, "gradient_clipping": 1.0, "residual_weight": 0.7}, (52,)),
    "conformer-both-ways": Case(
        Gemma4SoundTower, {**CONFORMER, "attention_chunk_size": 5, "attention_context_right": 3}, (92,)
    ),
    "conformer-packed": Case(Gemma4SoundTower, CONFORMER, (52,), bits=8),
    "unified": Case(Gemma4UnifiedSoundTower, UNIFIED, (1, 7)),
    "unified-packed": Case(Gemma4UnifiedSoundTower, UNIFIED, (7,), bits=4),
}
NAMES = tuple(CASES)
SOUNDS = tuple((name, count) for name, case in CASES.items() for count in case.counts)


def make_tower(name: str) -> SoundTower:
    """The tower of a case, its weights as they are recorded; packed ones dense."""
    case = CASES[name]
    tower = case.tower(case.config)
    weights = make_weights(tower, clamped=case.clamped)
    weights = {key: rounded(array, case.bits) for key, array in weights.items()}
    tower.load_weights(list(tower.sanitize(weights).items()), strict=True)
    return tower


def rounded(array: mx.array, bits: int) -> mx.array:
    """What packing in groups of 32 leaves of a matrix."""
    if not bits or array.ndim != 2 or array.shape[1] % 32:
        return array
    return mx.dequantize(*mx.quantize(array, 32, bits), group_size=32, bits=bits)


def make_rows(name: str, count: int) -> mx.array:
    """Noise as rows, float32 [count, values]."""
    case = CASES[name]
    width = MEL_BINS if case.tower is Gemma4SoundTower else cast("int", case.audio["audio_samples_per_token"])
    mx.random.seed(count)
    return mx.random.randint(-1000, 1001, (count, width)).astype(mx.float32) / 500


def key(name: str, count: int) -> str:
    """The name of a recorded array."""
    return f"{name} {count}"
