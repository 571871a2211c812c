"""The store with the models that the cases ask for."""

import json
from pathlib import Path

from scripts.tools.conformance import scripted_model
from scripts.tools.models.sources import write_source
from scripts.tools.models.store import Store, write_store

MAIN = "scripted:latest"
"""A long context, no BOS of its own."""
SMALL = "team/small:bos"
"""64 tokens of context, and a BOS in front of every prompt."""
SENTENCEPIECE = "spm:latest"
SEEING = "seeing:latest"
"""A Qwen 3.5 with a tower for pictures, its numbers random."""
HEARING = "hearing:latest"
"""A Gemma 4 with a conformer for sound and a tower for pictures, its numbers random."""
UNIFIED = "unified:latest"
"""A unified Gemma 4 that hears and sees, its numbers random."""
EMBEDDING = "embedding:latest"
"""An EmbeddingGemma 2 for texts alone, its numbers random."""
EMBEDDING_MEDIA = "embedding-media:latest"
"""An EmbeddingGemma 2 for texts, pictures and sounds, its numbers random."""
COHERE = "cohere:latest"
"""A Cohere2-MoE, its numbers random."""
_HEARING_CONTEXT = 4096
UNSUPPORTED = "hal:latest"
"""Its architecture is one that nobody has."""
ARCHITECTURE = "HAL9000ForCausalLM"


def write_models(directory: Path, key_heads: int = 1) -> Path:
    """Writes them all; returns the models directory. So many ranks can split the scripted ones as they have
    `key_heads`."""
    sources, store = directory / "sources", directory / "models"
    main = scripted_model.write_main(sources / "main", key_heads)
    write_store(store, MAIN, main)
    write_store(store, SMALL, scripted_model.write_small(sources / "small", key_heads))
    spelled = scripted_model.write_sentencepiece(sources / "sentencepiece", key_heads)
    write_store(store, SENTENCEPIECE, spelled)
    write_store(store, SEEING, write_source(sources / "seeing", "qwen3.5-seeing"))
    for name, source in ((HEARING, "gemma4-hearing"), (UNIFIED, "gemma4-unified-hearing")):
        _lengthen(write_store(store, name, write_source(sources / source, source)))
    write_store(store, EMBEDDING, write_source(sources / "embedding", "embedding-gemma2-texts"))
    write_store(store, EMBEDDING_MEDIA, write_source(sources / "embedding-media", "embedding-gemma2-media"))
    write_store(store, COHERE, write_source(sources / "cohere", "cohere2-moe"))
    _rename_architecture(write_store(store, UNSUPPORTED, main))
    return store


def _lengthen(store: Store) -> None:
    """Gives a model a context that holds half a minute of sound."""
    config = json.loads(store.blob_of("config.json").read_text())
    config["text_config"]["max_position_embeddings"] = _HEARING_CONTEXT
    store.put_json("config.json", config)


def _rename_architecture(store: Store) -> None:
    config = json.loads(store.blob_of("config.json").read_text())
    store.put_json("config.json", {**config, "architectures": [ARCHITECTURE], "model_type": "hal9000"})
