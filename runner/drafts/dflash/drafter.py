"""A DFlash draft: its layers, the context that they see, and the blocks that it drafts."""

import sys
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
from runner.drafts.target import GROWTH_TOKENS, Draw, HiddenStateDrafter, Target, Text, read_drafts
from runner.engine.ports import DraftedAnswer

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
        """The place after the last token."""
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
    """The weights of a draft; random and lazy at first."""

    def __init__(self, config: DFlashConfig, parts: Parts) -> None:
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
        """Returns the states [1, L, D] of a block, for the rows of its tokens, [1, L, D]. It follows the context,
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


_MOST_ROWS = 512
_PART_TOKENS = 64  # of a text, beside a step of its answer
CONTEXT_TOKENS = 2048
"""The context has at least this many of the last tokens, or those that layers see back to, and less than twice them."""


class BlockDraft(NamedTuple):
    """A draft and its target's parts. Owner: the engine thread."""

    config: DFlashConfig
    module: DFlashModule
    target: Target

    @property
    def tapped(self) -> list[Module]:
        """The layers of the target whose outputs are the draft's context."""
        return [self.target.layers[tap] for tap in self.config.taps]

    def make_context(self, start: int) -> Context:
        """Returns an empty context of a text from its token `start` on."""
        return Context(len(self.config.windows), start)

    def read(self, features: mx.array, context: Context) -> None:
        """Adds features [1, S, T D] to the context, and lets MLX begin to compute them."""
        self.module.remember(features, context)
        mx.async_eval(context.arrays)

    def logits(self, token: int, count: int, features: mx.array | None, context: Context) -> mx.array:
        """Returns logits [1, count, V] of the tokens after `token`, which follows the context. `features` are added to
        that before. Lazy."""
        block = mx.array([[token, *[self.config.mask_token] * count]])
        states = self.module(self.target.embed(block), features, context)
        return self.target.unembed(states[:, 1:])


class BlockText(Text):
    """A text of which a draft has a context. Owner: the engine thread."""

    def __init__(self, dflash: BlockDraft) -> None:
        super().__init__()
        self._dflash = dflash
        self.context = dflash.make_context(0)
        self.recorded: Sequence[int] = ()
        """The text of the context, and what has come since."""
        self.lacks = False
        """True if more has to be read than fits beside a block."""

    def go_back(self, to: int) -> None:
        super().go_back(to)
        if to < self.context.start:
            self.begin(to)
        elif to < self.context.stop:
            self.context.trim(to)

    def begin(self, at: int) -> None:
        """Begins an empty context at this token."""
        self.context = self._dflash.make_context(at)

    def take(self, start: int, stop: int) -> mx.array:
        """Returns the features [1, S, T D] of these tokens, which are to be read."""
        features = self.waiting(start, stop)
        self.skip(stop)
        return features

    @property
    def nbytes(self) -> int:
        return self.context.nbytes + super().nbytes


class BlockDrafter(HiddenStateDrafter[BlockText]):
    """Drafts with a DFlash draft: all tokens of an answer in one forward.

    A context has keys and values of tokens that are certain, from the first one whose features it has seen: what a
    cache has restored is missing. Drafts get worse for it, answers never. Owner: the engine thread.
    """

    at_once = True
    most_together = 4
    longest_forward = sys.maxsize  # the tap keeps the last rows of a prompt, however long

    def __init__(
        self, name: str, dflash: BlockDraft, most_rows: int = _MOST_ROWS, context_tokens: int = CONTEXT_TOKENS
    ) -> None:
        super().__init__(name, dflash.tapped, most_rows)
        self.dflash = dflash
        windows = dflash.config.windows
        seen = min(context_tokens, max(windows)) if all(windows) else context_tokens
        self.context_tokens = max(seen, 2 * most_rows)
        """The contexts of answers that are drafted together share these, and are cut before they have twice as many:
        not often."""
        context = dflash.make_context(0)
        dtype = dflash.target.embed(mx.zeros((1, 1), mx.uint32)).dtype
        row = mx.zeros((1, 1, len(dflash.config.taps) * dflash.config.width), dtype)
        dflash.read(row, context)
        self._growth_bytes, self._row_bytes = context.nbytes, row.nbytes

    def most_bytes(self, answers: int) -> int:
        tokens = 2 * max(self.context_tokens, answers * self._most_rows)
        contexts = (tokens // GROWTH_TOKENS + 2 * answers) * self._growth_bytes
        return contexts + 2 * answers * self._most_rows * self._row_bytes

    def make_text(self) -> BlockText:
        return BlockText(self.dflash)

    def read(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        texts = [self.text_of(each) for each in answers]
        for answer, text in zip(answers, texts, strict=True):
            if text is None:
                continue
            first = text.first_waiting(answer.position)
            if briefly and first is not None and answer.position - first > _PART_TOKENS:
                text.skip(answer.position - _PART_TOKENS)
            text.lacks = self._follow(answer, text) and answer.position - text.context.stop > _PART_TOKENS
        followed = [text for text in texts if text is not None]
        lacking = [text for text in followed if text.lacks]
        self._share([text.context for text in followed])
        if lacking:
            start = lacking[0].context.stop
            self.dflash.read(lacking[0].take(start, start + _PART_TOKENS), lacking[0].context)
        return 0 < len(answers) == len(lacking)

    def prepare(self, answer: DraftedAnswer, text: BlockText, layers: Sequence[object]) -> bool:  # noqa: ARG002
        return not text.lacks and self._follow(answer, text)

    def draft(
        self,
        answers: Sequence[DraftedAnswer],
        texts: Sequence[BlockText],
        layers: Sequence[object],  # noqa: ARG002
        most: int,
        draw: Draw,
    ) -> Sequence[Sequence[int]]:
        most = min(most, self.dflash.config.block - 1)
        logits = []
        for answer, text in zip(answers, texts, strict=True):
            start, context = text.context.stop, text.context
            features = text.take(start, answer.position) if start < answer.position else None
            logits.append(self.dflash.logits(answer.session.recorded[-1], most, features, context))
        rows = mx.concatenate(logits)
        return read_drafts([draw(rows[:, place]) for place in range(most)])

    def _follow(self, answer: DraftedAnswer, text: BlockText) -> bool:
        """Makes the context one that the waiting features before the answer's position follow. Returns False if too
        little is known."""
        position, recorded = answer.position, answer.session.recorded
        context = text.context
        if recorded is not text.recorded and recorded[: context.stop] != text.recorded[: context.stop]:
            # The layers of the target have become those of another answer.
            text.begin(0)
        text.recorded = recorded
        if text.context.stop >= position:
            text.context.trim(position)
            return text.context.stop > text.context.start
        first = text.first_waiting(position)
        if first is None:
            return False
        if not text.context.start <= first <= text.context.stop or text.context.stop == text.context.start:
            text.begin(first)
        return True

    def _share(self, contexts: Sequence[Context]) -> None:
        """Cuts these contexts to their bound, and empties all others."""
        for text in self._texts.values():
            if text.context not in contexts and text.context.stop > text.context.start:
                text.begin(0)
        most = max(self.context_tokens // max(1, len(contexts)), self._most_rows)
        for context in contexts:
            if context.stop - context.start >= 2 * most - self._most_rows:
                context.forget(max(context.start, context.stop - most))
