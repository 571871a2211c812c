"""Records the embeddings of mlx-vlm for an EmbeddingGemma 2, so that the test needs no mlx-vlm.

    python -m tests.model.embeddings.record FOLDER

where FOLDER is that of `tests.lib.mlx_vlm`.
"""

import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from scripts.tools.models.checkpoints import VOCABULARY_SIZE
from scripts.tools.models.sources import published
from scripts.tools.models.sources_form import ENCODERS
from tests.lib.mlx_vlm import module, register

RECORDED = Path(__file__).parent / "recorded.safetensors"
ENCODER = "embedding-gemma2"
LENGTHS = (1, 2, 9, 20, 2000)
"""Less and more than a window."""


def tokens(length: int, start: int = 0) -> list[int]:
    return [(7 * (start + index) + index * index) % VOCABULARY_SIZE for index in range(length)]


def embedding(length: int) -> mx.array:
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


if __name__ == "__main__":
    register(Path(sys.argv[1]), ("embedding_gemma2", "gemma4"))
    mx.save_safetensors(str(RECORDED), {str(length): embedding(length) for length in LENGTHS})
