"""The network of a DFlash draft, the context to which its layers attend, and the drafter that uses both."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.activations import silu, softplus
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.rope_utils import initialize_rope

from runner.cache.layers.batched import arrays_of
from runner.cache.layers.rows import LONG_STEP, SHORT_STEP, KVRows
from runner.drafts.dflash.dflash_config import DFlashConfig
from runner.drafts.drafting import DraftedAnswer
from runner.drafts.hidden_states import RowDrafter, RowText, padded, read_drafts
from runner.drafts.target import Draw, Map, Target


class OptionalTensors(NamedTuple):
    """The optional tensors that a DFlash draft has."""

    gates: bool
    """True if each head of attention has a gate."""
    tap_norms: bool
    """True if the outputs of each tapped layer have a norm of their own."""
    biases: bool
    """True if queries, keys and values have biases."""
    sinks: bool = False
    """True if each head of attention has a sink: a logit without a value."""


class BlockContext(NamedTuple):
    """The context of some texts: for each text, a row of keys and values of consecutive tokens."""

    layers: Sequence[KVRows]
    starts: Sequence[int]
    """For each row, the position in the text of the first token."""


class _Attention(Module):
    def __init__(self, config: DFlashConfig, parts: OptionalTensors, window: int, *, causal: bool) -> None:
        Module.__init__(self)  # MLX's `__init__` is not typed
        queries, keys = config.heads * config.head_width, config.key_heads * config.head_width
        self.q_proj = Linear(config.width, queries, bias=parts.biases)
        self.k_proj = Linear(config.width, keys, bias=parts.biases)
        self.v_proj = Linear(config.width, keys, bias=parts.biases)
        self.o_proj = Linear(queries, config.width, bias=False)
        self.q_norm = RMSNorm(config.head_width, config.eps)
        self.k_norm = RMSNorm(config.head_width, config.eps)
        if parts.gates:
            self.g_proj = Linear(config.width, config.heads, bias=False)
        self.attention_sink_bias = mx.zeros(config.heads) if parts.sinks else None
        self._width = config.head_width
        self._window = window
        self._causal = causal
        rope = config.rope
        self._rope = initialize_rope(rope.width, rope.base, rope.interleaved, rope.scaling, rope.most_tokens)

    def remember(self, x: mx.array, cache: KVRows, starts: mx.array) -> tuple[mx.array, mx.array]:
        """Adds the keys and values of `x` [B, S, D] to the cache. Returns all keys and values of the cache. `starts`,
        int [B], has the positions in the texts at which the rows of the cache begin."""
        keys = self._rope(self._split(self.k_norm, self.k_proj(x)), offset=starts + cache.offset)
        return cache.update_and_fetch(keys, self._split(None, self.v_proj(x)))

    def __call__(self, x: mx.array, cache: KVRows, starts: mx.array) -> mx.array:
        """Returns the attention of the rows `x` [B, L, D] of blocks, and adds their keys and values to the cache."""
        mask = cache.make_mask(x.shape[1], window_size=self._window, causal=self._causal)
        queries = self._rope(self._split(self.q_norm, self.q_proj(x)), offset=starts + cache.offset)
        keys, values = self.remember(x, cache, starts)
        seen = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._width**-0.5, mask=mask, sinks=self.attention_sink_bias
        ).swapaxes(1, 2)
        if "g_proj" in self:
            gates = softplus(self.g_proj(x).astype(mx.float32)).astype(seen.dtype)
            seen = seen * gates[..., None]
        return self.o_proj(seen.flatten(2))

    def _split(self, norm: Module | None, projected: mx.array) -> mx.array:
        """Splits [B, L, H W] into H heads, [B, H, L, W], and applies `norm` to each row of width W."""
        heads = mx.unflatten(projected, -1, (-1, self._width))
        return cast("mx.array", heads if norm is None else norm(heads)).swapaxes(1, 2)


class _Perceptron(Module):
    def __init__(self, config: DFlashConfig) -> None:
        Module.__init__(self)
        self.gate_proj = Linear(config.width, config.inner_width, bias=False)
        self.up_proj = Linear(config.width, config.inner_width, bias=False)
        self.down_proj = Linear(config.inner_width, config.width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class _Convolved(Module):
    """The two convolutions of DFlash 2 around a branch of a layer. Each row weighs itself and the rows before it in the
    block. The weights depend on the row that goes into the branch."""

    def __init__(self, config: DFlashConfig) -> None:
        Module.__init__(self)
        self.base_kernel = mx.zeros((2, config.convolved, config.width))
        factors = 2 * config.convolved * (config.width // config.group)
        self.kernel_projection = Linear(config.width, factors, bias=False)
        self._rows, self._group = config.convolved, config.group

    def around(self, branch: Map, x: mx.array) -> mx.array:
        """Returns the branch of the rows `x` [B, L, D] of blocks, with a convolution before it and one after it."""
        own = self.kernel_projection(x).reshape(*x.shape[:2], 2, self._rows, -1)
        weights = mx.repeat(own, self._group, axis=-1) + self.base_kernel.astype(x.dtype)
        return self._sums(branch(self._sums(x, weights[:, :, 0])), weights[:, :, 1])

    def _sums(self, x: mx.array, weights: mx.array) -> mx.array:
        """Returns the weighted sums of rows. `weights` [B, L, R, D] has those of a row, of the row before it, etc."""
        before = self._rows - 1
        padded = mx.pad(x, [(0, 0), (before, 0), (0, 0)])
        rows = [padded[:, back : back + x.shape[1]] for back in range(before, -1, -1)]
        return (weights * mx.stack(rows, axis=2)).sum(axis=2)


class _Layer(Module):
    def __init__(self, config: DFlashConfig, parts: OptionalTensors, window: int, *, causal: bool) -> None:
        Module.__init__(self)
        self.self_attn = _Attention(config, parts, window, causal=causal)
        self.mlp = _Perceptron(config)
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)
        self._context_norm = config.context_norm
        if config.convolved:
            self.attention_conv, self.mlp_conv = _Convolved(config), _Convolved(config)

    def remember(self, x: mx.array, cache: KVRows, starts: mx.array) -> None:
        self.self_attn.remember(self.input_layernorm(x) if self._context_norm else x, cache, starts)

    def __call__(self, x: mx.array, cache: KVRows, starts: mx.array) -> mx.array:
        attention = partial(self.self_attn, cache=cache, starts=starts)
        x = x + self._branch("attention_conv", attention, self.input_layernorm(x))
        return x + self._branch("mlp_conv", self.mlp, self.post_attention_layernorm(x))

    def _branch(self, convolution: str, branch: Map, x: mx.array) -> mx.array:
        return self[convolution].around(branch, x) if convolution in self else branch(x)


Following = Callable[[int, mx.array], mx.array]
"""`following(place, before)` returns lazy logits [B, V] of the draft at a place of a block. `before` has the drafts at
the place before it, uint32 [B]; at place 0, the last tokens of the texts."""


class _Selector(Module):
    """The selector of DFlash 2. It adds to the logits of the best tokens at a place how well they follow the draft
    before them, and leaves out all other tokens."""

    def __init__(self, config: DFlashConfig) -> None:
        Module.__init__(self)
        self.predecessor_codebook = Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = Embedding(config.vocab_size, config.selector_rank)
        self.hidden_projection = Linear(config.width, config.selector_rank, bias=False)
        self._count = config.candidates

    def following(self, states: mx.array, logits: mx.array) -> Following:
        best = mx.argpartition(logits, kth=-self._count, axis=-1)[..., -self._count :]
        scores = mx.take_along_axis(logits, best, axis=-1).astype(mx.float32)
        after = self.successor_codebook(best) * self.hidden_projection(states)[:, :, None]

        def following(place: int, before: mx.array) -> mx.array:
            fit = (after[:, place] @ self.predecessor_codebook(before)[..., None]).squeeze(-1)
            everything = mx.full(logits[:, place].shape, -mx.inf)
            return mx.put_along_axis(everything, best[:, place], scores[:, place] + fit, axis=-1)

        return following


class _Markov(Module):
    """The head of DSpark. It adds to the logits of all tokens at a place how well they follow the draft before them."""

    def __init__(self, config: DFlashConfig) -> None:
        Module.__init__(self)
        self.markov_w1 = Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = Linear(config.markov_rank, config.vocab_size, bias=False)

    def following(self, states: mx.array, logits: mx.array) -> Following:  # noqa: ARG002
        return lambda place, before: logits[:, place] + self.markov_w2(self.markov_w1(before))


class DFlashModule(Module):
    """The network of a DFlash draft. A new one has random lazy weights."""

    def __init__(self, config: DFlashConfig, parts: OptionalTensors) -> None:
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
        if config.candidates:
            self.candidate_selector = _Selector(config)
        if config.markov_rank:
            self.markov_head = _Markov(config)

    def remember(self, features: mx.array, context: BlockContext) -> None:
        """Adds tokens to the context (lazy). `features` [B, S, T D] are the outputs of T tapped layers side by side."""
        x, starts = self._projected(features), mx.array([*context.starts])
        for layer, cache in zip(self.layers, context.layers, strict=True):
            layer.remember(x, cache, starts)

    def __call__(self, embedded: mx.array, context: BlockContext) -> mx.array:
        """Returns the lazy hidden states [B, L, D] of blocks after the context. `embedded` [B, L, D] has the embeddings
        of the blocks' tokens. Adds the blocks to the context."""
        x, starts = embedded, mx.array([*context.starts])
        for layer, cache in zip(self.layers, context.layers, strict=True):
            x = layer(x, cache, starts)
        return cast("mx.array", self.norm(x))

    def following(self, states: mx.array, logits: mx.array) -> Following:
        """Returns the function that maps drafts to the logits after them. `states` [B, N, D] and `logits` [B, N, V] are
        those of the drafts of blocks."""
        for name in ("candidate_selector", "markov_head"):
            if name in self:
                return cast("Following", self[name].following(states, logits))
        return lambda place, _: logits[:, place]

    def _projected(self, features: mx.array) -> mx.array:
        if "aux_hidden_norms" in self:
            parts = mx.split(features, len(self.aux_hidden_norms), axis=-1)
            features = mx.concatenate([norm(part) for norm, part in zip(self.aux_hidden_norms, parts, strict=True)], -1)
        return cast("mx.array", self.hidden_norm(self.fc(features)))


_MOST_ROWS = 512
_PART_TOKENS = 64  # the most tokens of a text that are read in one step before drafting
CONTEXT_TOKENS = 2048
"""The context has at least this many last tokens of texts, or as many as layers attend to, and less than twice that."""


class BlockDraft(NamedTuple):
    """A DFlash draft with its target. Owner: the engine thread."""

    config: DFlashConfig
    module: DFlashModule
    target: Target

    @property
    def tapped(self) -> list[Module]:
        """The layers of the target whose outputs become the context."""
        return [self.target.layers[tap] for tap in self.config.taps]

    def make_layers(self, rows: int) -> list[KVRows]:
        """Returns the empty layers of a context for `rows` texts."""
        return [KVRows(None, [[]] * rows, [0] * rows) for _ in self.config.windows]

    def draft(
        self, tokens: Sequence[int], count: int, context: BlockContext, draw: Draw, rows: Sequence[int] | None = None
    ) -> list[mx.array]:
        """Returns the lazy drafts, `count` arrays uint32 [B], of the texts in `rows`, or of all texts. `tokens` has for
        each text the token that follows the context. Adds the blocks to the context."""
        masks = [self.config.mask_token] * (count - self.config.anchored)
        embedded = self.target.embed(mx.array([[token, *masks] for token in tokens]))
        if self.config.embedding_scale != 1.0:
            embedded = embedded * self.config.embedding_scale
        before, states = mx.array([*tokens]), self.module(embedded, context)[:, -count:]
        if rows is not None:
            before, states = before[mx.array([*rows])], states[mx.array([*rows])]
        following = self.module.following(states, self.target.unembed(states))
        drafts = list[mx.array]()
        for place in range(count):
            drafts.append(before := draw(following(place, before)))
        return drafts


class BlockText(RowText):
    """A text with a context for a DFlash draft. Owner: the engine thread."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: Sequence[int] = ()
        """The whole text, to which its session adds tokens."""
        self.lacks = False
        """True if more tokens are left to read than can be read together with a block."""

    def go_back(self, to: int) -> None:
        super().go_back(to)
        if to < self.start:
            self.begin(to)
        self.held = min(self.held, to - self.start)


class BlockDrafter(RowDrafter[BlockText]):
    """Drafts with a DFlash draft: all tokens of all answers in one forward. Owner: the engine thread.

    The context begins at the first token whose features the drafter has seen. So it lacks the tokens that the target
    takes from the prefix cache. This makes drafts worse, but never changes answers."""

    at_once = True
    longest_forward = sys.maxsize  # every forward is followed, since the tap keeps only its last rows

    def __init__(
        self, name: str, dflash: BlockDraft, most_rows: int = _MOST_ROWS, context_tokens: int = CONTEXT_TOKENS
    ) -> None:
        super().__init__(name, dflash.tapped, most_rows, BlockText, dflash.make_layers)
        self.dflash = dflash
        windows = dflash.config.windows
        seen = min(context_tokens, max(windows)) if all(windows) else context_tokens
        self.context_tokens = max(seen, 2 * most_rows)
        """The tokens of context that all texts with drafts share evenly. The context of a text is cut to its share
        before it has twice as many tokens."""
        dtype = dflash.target.embed(mx.zeros((1, 1), mx.uint32)).dtype
        row = mx.zeros((1, 1, len(dflash.config.taps) * dflash.config.width), dtype)
        layers = dflash.make_layers(1)
        dflash.module.remember(row, BlockContext(layers, [0]))
        self._token_bytes = sum(layer.nbytes for layer in layers) // SHORT_STEP
        self._row_bytes = row.nbytes

    def most_bytes(self, answers: int) -> int:
        tokens = 2 * max(self.context_tokens, answers * self._most_rows) + answers * LONG_STEP
        return tokens * self._token_bytes + 2 * answers * self._most_rows * self._row_bytes

    def read_texts(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        known, parts = list[BlockText](), dict[BlockText, int]()
        for answer in answers:
            text = self.text_of(answer)
            if text is None:
                continue
            first = text.first_waiting(answer.position)
            if briefly and first is not None and answer.position - first > _PART_TOKENS:
                text.skip(answer.position - _PART_TOKENS)
            text.lacks = False
            if self._follow(answer, text):
                known.append(text)
                text.lacks = answer.position - text.at > _PART_TOKENS
            if text.lacks and not parts:  # only one text is read in a step
                parts[text] = text.at + _PART_TOKENS
        self.turn_to(known)
        if known:
            self._cut(max(self.context_tokens // len(known), self._most_rows))
        self._read(parts)
        mx.async_eval([part for layer in self._layers for part in arrays_of(layer)] if parts else [])
        return 0 < len(answers) == sum(text.lacks for text in known)

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
        if any(text not in self._rows for text in texts):
            self.turn_to(texts)
        self._read({text: answer.position for answer, text in zip(answers, texts, strict=True)})
        most = min(most, self.dflash.config.most_drafts)
        rows = [self._rows.index(text) for text in texts]
        tokens = [0] * len(self._rows)  # texts that lack tokens keep their rows, with token 0
        for row, answer in zip(rows, answers, strict=True):
            tokens[row] = answer.session.recorded[-1]
        chosen = rows if len(rows) < len(tokens) else None
        return read_drafts(self.dflash.draft(tokens, most, self._context, draw, chosen))

    @property
    def _context(self) -> BlockContext:
        return BlockContext(self._layers, [text.start for text in self._rows])

    def _read(self, stops: Mapping[BlockText, int]) -> None:
        counts = [stops.get(text, text.at) - text.at for text in self._rows]
        self.stand()  # removes the last blocks from the context
        if not any(counts):
            return
        read = zip(self._rows, counts, strict=True)
        seen = [text.waiting(text.at, text.at + count) if count else None for text, count in read]
        nothing = next(each for each in seen if each is not None)[:, :0]
        rows = [padded(nothing if each is None else each, max(counts)) for each in seen]
        self.dflash.module.remember(mx.concatenate(rows), self._context)
        for text, count in zip(self._rows, counts, strict=True):
            text.held += count
            text.skip(text.at)
        self.stand()

    def _cut(self, most: int) -> None:
        """Cuts contexts that could soon have twice `most` tokens to their last `most` tokens."""
        kept = [most if text.held >= 2 * most - self._most_rows else text.held for text in self._rows]
        if kept == [text.held for text in self._rows]:
            return
        self.stand()
        for text, count in zip(self._rows, kept, strict=True):
            text.start, text.held = text.at - count, count
        for layer in self._layers:
            layer.keep_last(kept)

    def _follow(self, answer: DraftedAnswer, text: BlockText) -> bool:
        """Makes the context of a text continue without a gap in the features that wait to be read, up to the answer's
        position. Begins a new context if need be. Returns False if features before the position are missing."""
        position, recorded = answer.position, answer.session.recorded
        if recorded is not text.recorded and recorded[: text.at] != text.recorded[: text.at]:
            text.begin(0)  # another answer, with another text, now uses the layer that stands for the text
        text.recorded = recorded
        if text.at >= position:
            text.held = max(0, position - text.start)
            return text.held > 0
        first = text.first_waiting(position)
        if first is None:
            return False
        if not (text.held and text.start <= first <= text.at):
            text.begin(first)
        return True
