"""Records the embeddings of mlx-vlm for an EmbeddingGemma 2, of texts and of media, so that tests need no mlx-vlm.

    python -m tests.model.embeddings.record FOLDER

where FOLDER is that of `tests.lib.mlx_vlm`.
"""

import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from protocol import Media
from runner.media.header import AUDIO, IMAGE
from runner.media.open import hearing_of, seeing_of, supported
from runner.media.prompt import MediaPrompt, Picture
from runner.media.support import MediaSupport
from runner.media.towers import Grid, SoundTower, Tower, load_tower, plan_sound_tower, plan_tower
from runner.model import open_model
from runner.model.weights.loading import load
from runner.tokenizer import open_tokenizer
from scripts.tools.models.checkpoints import VOCABULARY_SIZE
from scripts.tools.models.png import png
from scripts.tools.models.sources import published, write_source
from scripts.tools.models.sources_form import ENCODERS
from scripts.tools.models.sources_towers import EMBEDDING
from scripts.tools.models.wav import noise, wav
from tests.lib.mlx_vlm import module, register
from tests.lib.steps import result_of
from tests.unit.media.pictures import Here

RECORDED = Path(__file__).parent / "recorded.safetensors"
RECORDED_MEDIA = Path(__file__).parent / "recorded_media.safetensors"
ENCODER = "embedding-gemma2"
LENGTHS = (1, 2, 9, 20, 2000)
"""Less and more than a window."""
NAME = "embedding-gemma2-media"
PICTURE, OTHER = Media(data=png(96, 48, (200, 30, 40)), kind=IMAGE), Media(data=png(48, 96, (20, 90, 40)), kind=IMAGE)
SOUND = Media(data=wav(noise(9000)), kind=AUDIO)
TEXT = [5, 6, 7]
CASES: dict[str, list[Media]] = {
    "picture": [PICTURE],
    "sound": [SOUND],
    "both": [PICTURE, SOUND],
    "the other way round": [SOUND, OTHER],
}


def tokens(length: int, start: int = 0) -> list[int]:
    return [(7 * (start + index) + index * index) % VOCABULARY_SIZE for index in range(length)]


def text_embedding(length: int) -> mx.array:
    """Returns the embedding [D] of the first tokens."""
    source, prefix = ENCODERS[ENCODER], "model.language_model."
    config = cast("dict[str, object]", source.config["text_config"])
    text: Any = module("embedding_gemma2.language").TextModel(module("embedding_gemma2.config").TextConfig(**config))
    weights = published(source, "float32")
    text.load_weights([(name.removeprefix(prefix), array) for name, array in weights.items()])
    ids = mx.array([tokens(length)])
    hidden = text(text.embed_tokens(ids) * text.config.hidden_size**0.5, mx.ones_like(ids))
    pooling = module("pooling")
    found: mx.array = pooling.normalize_embeddings(pooling.mean_pooling(hidden, mx.ones_like(ids)))[0]
    return found


class Model(NamedTuple):
    """The encoder, and what is around it."""

    encoder: Any
    support: MediaSupport
    tower: Tower
    sound_tower: SoundTower

    def prompt(self, media: list[Media]) -> MediaPrompt:
        """A text with media behind it."""
        numbered = [Media(data=each.data, kind=each.kind, id=number) for number, each in enumerate(media)]
        return result_of(self.support.join(TEXT, numbered, [8], bool))

    def rows(self, prompt: MediaPrompt) -> list[np.ndarray]:
        """Returns the inputs of the towers."""
        return [self.support.store._decoded(span.item, bool) for span in prompt.spans]


@cache
def model() -> Model:
    with TemporaryDirectory() as folder:
        opened = open_model(str(write_source(Path(folder) / "tiny", NAME)), Path("unused"))
        plan, sound_plan = plan_tower(opened), plan_sound_tower(opened)
        assert plan is not None
        assert sound_plan is not None
        tokenizer = open_tokenizer(opened.file)
        seeing, hearing = seeing_of(opened, plan, tokenizer), hearing_of(opened, sound_plan, tokenizer)
        support = supported(opened, seeing, hearing, {})
        support.store._decoder = Here()
        return Model(load(opened).module, support, load_tower(plan), load_tower(sound_plan))


def theirs() -> Any:
    """Returns mlx-vlm's model with the same weights."""
    source = EMBEDDING[NAME]
    kinds = module("embedding_gemma2.config")
    config = kinds.ModelConfig.from_dict({**source.config, "pad_token_id": 0})
    own = module("embedding_gemma2.embedding_gemma2").Model(config)
    weights = own.sanitize(published(source, "float32"))
    own.load_weights(
        [(name, array) for name, array in weights.items()], strict=False
    )  # clamps that do nothing are missing
    return own


def embedding(own: Any, name: str) -> mx.array:
    prompt = model().prompt(CASES[name])
    given: dict[str, mx.array] = {}
    for span, rows in zip(prompt.spans, model().rows(prompt), strict=True):
        if isinstance(span.item, Picture):
            grid = Grid(span.item.geometry.rows, span.item.geometry.columns)
            places = [(column, row) for row in range(grid.rows) for column in range(grid.columns)]
            given |= {"pixel_values": mx.array(rows)[None] / 255, "image_position_ids": mx.array([places])}
        else:
            given["input_features"] = mx.array(rows)[None]
    ids = mx.array([prompt.ids])
    assert max(prompt.ids) < VOCABULARY_SIZE
    return cast("mx.array", own(ids, **given).text_embeds[0])


if __name__ == "__main__":
    register(Path(sys.argv[1]), ("embedding_gemma2", "gemma4"))
    own = theirs()
    mx.save_safetensors(str(RECORDED), {str(length): text_embedding(length) for length in LENGTHS})
    mx.save_safetensors(str(RECORDED_MEDIA), {name: embedding(own, name) for name in CASES})
