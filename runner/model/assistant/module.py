"""The network of an assistant."""

from collections.abc import Mapping, Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

import runner.process.lean_mlx_lm  # noqa: F401  # registers mlx_lm without its __init__

# isort: split
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from runner.model.assistant.context import Shared
from runner.model.assistant.opening import Sizes


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
