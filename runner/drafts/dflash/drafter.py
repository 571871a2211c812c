"""Drafts with a DFlash draft: the tokens of one answer after the other."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.activations import silu, softplus
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from runner.drafts.dflash.config import DFlashConfig
from runner.drafts.heads.target import Draw, Follower, Map
from runner.errors import ModelError

# --- What a DFlash draft shares with its target, and the hidden states behind chosen layers of the target.


class BlockTarget(NamedTuple):
    """The parts of a text model that a draft uses. They stay the model's own."""

    embed: Map
    """Token ids [B, L] to rows [B, L, D]."""
    unembed: Map
    """Hidden states behind the draft's last norm, [B, L, D], to logits [B, L, V] as the target would scale them."""
    tapped: tuple[Module, ...]
    """The layers whose outputs are the draft's context."""


def block_target(config: DFlashConfig, module: Module) -> BlockTarget:
    """Returns the parts of one of mlx-lm's models, which may be made of placeholders: nothing is computed. Raises
    ModelError if the draft was made for another one, or the model has no such parts."""
    try:
        text = cast("Module", getattr(module, "language_model", module))
        inner = cast("Module", text["model"] if "model" in text else text["backbone"])
        table = cast("Module", inner["embed_tokens"] if "embed_tokens" in inner else inner["embeddings"])
        layers = cast("Sequence[Module]", inner["layers"])
        embed = _embedding(table, getattr(inner, "embed_scale", 1.0))
        unembed = _output(text.get("lm_head", table.as_linear), text)
        rows = embed(mx.zeros((1, 1), mx.uint32))
        width, vocab_size = rows.shape[-1], unembed(rows).shape[-1]
    except Exception as error:  # whatever a model of another build says
        raise ModelError(f"the model has no parts that it could share ({type(error).__name__}: {error})") from error
    for what, wanted, found in (
        ("layers", config.target_layers, len(layers)),
        ("numbers a token", config.width, width),
        ("tokens in the vocabulary", config.vocab_size, vocab_size),
    ):
        if wanted and wanted != found:
            raise ModelError(f"it was made for a model of {wanted} {what}, and this one has {found}")
    if config.taps[-1] >= len(layers):
        raise ModelError(f"it draws on layer {config.taps[-1]}, and the model has {len(layers)} layers")
    if config.mask_token >= vocab_size:
        raise ModelError(f"its mask token is {config.mask_token}, and the model has {vocab_size} tokens")
    return BlockTarget(embed, unembed, tuple(layers[tap] for tap in config.taps))


def _embedding(table: Map, scale: float) -> Map:
    return table if scale == 1.0 else lambda tokens: table(tokens) * scale


def _output(project: Map, text: Module) -> Map:
    """Returns the output layer with the scale that some models give their logits. Drafts are drawn as the target draws:
    on another scale they would hardly ever be the same."""
    args = getattr(text, "args", None)
    factor, most = getattr(args, "output_multiplier", 1.0), getattr(args, "final_logit_softcapping", None)
    if factor == 1.0 and not most:
        return project

    def scaled(states: mx.array) -> mx.array:
        logits = project(states) * factor
        return mx.tanh(logits / most) * most if most else logits

    return scaled


class LayerTap:
    """Keeps the outputs of chosen layers of the last forward, while it is on. The layers compute what they always do.

    Owner: the engine thread.
    """

    def __init__(self, layers: Sequence[Module], most_rows: int) -> None:
        """Keeps no more than the last `most_rows` of each."""
        self._layers = [(layer, type(layer), _tapped(self, layer, place)) for place, layer in enumerate(layers)]
        self._kept: dict[int, mx.array] = {}
        self.most_rows = most_rows

    @property
    def on(self) -> bool:
        """True if outputs are kept."""
        return any(type(layer) is tapped for layer, _, tapped in self._layers)

    def turn(self, on: bool) -> None:
        """Turns it on or off; forwards cost nothing more while it is off."""
        self._kept = {}
        for layer, plain, tapped in self._layers:
            layer.__class__ = tapped if on else plain

    def keep(self, place: int, output: object) -> None:
        """Keeps the output of the layer at this place of the list: an array, or the first of several."""
        states = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(states, mx.array) and states.ndim == 3:
            self._kept[place] = states[:, -self.most_rows :]

    def take(self) -> mx.array | None:
        """Returns the outputs of the last forward side by side, [B, L, T D] (lazy), and forgets them; None unless all
        layers have given one."""
        kept, self._kept = self._kept, {}
        if len(kept) < len(self._layers) or len({part.shape[:2] for part in kept.values()}) != 1:
            return None
        return mx.concatenate([kept[place] for place in range(len(kept))], axis=-1)


def _tapped(tap: LayerTap, layer: Module, place: int) -> type[Module]:
    """Returns the class of the layer with a tap behind it."""
    plain = type(layer)

    class Tapped(plain):  # type: ignore[misc, valid-type]  # the class of the layer, whichever it is
        def __call__(self, *args: object, **kwargs: object) -> object:
            output = plain.__call__(self, *args, **kwargs)
            tap.keep(place, output)
            return output

    return Tapped


# --- The layers of a DFlash draft, and the context that they see.


class Parts(NamedTuple):
    """Which optional tensors a draft has."""

    gates: bool
    """A gate for each head of its attention."""
    tap_norms: bool
    """A norm for each of the hidden states that it is given."""
    biases: bool
    """Biases of queries, keys and values."""


class Context:
    """Keys and values of consecutive tokens of one text, for each layer."""

    def __init__(self, layers: int, start: int) -> None:
        """`start` is the place of the first token in the text."""
        self.layers = [KVCache() for _ in range(layers)]
        self.start = start

    @property
    def stop(self) -> int:
        """The place behind the last token."""
        return self.start + self.layers[0].offset

    def trim(self, stop: int) -> None:
        """Forgets the tokens from `stop` on."""
        for layer in self.layers:
            layer.trim(self.start + layer.offset - stop)

    def forget(self, start: int) -> None:
        """Forgets the tokens before `start`, one of those that it has."""
        for layer in self.layers:
            kept = [mx.contiguous(part[..., start - self.start : layer.offset, :]) for part in _parts(layer)]
            layer.keys, layer.values = kept
            layer.offset -= start - self.start
        self.start = start

    @property
    def arrays(self) -> list[mx.array]:
        return [part for layer in self.layers for part in _parts(layer)]

    @property
    def nbytes(self) -> int:
        return sum(cast("int", layer.nbytes) for layer in self.layers)


def _parts(layer: KVCache) -> list[mx.array]:
    return [part for part in (layer.keys, layer.values) if part is not None]


class _Attention(Module):
    def __init__(self, config: DFlashConfig, parts: Parts, window: int, *, causal: bool) -> None:
        Module.__init__(self)  # MLX's is not typed
        queries, keys = config.heads * config.head_width, config.key_heads * config.head_width
        self.q_proj = Linear(config.width, queries, bias=parts.biases)
        self.k_proj = Linear(config.width, keys, bias=parts.biases)
        self.v_proj = Linear(config.width, keys, bias=parts.biases)
        self.o_proj = Linear(queries, config.width, bias=False)
        self.q_norm = RMSNorm(config.head_width, config.eps)
        self.k_norm = RMSNorm(config.head_width, config.eps)
        if parts.gates:
            self.g_proj = Linear(config.width, config.heads, bias=False)
        self._width = config.head_width
        self._window = window
        self._causal = causal
        rope = config.rope
        self._rope = initialize_rope(rope.width, rope.base, rope.interleaved, rope.scaling, rope.most_tokens)

    def remember(self, before: mx.array, cache: KVCache, start: int) -> tuple[mx.array, mx.array]:
        """Adds the keys and values of rows [1, S, D] to the cache, whose first token is the one at `start` of the text.
        Returns all that it has."""
        keys = self._rope(self._split(self.k_norm, self.k_proj(before)), offset=start + cache.offset)
        found = cache.update_and_fetch(keys, self._split(None, self.v_proj(before)))
        return cast("tuple[mx.array, mx.array]", found)

    def __call__(self, x: mx.array, before: mx.array | None, cache: KVCache, start: int) -> mx.array:
        """Returns what the rows `x` [1, L, D] see. Those `before` them stay in the cache."""
        rows = x.shape[1]
        keys, values = self.remember(x if before is None else mx.concatenate([before, x], axis=1), cache, start)
        cache.trim(rows)
        queries = self._rope(self._split(self.q_norm, self.q_proj(x)), offset=start + cache.offset)
        if self._window:
            keys, values = (part[:, :, -(self._window - 1 + rows) :] for part in (keys, values))
        seen = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._width**-0.5, mask=self._mask(rows, keys.shape[2])
        )
        seen = seen.swapaxes(1, 2)
        if "g_proj" in self:
            gates = softplus(self.g_proj(x).astype(mx.float32)).astype(seen.dtype)
            seen = seen * gates[..., None]
        return self.o_proj(seen.flatten(2))

    def _split(self, norm: Module | None, projected: mx.array) -> mx.array:
        """Returns [1, H, L, W] for [1, L, H W]."""
        heads = mx.unflatten(projected, -1, (-1, self._width))
        return cast("mx.array", heads if norm is None else norm(heads)).swapaxes(1, 2)

    def _mask(self, rows: int, keys: int) -> mx.array | None:
        """Returns which keys each of the last `rows` places sees, bool [rows, keys]; None for all of them."""
        if not self._causal and not 0 < self._window < keys:
            return None
        place, key = keys - rows + mx.arange(rows)[:, None], mx.arange(keys)
        near = place - key < (self._window or keys)
        return mx.logical_and(near, key <= place) if self._causal else near


class _Perceptron(Module):
    def __init__(self, config: DFlashConfig) -> None:
        Module.__init__(self)
        self.gate_proj = Linear(config.width, config.inner_width, bias=False)
        self.up_proj = Linear(config.width, config.inner_width, bias=False)
        self.down_proj = Linear(config.inner_width, config.width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(Module):
    def __init__(self, config: DFlashConfig, parts: Parts, window: int, *, causal: bool) -> None:
        Module.__init__(self)
        self.self_attn = _Attention(config, parts, window, causal=causal)
        self.mlp = _Perceptron(config)
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)
        self._context_norm = config.context_norm

    def remember(self, before: mx.array, cache: KVCache, start: int) -> None:
        self.self_attn.remember(self._normalized(before), cache, start)

    def __call__(self, x: mx.array, before: mx.array | None, cache: KVCache, start: int) -> mx.array:
        before = None if before is None else self._normalized(before)
        x = x + self.self_attn(self.input_layernorm(x), before, cache, start)
        return x + self.mlp(self.post_attention_layernorm(x))

    def _normalized(self, before: mx.array) -> mx.array:
        return self.input_layernorm(before) if self._context_norm else before


class DFlashModule(Module):
    """The weights of a draft."""

    def __init__(self, config: DFlashConfig, parts: Parts) -> None:
        """Makes it with random lazy parameters."""
        Module.__init__(self)
        self.fc = Linear(len(config.taps) * config.width, config.width, bias=False)
        self.hidden_norm = RMSNorm(config.width, config.eps)
        if parts.tap_norms:
            self.aux_hidden_norms = [RMSNorm(config.width, config.eps) for _ in config.taps]
        self.layers = [
            _Layer(config, parts, window, causal=causal)
            for window, causal in zip(config.windows, config.causal, strict=True)
        ]
        self.norm = RMSNorm(config.width, config.eps)

    def remember(self, features: mx.array, context: Context) -> None:
        """Adds to the context the features [1, S, T D] of the tokens that come next. Lazy."""
        before = self._projected(features)
        for layer, cache in zip(self.layers, context.layers, strict=True):
            layer.remember(before, cache, context.start)

    def __call__(self, embedded: mx.array, features: mx.array | None, context: Context) -> mx.array:
        """Returns the states [1, L, D] of a block, for the rows of its tokens, [1, L, D]. It stands behind the context,
        to which `features` are added before, if there are any. Lazy."""
        before, x = None if features is None else self._projected(features), embedded
        for layer, cache in zip(self.layers, context.layers, strict=True):
            x = layer(x, before, cache, context.start)
        return cast("mx.array", self.norm(x))

    def _projected(self, features: mx.array) -> mx.array:
        if "aux_hidden_norms" in self:
            parts = mx.split(features, len(self.aux_hidden_norms), axis=-1)
            features = mx.concatenate([norm(part) for norm, part in zip(self.aux_hidden_norms, parts, strict=True)], -1)
        return cast("mx.array", self.hidden_norm(self.fc(features)))


MOST_ROWS = 512
"""Rows of features that wait to be read. Those of a longer prompt are its last ones."""
CONTEXT_TOKENS = 2048
"""The context has at least as many of the last tokens, or as layers see back, and never more than twice as many."""


class BlockDraft(NamedTuple):
    """A draft and its target's parts. Owner: the engine thread."""

    config: DFlashConfig
    module: DFlashModule
    target: BlockTarget
    suppressed: tuple[int, ...] = ()
    """Tokens that must never be chosen."""

    def make_context(self, start: int) -> Context:
        """Returns an empty context of a text from its token `start` on."""
        return Context(len(self.config.windows), start)

    def read(self, features: mx.array, context: Context) -> None:
        """Adds features [1, S, T D] to the context, and lets MLX begin to compute them."""
        self.module.remember(features, context)
        mx.async_eval(context.arrays)

    def logits(self, token: int, count: int, features: mx.array | None, context: Context) -> mx.array:
        """Returns logits [1, count, V] of the tokens behind `token`, which follows the context. `features` are added to
        that before. Lazy."""
        block = mx.array([[token, *[self.config.mask_token] * count]])
        states = self.module(self.target.embed(block), features, context)
        scores = self.target.unembed(states[:, 1:])
        return scores.at[..., mx.array(self.suppressed)].minimum(-mx.inf) if self.suppressed else scores


class BlockDrafter(Follower):
    """Follows the text of one answer, and drafts behind it.

    Its context has keys and values of tokens that are certain, from the first one on of which it has seen the features:
    what a cache has restored is missing. Drafts get worse for it, answers never. Owner: the engine thread.
    """

    def __init__(self, draft: BlockDraft, most_rows: int = MOST_ROWS, context_tokens: int = CONTEXT_TOKENS) -> None:
        self.tap = LayerTap(draft.target.tapped, most_rows)
        """It must be on while an answer that may be drafted is computed."""
        super().__init__(self.tap, most_rows)
        self._draft = draft
        self._context = draft.make_context(0)
        self._recorded: Sequence[int] = ()  # the text of the context, and what has come since
        windows = draft.config.windows
        seen = min(context_tokens, max(windows)) if all(windows) else context_tokens
        self.context_tokens = max(seen, 2 * most_rows)
        """The context is cut to as many, which is not done often, before it has twice as many."""

    @property
    def nbytes(self) -> int:
        """The bytes of all but the weights."""
        return self._context.nbytes + self.waiting_bytes

    def read(self, position: int, recorded: Sequence[int], most: int) -> bool:
        """Reads `most` of the `recorded` tokens before `position` if more wait. Returns False if there were no more."""
        start = self._prepare(position, recorded)
        if start is None or position - start <= most:
            return False
        self._draft.read(self.waiting(start, start + most), self._context)
        return True

    def skip(self, position: int, most: int) -> None:
        """Forgets what waits, but for the last `most` tokens before `position`."""
        first = self.first_waiting(position)
        if first is not None and position - first > most:
            self.waiting(first, position - most)

    def propose(
        self, layers: Sequence[object], position: int, recorded: Sequence[int], most: int, draw: Draw
    ) -> list[int]:
        """Returns at most `most` tokens that may follow the `recorded` ones, of which the target has seen the first
        `position`: all but the last one; none if nothing is known of the text. Waits for them once."""
        most = min(most, self._draft.config.block - 1)
        if not self.follows(layers) or most < 1 or len(recorded) != position + 1 or recorded[-1] < 0:
            return []
        start = self._prepare(position, recorded)
        if start is None:
            return []
        features = self.waiting(start, position) if start < position else None
        logits = self._draft.logits(recorded[-1], most, features, self._context)
        drafts = [draw(logits[:, place]) for place in range(most)]
        return cast("list[int]", mx.concatenate(drafts).tolist())

    def go_back(self, to: int) -> None:
        if to < self._context.start:
            self._context = self._draft.make_context(to)
        elif to < self._context.stop:
            self._context.trim(to)

    def free(self) -> None:
        super().free()
        self._context, self._recorded = self._draft.make_context(0), ()

    def _prepare(self, position: int, recorded: Sequence[int]) -> int | None:
        """Makes the context one that the waiting features before `position` follow. Returns the first of them,
        `position` if none wait; None if too little is known."""
        context = self._context
        if recorded is not self._recorded and recorded[: context.stop] != self._recorded[: context.stop]:
            # The layers of the target have become those of another answer.
            self._context = context = self._draft.make_context(0)
        self._recorded = recorded
        if context.stop >= position:
            context.trim(position)
            return position if context.stop > context.start else None
        first = self.first_waiting(position)
        if first is None:
            return None
        if not context.start <= first <= context.stop or context.stop == context.start:
            self._context = context = self._draft.make_context(first)
        if context.stop - context.start >= 2 * self.context_tokens - self._most_rows:
            context.forget(max(context.start, context.stop - self.context_tokens))
        return context.stop
