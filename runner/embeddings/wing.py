"""Adds the embedder and its endpoints to an engine whose model makes embeddings or decides."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from runner.device import device
from runner.embeddings.embedder import EmbeddingSizes, TextEmbedder, TextEncoder, TextToEmbed
from runner.engine.parts import Examined, Facts, Parts, Wing
from runner.engine.request import Limits
from runner.errors import ModelError
from runner.model import OpenedModel
from runner.model.architectures import DECIDERS, UNNEEDED
from runner.model.renamed import layer_overrides
from runner.model.weights.loading import load
from runner.model.weights.parameters import refuse_infinite
from runner.settings import CheckSettings

if TYPE_CHECKING:
    from runner.embeddings.decisions.clef import Clef
    from runner.embeddings.decisions.laya import Laya

_USUAL = {768: (128, 256, 512, 768)}
"""Size of an embedding -> sizes to which it may be cut, if config.json lists none."""
_NUMBER_BYTES = 4
_TRIED = (3, 40, 17)
"""The lengths of the texts of a trial, in tokens."""
_ALIKE = 0.999
"""The least cosine of two equal embeddings that were rounded differently in 16 bits."""
_SCORE_BYTES = 256 << 20
"""The memory for the attention scores of a block of queries, and for the arrays computed from them."""


class EmbeddingFacts(Facts, frozen=True, kw_only=True):
    """The embeddings that the model makes of texts."""

    size: int
    dimensions: list[int]
    """The sizes to which an embedding may be cut."""
    together: str | None = None
    """The fault of texts that are computed in one forward on this device, or an empty text. None without `--verify`."""

    @property
    def is_fault(self) -> bool:
        return bool(self.together)

    @property
    def text(self) -> str:
        cut = ", ".join(map(str, self.dimensions))
        tried = "" if self.together is None else f"; together here: {self.together or 'right'}"
        return f"{self.size} numbers a text{f', or the first of them ({cut})' if cut else ''}; no completions{tried}"


def fault_together(encoder: TextEncoder, vocab_size: int) -> str:
    """Computes texts of several lengths in one forward and each alone. Returns a fault if the embeddings differ, else
    an empty text. Raises the model's errors."""
    texts = [[(7 * at + length) % vocab_size for at in range(length)] for length in _TRIED]
    rows = mx.array([text + [0] * (max(_TRIED) - len(text)) for text in texts])
    *_, last = encoder.encode(rows, _TRIED)
    for text, found in zip(texts, last.arrays[0], strict=True):
        *_, alone = encoder.encode(mx.array([text]), [len(text)])
        cosine = cast("float", (found * alone.arrays[0][0]).sum().item())
        if not cosine > _ALIKE:
            return f"a text of {len(text)} tokens has a cosine of {cosine:.4f} with itself"
    return ""


def sizes_of(model: OpenedModel) -> EmbeddingSizes:
    """Returns the sizes of a model's embeddings. Raises ModelError for a fault in config.json."""
    text = model.module_config
    fields = ("embedding_dim", "hidden_size", "intermediate_size", "num_key_value_heads", "head_dim")
    full, hidden, inner, key_heads, width = (cast("int", text[field]) for field in fields)
    listed = model.config.get("embedding_dimensions")
    if listed is None:
        listed = [*_USUAL.get(full, ())]
    if not isinstance(listed, list) or not all(type(each) is int and 0 < each <= full for each in listed):
        raise ModelError(f"config.json: embedding_dimensions: want sizes up to {full}, found {listed!r}")
    layers = cast("Iterable[Mapping[str, int]]", layer_overrides(text).values())
    keys = max(
        (each.get("num_key_value_heads", key_heads) * each.get("head_dim", width) for each in layers),
        default=key_heads * width,
    )
    parts = {"image": UNNEEDED["vision"], "audio": UNNEEDED["audio"]}
    towers = (kind for kind, part in parts.items() if any(map(part.match, model.checkpoint.tensors)))
    return EmbeddingSizes(
        full=full,
        listed=tuple(listed),
        towers=frozenset(towers),
        token_bytes=_NUMBER_BYTES * (4 * hidden + 2 * max(keys, key_heads * width) + 3 * inner),
        least_bytes=_SCORE_BYTES,
    )


class DecisionFacts(Facts, frozen=True, kw_only=True):
    """The report's line about embeddings for a model that decides."""

    @property
    def text(self) -> str:
        return "none: it decides, by POST /v1/score"


class EmbeddingsWing(Wing):
    """Serves embeddings or decisions, if the model makes them."""

    name = "embeddings"

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        if found is None or not found.model.family.is_encoder:
            return {}
        if found.model.family.decides:
            return {"embeddings": DecisionFacts()}
        sizes, together = sizes_of(found.model), None
        if settings.verify:
            if device() == "cpu":
                mx.disable_compile()  # serving does so, too
            loaded = load(found.model, settings.dtype, found.budget_bytes)
            refuse_infinite(loaded.module)
            together = fault_together(cast("TextEncoder", loaded.module), found.model.vocab_size)
        facts = EmbeddingFacts(size=sizes.full, dimensions=[*sizes.listed], together=together)
        return {"embeddings": facts}

    def join(self, parts: Parts) -> None:
        if not parts.model.family.is_encoder:
            return
        chunk_tokens = parts.policy.chunk_tokens
        if parts.model.family.decides:
            decider = _decider(parts, chunk_tokens)
            encoder, together, warm = cast("TextEncoder", decider), decider.together, decider.warm
            sizes = EmbeddingSizes(0, (), frozenset(), decider.token_bytes, _SCORE_BYTES)
        else:
            decider, encoder, together, warm = None, cast("TextEncoder", parts.loaded.module), True, TextToEmbed([0, 0])
            sizes = sizes_of(parts.model)
        embedder = TextEmbedder(encoder, sizes, chunk_tokens, parts.free_bytes, parts.show, together=together)
        parts.beside.append(embedder)
        parts.counts.embeddings = embedder.counts
        parts.warm_up = partial(embedder.warm_up, warm)
        if decider is not None:
            from runner.embeddings.decisions.decider import DecisionsEndpoint

            parts.encoder_use = DecisionsEndpoint(decider, embedder, parts.tokenizer, parts.post).use
        else:
            from runner.embeddings.endpoint import EmbeddingsEndpoint

            limits = Limits(parts.model.context_length, parts.model.vocab_size)
            parts.encoder_use = EmbeddingsEndpoint(embedder, parts.tokenizer, parts.vision, limits, parts.post).use


def _decider(parts: Parts, chunk_tokens: int) -> "Clef | Laya":
    from runner.embeddings.decisions.clef import Clef  # imported here, since few models decide
    from runner.embeddings.decisions.laya import Laya

    module = parts.loaded.module
    if parts.model.family.module == DECIDERS["LayaForDecision"]:
        return Laya(module, parts.tokenizer)
    return Clef(module, parts.model.context_length, chunk_tokens)
