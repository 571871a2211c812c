"""An assistant: the keys and values of its target that it looks at, its network, and the drafts that it makes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import gemma4, gemma4_text
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from runner.cache.session import Session
from runner.drafts.target import Draw, HiddenStateDrafter, Target, without
from runner.errors import ModelError

# --- The keys and values of a target that its assistant looks at: those of its last layer of each kind that has any.


class Place(NamedTuple):
    """Where the keys and values of one kind of layer are, and what they are like."""

    layer: int
    """Among the caches of the target."""
    heads: int
    width: int
    """Of a head."""


class Shared(NamedTuple):
    """Keys and values [1, heads, tokens, width] that the attention of Gemma 4's layers takes in place of its own.

    Their order does not matter: the keys have been turned to their places, and all of them are visible.
    """

    keys: mx.array | None
    values: mx.array | None
    cache: object = None
    """What the attention asks for packed ones; None if they are plain."""


class _Packed:
    """Packed keys and values, for an attention that believes it writes into their cache."""

    def __init__(self, cache: QuantizedKVCache) -> None:
        self.bits = cache.bits
        self.group_size = cache.group_size
        self._held = cache.keys_and_values()

    def update_and_fetch(self, keys: None, values: None) -> object:  # noqa: ARG002
        return self._held


def places_of(target: Module) -> dict[str, Place]:
    """Returns the places by kind of layer. Raises ModelError if the target, placeholders or not, is no Gemma 4."""
    text = target.language_model if isinstance(target, gemma4.Model) else target
    if not isinstance(text, gemma4_text.Model):
        raise ModelError(f"it drafts for Gemma 4, not for {type(target).__module__.rpartition('.')[2]}")
    own = text.args.num_hidden_layers - text.args.num_kv_shared_layers
    attentions = [layer.self_attn for layer in text.model.layers[:own]]
    return {
        attention.layer_type: Place(index, attention.n_kv_heads, attention.head_dim)
        for index, attention in enumerate(attentions)
    }


def read(
    places: Mapping[str, Place], kinds: Iterable[str], layers: Sequence[object], position: int
) -> dict[str, Shared] | None:
    """Returns the keys and values of these kinds, which nothing may outlive a forward of the target: MLX would have to
    copy them. None unless the target's `layers` have seen `position` tokens, at least one. Raises TypeError for caches
    that Gemma 4 does not have."""
    found = {kind: layers[places[kind].layer] for kind in kinds}
    if position < 1 or any(getattr(cache, "offset", None) != position for cache in found.values()):
        return None
    return {kind: _shared(cache) for kind, cache in found.items()}


def _shared(cache: object) -> Shared:
    if type(cache) is QuantizedKVCache:
        return Shared(None, None, _Packed(cache))
    if type(cache) not in (KVCache, RotatingKVCache):
        raise TypeError(f"an assistant cannot read a {type(cache).__name__}")
    kept = cast("KVCache | RotatingKVCache", cache)
    start, stop = _window(kept) if isinstance(kept, RotatingKVCache) else (0, kept.offset)
    return Shared(*(cast("mx.array", x)[..., start:stop, :] for x in (kept.keys, kept.values)))


def _window(ring: RotatingKVCache) -> tuple[int, int]:
    """Returns where the last `max_size` tokens begin and end in the buffers. A full ring is all of them, wherever it
    begins. Before that, the buffers have room at their end; after a forward of several tokens, older ones at their
    beginning."""
    length = cast("mx.array", ring.keys).shape[-2]
    if length == ring.max_size < ring.offset:
        return 0, length
    return max(0, ring._idx - ring.max_size), ring._idx


# --- The network of an assistant.


class Sizes(NamedTuple):
    """What `config.json` says of an assistant beside its text model."""

    backbone: int
    """The width of the target's hidden states."""
    centroids: int
    """The number of groups of tokens; 0 if every token is scored."""
    chosen: int
    """The number of groups whose tokens are scored."""


class AssistantModule(Module):
    """Layers of Gemma 4 without keys and values, between two projections: from the row of a token and the hidden state
    before it, and to the hidden state that the next draft begins with."""

    def __init__(self, args: ModelArgs, sizes: Sizes, *, tied: bool) -> None:
        Module.__init__(self)  # MLX's is not typed
        width = args.hidden_size
        self.pre_projection = Linear(2 * sizes.backbone, width, bias=False)
        self.post_projection = Linear(width, sizes.backbone, bias=False)
        self.model = _Body(args, tied=tied)
        if not tied:
            self.lm_head = Embedding(args.vocab_size, width)
        if sizes.centroids:
            self.masked_embedding = _Groups(width, args.vocab_size, sizes)

    def __call__(
        self, embedded: mx.array, hidden: mx.array, shared: Mapping[str, Shared], position: int
    ) -> tuple[mx.array, mx.array]:
        """Maps the scaled row of a token and the hidden state before it, [1, 1, D] each, to logits [1, 1, V] of the
        next token and a hidden state for it [1, 1, D]. Looks at `shared` from this `position`. Lazy."""
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in self.model.layers:
            keys, values, cache = shared[layer.layer_type]
            x, _, _ = layer(x, None, cache, shared_kv=(keys, values), offset=position)
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
    """Scores the tokens of the most promising groups only."""

    def __init__(self, width: int, vocab_size: int, sizes: Sizes) -> None:
        Module.__init__(self)
        self.centroids = Linear(width, sizes.centroids, bias=False)
        self.token_ordering = mx.arange(vocab_size)
        """The tokens, one group after the other."""
        self._sizes = sizes

    def __call__(self, x: mx.array, table: Embedding) -> mx.array:
        """Maps hidden states [1, 1, W] to logits [1, 1, V], given the table of all tokens. Those of other groups are
        -inf: no draft is worth one of them."""
        chosen = mx.argpartition(self.centroids(x), kth=-self._sizes.chosen, axis=-1)[..., -self._sizes.chosen :]
        tokens = self.token_ordering.reshape(self._sizes.centroids, -1)[chosen].flatten(-2)  # [1, 1, tokens]
        scores = (table(tokens) @ x[..., None]).squeeze(-1)
        everything = mx.full((*x.shape[:-1], self.token_ordering.size), -mx.inf, scores.dtype)
        return mx.put_along_axis(everything, tokens, scores, axis=-1)


class Assistant(NamedTuple):
    """An assistant and the parts of its target that it uses. Owner: the engine thread."""

    module: AssistantModule
    target: Target
    places: Mapping[str, Place]
    kinds: frozenset[str]
    """The kinds of its layers."""
    suppressed: tuple[int, ...] = ()
    """Tokens that must never be chosen."""

    def step(
        self, tokens: mx.array, hidden: mx.array, shared: Mapping[str, Shared], position: int
    ) -> tuple[mx.array, mx.array]:
        """Returns logits [1, 1, V] of the token after `tokens` [1, 1], and the hidden state [1, 1, D] for the next
        step. `hidden` is the state before `tokens`; the rest is as in `AssistantModule`. Lazy."""
        logits, after = self.module(self.target.embed(tokens), hidden, shared, position)
        return without(self.suppressed, logits), after


class AssistantDrafter(HiddenStateDrafter):
    """Drafts after the last token of an answer, from the hidden state before it and what the target's layers hold.

    Everything is seen from the last place that the target has computed, however many tokens are drafted: that is how
    assistants are trained. Owner: the engine thread.
    """

    def __init__(self, name: str, assistant: Assistant) -> None:
        super().__init__(name, [assistant.target.norm], self.longest_forward)
        self.assistant = assistant
        row_bytes = assistant.target.norm["weight"].shape[0] * mx.float32.size
        self.most_bytes = 2 * self.longest_forward * row_bytes

    def draft(self, session: Session, most: int, draw: Draw) -> list[int]:
        position = session.position
        if self.first_waiting(position) is None:
            return []
        shared = read(self.assistant.places, self.assistant.kinds, session.layers, position)
        if shared is None:
            return []
        self.skip(position - 1)
        before = self.waiting(position - 1, position)
        drafts: list[mx.array] = []
        tokens = mx.array([[session.recorded[-1]]])
        for _ in range(most):
            logits, before = self.assistant.step(tokens, before, shared, position - 1)
            drafts.append(draw(logits[:, -1]))
            tokens = drafts[-1][:, None]
            mx.async_eval(tokens)
        return cast("list[int]", mx.concatenate(drafts).tolist())
