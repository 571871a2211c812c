"""Assistants of Gemma 4: small models that draft from the hidden states of their target. An assistant has no keys and
values of its own, but attends to the target's. Owner: the engine thread.

The module has four parts, in this order: the target's keys and values, the network, the drafts, loading."""

import runner.process.lean_mlx_lm  # noqa: F401  # isort: skip  # before anything of mlx_lm is imported

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import gemma4, gemma4_text
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from runner.cache.layers.rows import KVRows
from runner.drafts.drafting import DraftedAnswer
from runner.drafts.hidden_states import HiddenStateDrafter, SeenText, read_drafts
from runner.drafts.target import Draw, Target, target_of, without
from runner.errors import ModelError
from runner.logs import exception_line
from runner.model.architectures import Config, Family
from runner.model.fields import size
from runner.model.module_config import text_config
from runner.model.opened import OpenedModel, open_checkpoint
from runner.model.sources.checkpoint import ModelCheckpoint
from runner.model.weights.assembly import placeholders
from runner.model.weights.loading import LoadedModel, assemble_part, load_part
from runner.model.weights.packed import Arrays
from runner.model.weights.parameters import parameters_of


class Place(NamedTuple):
    """The layer of the target to which all layers of one kind of an assistant attend: the last layer of that kind that
    computes keys and values."""

    layer: int
    """The index of the layer's cache among the target's caches."""
    heads: int
    width: int
    """The width of a head."""


class Shared(NamedTuple):
    """The target's keys and values [B, heads, tokens, width], to which the layers of an assistant attend. The tokens
    may be in any order, since the keys are already rotated to their places."""

    keys: mx.array | None
    values: mx.array | None
    mask: mx.array | None = None
    """True for each token that a row sees, bool [B, 1, 1, tokens]; None if each row sees all tokens."""
    cache: object = None
    """A cache that returns packed keys and values to the attention; None if `keys` and `values` are plain."""


class PackedCache(Protocol):
    """A cache of keys and values in a few bits. mlx-lm's attention recognises such a cache by `bits`, too."""

    bits: object
    group_size: int

    def keys_and_values(self) -> object: ...


class _Packed:
    """A stand-in for a layer's own cache: returns the packed keys and values of the target's layer, and adds none."""

    def __init__(self, cache: PackedCache) -> None:
        self.bits = cache.bits
        self.group_size = cache.group_size
        self._held = cache.keys_and_values()

    def update_and_fetch(self, keys: None, values: None) -> object:  # noqa: ARG002
        return self._held


def places_of(target: Module) -> dict[str, Place]:
    """Returns the `Place` of each kind of layer of the target, by its kind. The target may be made of placeholders.
    Raises ModelError if the target is no Gemma 4."""
    text = target.language_model if isinstance(target, gemma4.Model) else target
    if not isinstance(text, gemma4_text.Model):
        raise ModelError(f"it drafts for Gemma 4, not for {type(target).__module__.rpartition('.')[2]}")
    own = text.args.num_hidden_layers - text.args.num_kv_shared_layers
    attentions = [layer.self_attn for layer in text.model.layers[:own]]
    return {
        attention.layer_type: Place(index, attention.n_kv_heads, attention.head_dim)
        for index, attention in enumerate(attentions)
    }


def read_shared(
    places: Mapping[str, Place], kinds: Iterable[str], layers: Sequence[object], rows: Sequence[int] = (0,)
) -> dict[str, Shared]:
    """Returns the target's keys and values of these kinds and rows, by kind. Release them before the target's next
    forward, else MLX copies them there. Raises TypeError for a cache of a type that Gemma 4 does not have."""
    return {kind: _shared(layers[places[kind].layer], rows) for kind in kinds}


def _shared(cache: object, rows: Sequence[int]) -> Shared:
    if hasattr(cache, "bits"):
        return Shared(None, None, cache=_Packed(cast("PackedCache", cache)))
    if isinstance(cache, KVRows):
        found = (*cache.keys_and_values(), cache.visible())
        return Shared(*(found if len(rows) == len(cache.lengths) else (x[mx.array([*rows])] for x in found)))
    if type(cache) not in (KVCache, RotatingKVCache):
        raise TypeError(f"an assistant cannot read a {type(cache).__name__}")
    kept = cast("KVCache | RotatingKVCache", cache)
    start, stop = _window(kept) if isinstance(kept, RotatingKVCache) else (0, kept.offset)
    return Shared(*(cast("mx.array", x)[..., start:stop, :] for x in (kept.keys, kept.values)))


def _length(cache: object, row: int) -> object:
    """Returns the number of a row's tokens that a cache has seen, or anything else if the cache does not count them."""
    return cache.lengths[row] if isinstance(cache, KVRows) else getattr(cache, "offset", None)


def _window(ring: RotatingKVCache) -> tuple[int, int]:
    """Returns the start and the end of the last `max_size` tokens in the ring's buffers. The buffers of a full ring
    hold exactly these tokens. Buffers that still grow have free room at their end. After a forward over several tokens,
    the buffers also hold older tokens at their start."""
    length = cast("mx.array", ring.keys).shape[-2]
    if length == ring.max_size < ring.offset:
        return 0, length
    return max(0, ring._idx - ring.max_size), ring._idx


class AssistantSizes(NamedTuple):
    """The sizes in an assistant's `config.json` that its text model's `ModelArgs` lack."""

    backbone: int
    """The width of the target's hidden states."""
    centroids: int
    """The number of groups into which the vocabulary is divided; 0 if every token is scored."""
    chosen: int
    """The number of groups whose tokens are scored in a step."""


class AssistantModule(Module):
    """The network of an assistant: layers of Gemma 4 without keys and values. The first projection joins the embedding
    of a token and the hidden state before that token; the last projection makes the hidden state for the next draft."""

    def __init__(self, args: ModelArgs, sizes: AssistantSizes, *, tied: bool) -> None:
        Module.__init__(self)  # MLX's `__init__` is not typed
        width = args.hidden_size
        self.pre_projection = Linear(2 * sizes.backbone, width, bias=False)
        self.post_projection = Linear(width, sizes.backbone, bias=False)
        self.model = _Body(args, tied=tied)
        if not tied:
            self.lm_head = Embedding(args.vocab_size, width)
        if sizes.centroids:
            self.masked_embedding = _Groups(width, args.vocab_size, sizes)

    def __call__(
        self, embedded: mx.array, hidden: mx.array, shared: Mapping[str, Shared], positions: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Maps the scaled embedding of a token and the hidden state before that token, [B, 1, D] each, to the lazy
        logits [B, 1, V] and the hidden state [B, 1, D] of the next draft. The queries stand at `positions`, int [B]."""
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in self.model.layers:
            keys, values, mask, cache = shared[layer.layer_type]
            x, _, _ = layer(x, mask, cache, shared_kv=(keys, values), offset=positions)
        x = self.model.norm(x)
        table = self.lm_head if "lm_head" in self else self.model.embed_tokens
        logits = self.masked_embedding(x, table) if "masked_embedding" in self else table.as_linear(x)
        return logits, self.post_projection(x)


class _Body(Module):
    def __init__(self, args: ModelArgs, *, tied: bool) -> None:
        Module.__init__(self)
        if tied:
            self.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
        self.layers: Sequence[DecoderLayer] = [DecoderLayer(args, index) for index in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class _Groups(Module):
    """The output layer of an assistant that scores only the tokens of the most promising groups."""

    def __init__(self, width: int, vocab_size: int, sizes: AssistantSizes) -> None:
        Module.__init__(self)
        self.centroids = Linear(width, sizes.centroids, bias=False)
        self.token_ordering = mx.arange(vocab_size)
        """The ids of all tokens, group by group."""
        self._sizes = sizes

    def __call__(self, x: mx.array, table: Embedding) -> mx.array:
        """Maps hidden states [B, 1, W] to logits [B, 1, V]; `table` has the embeddings of all tokens. Tokens outside of
        the chosen groups get -inf."""
        chosen = mx.argpartition(self.centroids(x), kth=-self._sizes.chosen, axis=-1)[..., -self._sizes.chosen :]
        tokens = self.token_ordering.reshape(self._sizes.centroids, -1)[chosen].flatten(-2)  # [B, 1, tokens]
        scores = (table(tokens) @ x[..., None]).squeeze(-1)
        everything = mx.full((*x.shape[:-1], self.token_ordering.size), -mx.inf, scores.dtype)
        return mx.put_along_axis(everything, tokens, scores, axis=-1)


class Assistant(NamedTuple):
    """An assistant and its target. Owner: the engine thread."""

    module: AssistantModule
    target: Target
    places: Mapping[str, Place]
    kinds: frozenset[str]
    """The kinds of the assistant's layers."""
    suppressed: tuple[int, ...] = ()
    """Tokens that must never be chosen."""

    def step(
        self, tokens: mx.array, hidden: mx.array, shared: Mapping[str, Shared], positions: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Returns the lazy logits [B, 1, V] of the token after `tokens` [B, 1], and the hidden state [B, 1, D] for the
        next step. `hidden` is the state before `tokens`; `shared` and `positions` are as in `AssistantModule`."""
        logits, after = self.module(self.target.embed(tokens), hidden, shared, positions)
        return without(self.suppressed, logits), after


class AssistantDrafter(HiddenStateDrafter[SeenText]):
    """Drafts with an assistant, from the hidden state before the last token of each answer, and from the target's keys
    and values. The queries of all drafts stand at the last position that the target has computed, since assistants are
    trained in this way. Owner: the engine thread."""

    def __init__(self, name: str, assistant: Assistant) -> None:
        super().__init__(name, [assistant.target.norm], self.longest_forward, SeenText)
        self.assistant = assistant

    def most_bytes(self, answers: int) -> int:
        row_bytes = self.assistant.target.norm["weight"].shape[0] * mx.float32.size
        return cast("int", 2 * answers * self.longest_forward * row_bytes)

    def prepare(self, answer: DraftedAnswer, text: SeenText, layers: Sequence[object]) -> bool:
        found = [_length(layers[self.assistant.places[kind].layer], answer.row) for kind in self.assistant.kinds]
        return text.first_waiting(answer.position) is not None and all(each == answer.position for each in found)

    def draft(
        self,
        answers: Sequence[DraftedAnswer],
        texts: Sequence[SeenText],
        layers: Sequence[object],
        most: int,
        draw: Draw,
    ) -> Sequence[Sequence[int]]:
        shared = read_shared(self.assistant.places, self.assistant.kinds, layers, [each.row for each in answers])
        states = []
        for answer, text in zip(answers, texts, strict=True):
            text.skip(answer.position - 1)
            states.append(text.waiting(answer.position - 1, answer.position))
        before = mx.concatenate(states)
        positions = mx.array([each.position - 1 for each in answers])
        drafts: list[mx.array] = []
        tokens = mx.array([[each.session.recorded[-1]] for each in answers])
        for _ in range(most):
            logits, before = self.assistant.step(tokens, before, shared, positions)
            drafts.append(draw(logits[:, -1]))
            tokens = drafts[-1][:, None]
            mx.async_eval(tokens)
        return read_drafts(drafts)


_ARCHITECTURES = frozenset({
    "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM", "gemma4_assistant", "gemma4_unified_assistant",
})  # fmt: skip
_FAMILY = Family(
    "gemma4_text",
    text="text_config",
    required=("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"),
    defaults={"head_dim": 256},
)
"""The text model of Gemma 4: an assistant is made of its layers."""
_LEFTOVERS = re.compile(r"model\.layers\.\d+\.self_attn\.(?:[kv]_proj|k_norm)\.")
"""The names of tensors that compute keys and values. Some packages have them, but no assistant uses them."""
_BACKBONE = "backbone_hidden_size"
_CENTROIDS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}
_ORDERING = "masked_embedding.token_ordering"


def is_assistant(architecture: str, config: Config) -> bool:
    """Returns True if a model with this `config.json` is an assistant."""
    return architecture in _ARCHITECTURES or _BACKBONE in config


def open_assistant(checkpoint: ModelCheckpoint) -> OpenedModel:
    """Interprets the headers of an assistant. Raises ModelError if they make no assistant."""
    opened = open_checkpoint(checkpoint, family=_FAMILY)
    tensors = {name: tensor for name, tensor in opened.tensors.items() if not _LEFTOVERS.match(name)}
    if not _is_tied(opened):
        tensors.pop("model.embed_tokens.weight", None)
    _sizes_of(opened)
    _kinds_of(opened)
    return opened._replace(tensors=tensors)


def _is_tied(opened: OpenedModel) -> bool:
    """Returns True if an assistant scores tokens with its table of embeddings. Without that, the table is unused."""
    return text_config(opened.module_config, opened.family).get("tie_word_embeddings") is True


def _kinds_of(opened: OpenedModel) -> list[str]:
    """Returns the kind of each layer of an assistant. Raises ModelError unless `config.json` names them all."""
    text = text_config(opened.module_config, opened.family)
    kinds, count = text.get("layer_types"), text.get("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(f"config.json: layer_types must name the kind of each of the {count} layers, found {kinds!r}")
    return kinds


def _sizes_of(opened: OpenedModel) -> AssistantSizes:
    """Returns the sizes of an assistant. Raises ModelError for sizes that are invalid or contradict each other."""
    config = opened.config
    backbone = size(config, _BACKBONE)
    if config.get("use_ordered_embeddings") is not True:
        return AssistantSizes(backbone, 0, 0)
    centroids, chosen = (size(config, name, default) for name, default in _CENTROIDS.items())
    if opened.vocab_size % centroids or chosen > centroids:
        raise ModelError(
            f"config.json: {opened.vocab_size} tokens cannot be in {centroids} groups of one size, {chosen} of them"
            " chosen"
        )
    return AssistantSizes(backbone, centroids, chosen)


def check_assistant(opened: OpenedModel, target: OpenedModel, loaded: LoadedModel) -> None:
    """Raises ModelError unless an assistant fits the target. `loaded` is the target; it may be made of placeholders."""
    rehearsed, places = assemble_assistant(opened, placeholders(opened)), places_of(loaded.module)
    width = cast("int", target_of(loaded).norm["weight"].shape[0])
    backbone = _sizes_of(opened).backbone
    if backbone != width:
        raise ModelError(f"it drafts for a model that is {backbone} wide, and this one is {width} wide")
    if opened.vocab_size != target.vocab_size:
        raise ModelError(
            f"its vocabulary differs from the model's: {opened.vocab_size} tokens instead of {target.vocab_size}"
        )
    for layer in rehearsed.model.layers:
        kind, place = layer.layer_type, places.get(layer.layer_type)
        if place is None:
            raise ModelError(f"it reads layers of {kind}, and the model has none")
        attention = layer.self_attn
        if attention.head_dim != place.width or attention.n_heads % place.heads:
            raise ModelError(
                f"its {attention.n_heads} heads of {attention.head_dim} numbers cannot attend to the model's"
                f" {place.heads} heads of {place.width} ({kind})"
            )


def load_assistant(
    opened: OpenedModel, loaded: LoadedModel, dtype: str = "keep", budget_bytes: int | None = None
) -> AssistantDrafter:
    """Loads an assistant for the target `loaded`, for which `check_assistant` must have accepted it. Raises ModelError,
    and the errors of the first forward.

    `dtype` is as for `weights.loading.load`; `budget_bytes` is the part of the budget that is left."""
    module = load_part(opened, partial(assemble_assistant, opened), "the assistant", dtype, budget_bytes)
    _check_ordering(module)
    kinds = frozenset(_kinds_of(opened))
    assistant = Assistant(module, target_of(loaded), places_of(loaded.module), kinds, loaded.suppressed)
    mx.eval(_dummy_step(assistant))
    return AssistantDrafter(opened.name, assistant)


def assemble_assistant(opened: OpenedModel, arrays: Mapping[str, Arrays]) -> AssistantModule:
    """Builds the assistant's module with `arrays`, which stay lazy. Raises ModelError if a tensor does not fit."""
    return assemble_part(opened, lambda weights: (_built(opened), weights), arrays)


def _built(opened: OpenedModel) -> AssistantModule:
    text = text_config(opened.module_config, opened.family)
    layers = len(_kinds_of(opened))
    # No layer of an assistant computes keys and values, has experts, or takes an input of its own.
    fixed = {"num_kv_shared_layers": layers, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
    try:
        return AssistantModule(ModelArgs.from_dict({**text, **fixed}), _sizes_of(opened), tied=_is_tied(opened))
    except Exception as error:
        raise ModelError(f"config.json does not fit an assistant: {exception_line(error)}") from error


def _check_ordering(module: AssistantModule) -> None:
    """Raises ModelError unless each token is in exactly one group: MLX does not check the indices that it writes to."""
    ordering = parameters_of(module).get(_ORDERING)
    if ordering is not None and not mx.array_equal(mx.sort(ordering), mx.arange(ordering.size)).item():
        raise ModelError(f"tensor {_ORDERING} must list each token once")


def _dummy_step(assistant: Assistant) -> tuple[mx.array, mx.array]:
    """Returns the lazy results of a step with zeros. Computing them shows if MLX refuses one of the layers."""
    tokens = mx.zeros((1, 1), mx.uint32)
    hidden = assistant.target.embed(tokens)
    shared = {
        kind: Shared(*(mx.zeros((1, place.heads, 1, place.width), hidden.dtype) for _ in range(2)))
        for kind, place in assistant.places.items()
    }
    return assistant.step(tokens, hidden, shared, mx.array([0]))
