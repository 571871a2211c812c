"""Gemma 4's towers for sound: the conformer of e2b and e4b, and the projection of 12B.

Source: huggingface/transformers, models/gemma4 and gemma4_unified; docs/internals/wire.md, section 13.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.activations import silu, softplus
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm

from runner.errors import ModelError
from runner.media.families import Gemma4Sound, Gemma4UnifiedSound, subsampled
from runner.media.sound_header import MEL_BINS
from runner.media.towers.gemma4 import ClampedLinear, bounds_of, free_but
from runner.media.towers.tower import SoundTower, Steps, TowerLayer, in_pieces, work_bytes
from runner.model.fields import Config, expect, positive, section, size, small_count

_EPS = 1e-6
"""The epsilon of norms that do not use the config's `rms_norm_eps`."""
_UNSEEN = -1e9
"""The attention score of a key that a row must not see."""
_STRIDE = 2
_KERNEL = 3

OfRows = Callable[[slice], mx.array]


class Conv(TowerLayer):
    """The weight of a convolution, [outputs, ..., inputs]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = mx.zeros(shape)


class Subsampling(TowerLayer):
    """A 3 x 3 convolution that halves time and frequency, then a norm over channels, then ReLU."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.conv = Conv(outputs, _KERNEL, _KERNEL, inputs)
        self.norm = LayerNorm(outputs, eps=eps, bias=False)

    def steps(self, x: mx.array, piece_bytes: int) -> Steps:
        """Maps `x` [T, F, inputs] to [T / 2, F / 2, outputs], both halves rounded up."""
        count, bins, inputs = x.shape
        padded = mx.pad(x, [(1, 1), (1, 1), (0, 0)])[None]

        def convolved(rows: slice) -> mx.array:
            part = padded[:, _STRIDE * rows.start : _STRIDE * (rows.stop - 1) + _KERNEL]
            return mx.maximum(self.norm(mx.conv2d(part, self.conv.weight, stride=_STRIDE))[0], 0)

        row_bytes = halved(bins) * max(self.conv.weight.shape[0], _KERNEL**2 * inputs) * work_bytes(x.dtype)
        return (yield from in_pieces(convolved, halved(count), row_bytes, piece_bytes))


def halved(count: int) -> int:
    """Returns the number of rows or bins that a convolution of stride 2 makes of `count`."""
    return (count + 1) // _STRIDE


class Beginning(TowerLayer):
    """The first layers of the tower: map spectra to rows of the conformer."""

    def __init__(self, channels: Sequence[int], hidden: int, eps: float) -> None:
        super().__init__()
        first, second = channels
        self.layer0 = Subsampling(1, first, eps)
        self.layer1 = Subsampling(first, second, eps)
        self.input_proj_linear = Linear(halved(halved(MEL_BINS)) * second, hidden, bias=False)

    def steps(self, spectra: mx.array, piece_bytes: int) -> Steps:
        x = yield from self.layer0.steps(spectra[..., None], piece_bytes)
        yield x  # the largest array of the tower
        x = yield from self.layer1.steps(x, piece_bytes)
        return self.input_proj_linear(x.flatten(1))


class ConformerFeedForward(TowerLayer):
    """A feed-forward network of two linears. Adds its result, multiplied by `weight`, to its input."""

    def __init__(self, hidden: int, weight: float, limit: float) -> None:
        super().__init__()
        self.pre_layer_norm = RMSNorm(hidden, _EPS)
        self.ffw_layer_1 = ClampedLinear(hidden, 4 * hidden, clamped=True)
        self.ffw_layer_2 = ClampedLinear(4 * hidden, hidden, clamped=True)
        self.post_layer_norm = RMSNorm(hidden, _EPS)
        self.share = weight
        self.limit = limit

    def __call__(self, x: mx.array) -> mx.array:
        inner = self.ffw_layer_2(silu(self.ffw_layer_1(self.pre_layer_norm(mx.clip(x, -self.limit, self.limit)))))
        return x + cast("mx.array", self.post_layer_norm(mx.clip(inner, -self.limit, self.limit)) * self.share)


class ConformerAttention(TowerLayer):
    """Attention to near rows, computed in blocks and in float32. Scores depend on content and on distance."""

    def __init__(self, hidden: int, heads: int, block: int, past: int, future: int, cap: float) -> None:
        """A row sees rows less than `past` places before it and less than `future` places after it."""
        super().__init__()
        self.heads, self.head = heads, hidden // heads
        self.block, self.past, self.future = block, past, future
        self.cap = cap
        self.q_proj, self.k_proj, self.v_proj, self.post = (
            ClampedLinear(hidden, hidden, clamped=True) for _ in range(4)
        )
        self.relative_k_proj = Linear(hidden, hidden, bias=False)
        self.per_dim_scale = mx.zeros((self.head,))

    @property
    def context(self) -> int:
        """The number of keys that one block of rows uses."""
        return self.past + self.block + self.future

    def projected(self, x: mx.array) -> mx.array:
        """Returns queries, keys and values [count, 3, heads, head] of `x` [count, hidden]."""
        queries, keys, values = (
            linear(x).astype(mx.float32).reshape(-1, self.heads, self.head)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        scale = softplus(self.per_dim_scale).astype(mx.float32) * (self.head**-0.5 / math.log(2))
        return mx.stack([queries * scale, keys * (math.log(1 + math.e) / math.log(2)), values], axis=1)

    def distances(self, dtype: mx.Dtype) -> mx.array:
        """Returns keys [heads, head, past + future + 1] that stand for the distances from `past` down to -`future`."""
        hidden = self.heads * self.head
        steps = mx.exp(mx.arange(hidden // 2) * -(math.log(10000.0) / max(hidden // 2 - 1, 1)))
        turns = mx.arange(self.past, -self.future - 1, -1).astype(mx.float32)[:, None] * steps
        signal = mx.concatenate([mx.sin(turns), mx.cos(turns)], axis=-1).astype(dtype)
        found = self.relative_k_proj(signal).astype(mx.float32)
        return found.reshape(-1, self.heads, self.head).transpose(1, 2, 0)

    def attend(self, parts: mx.array, distances: mx.array, piece_bytes: int) -> Steps:
        """Returns float32 [count, hidden], the result of attention. `projected` must have returned `parts`."""
        count = parts.shape[0]
        blocks = -(-count // self.block)
        spare = blocks * self.block - count
        queries = mx.pad(parts[:, 0], [(0, spare), (0, 0), (0, 0)])
        around = [(self.past, self.future + spare), (0, 0), (0, 0)]
        keys, values = mx.pad(parts[:, 1], around), mx.pad(parts[:, 2], around)
        inside = mx.arange(self.context)
        ahead = inside - self.past - mx.arange(self.block)[:, None]
        near = (ahead <= 0) & (ahead > -self.past) | (ahead > 0) & (ahead < self.future)

        def seen(rows: slice) -> mx.array:
            number = rows.stop - rows.start
            at = (mx.arange(rows.start, rows.stop) * self.block)[:, None] + inside
            asked = queries[rows.start * self.block : rows.stop * self.block]
            asked = asked.reshape(number, self.block, self.heads, self.head).swapaxes(1, 2)
            scores = asked @ keys[at].transpose(0, 2, 3, 1) + self._shifted(asked @ distances)
            valid = (at >= self.past) & (at < self.past + count)
            scores = mx.tanh(scores / self.cap) * self.cap
            scores = mx.where(near & valid[:, None, None], scores, _UNSEEN)
            found = mx.softmax(scores, axis=-1) @ values[at].swapaxes(1, 2)
            return found.swapaxes(1, 2).flatten(2).flatten(0, 1)

        result = yield from in_pieces(seen, blocks, self.block_bytes, piece_bytes)
        return result[:count]

    @property
    def block_bytes(self) -> int:
        """The bytes of the keys, values and scores of one block of rows."""
        return 4 * self.heads * self.context * (2 * self.head + 4 * self.block)

    def _shifted(self, scores: mx.array) -> mx.array:
        """Turns scores by distance [blocks, heads, block, distances] into scores by key [blocks, heads, block, keys].
        Shifts each row by one place more than the row before."""
        number, heads, block, count = scores.shape
        wide = mx.pad(scores, [(0, 0), (0, 0), (0, 0), (0, self.context + 1 - count)]).flatten(2)
        return wide[..., : block * self.context].reshape(number, heads, block, self.context)


class LightConv(TowerLayer):
    """A gated linear, a convolution of each channel over a row and the rows before it, and another linear."""

    def __init__(self, hidden: int, kernel: int, eps: float, limit: float) -> None:
        super().__init__()
        self.pre_layer_norm = RMSNorm(hidden, eps)
        self.linear_start = ClampedLinear(hidden, 2 * hidden, clamped=True)
        self.depthwise_conv1d = Conv(hidden, kernel, 1)
        self.conv_norm = RMSNorm(hidden, eps)
        self.linear_end = ClampedLinear(hidden, hidden, clamped=True)
        self.limit = limit

    def gated(self, x: mx.array) -> mx.array:
        """Returns the input rows [count, hidden] of the convolution."""
        first, second = mx.split(self.linear_start(self.pre_layer_norm(x)), 2, axis=-1)
        return first * mx.sigmoid(second)

    def convolved(self, gated: mx.array) -> mx.array:
        """Returns the results for all rows of `gated` but the first `kernel - 1`, which only precede other rows."""
        x = mx.conv1d(gated[None], self.depthwise_conv1d.weight, groups=gated.shape[-1])[0]
        return self.linear_end(silu(self.conv_norm(mx.clip(x, -self.limit, self.limit))))


class ConformerLayer(TowerLayer):
    """A feed-forward network, attention, a convolution, and another feed-forward network."""

    def __init__(
        self, hidden: int, attention: ConformerAttention, kernel: int, eps: float, weight: float, limit: float
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.feed_forward1 = ConformerFeedForward(hidden, weight, limit)
        self.norm_pre_attn = RMSNorm(hidden, _EPS)
        self.self_attn = attention
        self.norm_post_attn = RMSNorm(hidden, _EPS)
        self.lconv1d = LightConv(hidden, kernel, eps, limit)
        self.feed_forward2 = ConformerFeedForward(hidden, weight, limit)
        self.norm_out = RMSNorm(hidden, _EPS)
        self.before = kernel - 1
        self.limit = limit

    def steps(self, x: mx.array, piece_bytes: int) -> Steps:
        """Maps `x` [count, hidden] to rows of the same shape."""
        count, dtype, row_bytes = x.shape[0], x.dtype, 4 * self.hidden * work_bytes(x.dtype)

        def by_rows(function: OfRows) -> Steps:
            return in_pieces(function, count, row_bytes, piece_bytes)

        entered = x
        x = yield from by_rows(lambda rows: self.feed_forward1(entered[rows]))
        parts = yield from by_rows(lambda rows: self.self_attn.projected(self.norm_pre_attn(self._clipped(x[rows]))))
        seen = yield from self.self_attn.attend(parts, self.self_attn.distances(dtype), piece_bytes)
        x = yield from by_rows(lambda rows: self._added(x[rows], seen[rows]))
        gated = yield from by_rows(lambda rows: self.lconv1d.gated(x[rows]))
        gated = mx.pad(gated, [(self.before, 0), (0, 0)])
        return (yield from by_rows(lambda rows: self._ended(x[rows], gated[rows.start : rows.stop + self.before])))

    def _clipped(self, x: mx.array) -> mx.array:
        return mx.clip(x, -self.limit, self.limit)

    def _added(self, x: mx.array, seen: mx.array) -> mx.array:
        return x + cast("mx.array", self.norm_post_attn(self._clipped(self.self_attn.post(seen.astype(x.dtype)))))

    def _ended(self, x: mx.array, gated: mx.array) -> mx.array:
        return cast("mx.array", self.norm_out(self._clipped(self.feed_forward2(self.lconv1d.convolved(gated) + x))))


_LINEARS = r"(?:ffw_layer_[12]|[qkv]_proj|post|linear_start|linear_end)"
_FIRST = "subsample_conv_projection.layer0.conv.weight"


class Gemma4SoundTower(SoundTower):
    """The conformer of e2b and e4b. `rows` are spectra [count, 128]; four spectra become a soft token."""

    family = Gemma4Sound
    absent = "config declares a gemma4_audio tower but audio_tower weights are missing from the manifest"
    names = (
        (rf"(?:model\.)?audio_tower\.(layers\.\d+\.\w+\.{_LINEARS})\.(?=weight$|scales$|biases$)", r"\1.linear."),
        (r"(?:model\.)?audio_tower\.", ""),
        (r"(?:model\.)?embed_audio\.", ""),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        audio = section(config, "audio_config")
        hidden, heads = size(audio, "hidden_size", 1024), size(audio, "num_attention_heads", 8)
        if hidden % heads or hidden % 2:
            raise ModelError(f"config.json: a sound tower's {heads} heads must divide {hidden}, an even width")
        expect(audio, "hidden_act", "silu")
        self.hidden = hidden
        self.eps = positive(audio, "rms_norm_eps", 1e-6)
        limit, weight = positive(audio, "gradient_clipping", 1e10), positive(audio, "residual_weight", 0.5)
        channels = audio.get("subsampling_conv_channels") or [128, 32]
        if not isinstance(channels, list) or len(channels) != 2 or not all(type(each) is int for each in channels):
            raise ModelError(f"config.json: subsampling_conv_channels: want two numbers, found {channels!r}")
        block, left = small_count(audio, "attention_chunk_size", 12), small_count(audio, "attention_context_left", 13)
        if left == 1:
            raise ModelError("config.json: attention_context_left: want 2 or more, found 1")
        right = small_count(audio, "attention_context_right", 0) if audio.get("attention_context_right") else 0
        cap = positive(audio, "attention_logit_cap", 50.0)
        self.subsample_conv_projection = Beginning(channels, hidden, self.eps)
        self.layers = [
            ConformerLayer(
                hidden,
                ConformerAttention(hidden, heads, block, left - 1, right, cap),
                small_count(audio, "conv_kernel_size", 5),
                self.eps,
                weight,
                limit,
            )
            for _ in range(small_count(audio, "num_hidden_layers", 12))
        ]
        output = size(audio, "output_proj_dims", 1536)
        self.output_proj = Linear(hidden, output)
        self.embedding_projection = Linear(output, self.width, bias=False)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Moves the axis of inputs in the weights of convolutions to the end. Raises ModelError for a linear that has
        only some of the four bounds."""
        bounds = bounds_of(weights, "weight {linear} has a partial clamp set")
        if _FIRST in weights:  # the call with the dense tensors, among them all bounds
            free_but(bounds, self)
        for name, module in Module.named_modules(self):
            key = f"{name}.weight"
            if isinstance(module, Conv) and key in weights and weights[key].shape != module.weight.shape:
                weights[key] = mx.moveaxis(weights[key], 1, -1)
        return weights | bounds

    def encode(self, rows: mx.array, lengths: Sequence[int]) -> Iterator[mx.array]:
        dtype = self.output_proj.bias.dtype
        found, at = list[mx.array](), 0
        for length in lengths:
            x = yield from self.subsample_conv_projection.steps(rows[at : at + length].astype(dtype), self.piece_bytes)
            yield x
            for layer in self.layers:
                x = yield from layer.steps(x, self.piece_bytes)
                yield x
            x = mx.fast.rms_norm(self.output_proj(x), None, self.eps)
            found.append(self.embedding_projection(x))
            yield found[-1]
            at += length
        if len(found) > 1:
            yield mx.concatenate(found)

    def encode_bytes(self, lengths: Sequence[int]) -> int:
        itemsize, longest = work_bytes(self.output_proj.bias.dtype), max(lengths)
        first = self.subsample_conv_projection.layer0.conv.weight.shape[0]
        pixels = longest * (MEL_BINS + 2) * (4 + 2 * itemsize)
        convolved = halved(longest) * halved(MEL_BINS) * first * itemsize
        count, attention = subsampled(longest), self.layers[0].self_attn
        piece = max(self.piece_bytes, 4 * self.hidden * itemsize)
        layer = count * self.hidden * (4 * itemsize + 11 * 4) + 4 * min(piece, 4 * count * self.hidden * itemsize)
        scores = 3 * min(max(piece, attention.block_bytes), -(-count // attention.block) * attention.block_bytes)
        features = 2 * sum(map(subsampled, lengths)) * self.width * itemsize
        return features + max(pixels + 3 * convolved + 4 * min(piece, convolved), layer + scores)


class Gemma4UnifiedSoundTower(SoundTower):
    """The projection of 12B. `rows` are samples [count, samples of a token]; each row becomes a soft token."""

    family = Gemma4UnifiedSound
    absent = "config declares a gemma4_unified_audio embedder but embed_audio weights are missing from the manifest"
    names = ((r"(?:model\.)?embed_audio\.", ""),)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.eps = positive(section(config, "audio_config"), "rms_norm_eps", 1e-6)
        self.samples = Gemma4UnifiedSound.from_config(config).frame_samples
        self.embedding_projection = Linear(self.samples, self.width, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        """The type in which the tower computes: that of the scales if the weight is packed."""
        stored = (self.embedding_projection[name] for name in ("weight", "scales") if name in self.embedding_projection)
        return next((each.dtype for each in stored if mx.issubdtype(each.dtype, mx.floating)), mx.bfloat16)

    def encode(self, rows: mx.array, lengths: Sequence[int]) -> Iterator[mx.array]:
        del lengths
        dtype = self.dtype

        def projected(part: slice) -> mx.array:
            return self.embedding_projection(mx.fast.rms_norm(rows[part].astype(dtype), None, self.eps))

        row_bytes = max(self.samples, self.width) * work_bytes(dtype)
        yield (yield from in_pieces(projected, rows.shape[0], row_bytes, self.piece_bytes))

    def encode_bytes(self, lengths: Sequence[int]) -> int:
        itemsize = work_bytes(self.dtype)
        rows_bytes = sum(lengths) * max(self.samples, self.width) * itemsize
        return 2 * sum(lengths) * self.width * itemsize + 3 * min(max(self.piece_bytes, 1 << 14), rows_bytes)
