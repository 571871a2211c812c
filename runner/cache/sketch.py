"""The facts about the layers of a model, and the sketch that finds these facts before the first request."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from runner.cache.layer_interface import MakeLayers
from runner.cache.layers import adapt, distrust, flatten
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.scans import watched
from runner.cache.layers.snapshot import Ledger
from runner.logs import Log

log = Log(__name__)

Forward: TypeAlias = Callable[[mx.array, list[object]], mx.array]
"""A function from tokens [B, L] and the layer caches to logits [B, L, V]."""
_TOKENS, _MORE = 16, 512
_FEW = 3  # checkpoints that a prompt has, even if they take much of the budget: prompts diverge in different places
_STOPS, _STOP_TOKENS = 4, 4096  # checkpoints that may cost a forward each: a few, or one in so many tokens


@dataclass(eq=False)
class LayerFacts:
    """The function that makes the layers of a model, and the facts about them. A slot is a layer's index in `flatten`.
    All caches of a model share one object. Requests change it in two ways: tails and states may take more bytes than
    before, and `correct` notes facts that a sketch could not show."""

    make: MakeLayers
    """Returns the layers of a new sequence."""
    used: frozenset[int] = frozenset()
    """Slots of the layers that a forward fills. The model does not use the other layers."""
    untrusted: frozenset[int] = frozenset()
    """Slots of the layers that count something other than tokens: all their attributes are stored as one state."""
    token_bytes: int = 0
    """Bytes of one token in all sliceable layers together."""
    fixed_bytes: int = 0
    """The most bytes that all other layers, with tails and states, together have had."""
    point_bytes: int = 0
    """The most bytes that a checkpoint needs in these layers: less than `fixed_bytes` where tails have room."""
    passes: bool = False
    """True if layers with a state show their states inside a forward, so that a prefill need not stop at checkpoints. A
    forward may prove the opposite."""

    def bytes_of(self, tokens: int) -> int:
        """Returns the approximate bytes of a sequence of `tokens` tokens."""
        return self.token_bytes * tokens + self.fixed_bytes

    def most_checkpoints(self, budget_bytes: int | None, tokens: int) -> int | None:
        """Returns the largest number of checkpoints in `tokens` tokens of one prompt: a few, or as many as take an
        eighth of the budget, and fewer if each costs a forward. None means no limit: without tails and states, a
        checkpoint takes no additional bytes."""
        most = max(_FEW, budget_bytes // 8 // self.point_bytes) if budget_bytes and self.point_bytes else None
        stops = None if self.passes else max(_STOPS, tokens // _STOP_TOKENS)
        return min((each for each in (most, stops) if each is not None), default=None)

    def most_tokens(self, budget_bytes: int | None) -> int | None:
        """Returns the length of the largest sequence that fits the budget with a checkpoint. None means no limit."""
        return (budget_bytes - 2 * self.point_bytes) // self.token_bytes if budget_bytes and self.token_bytes else None

    def measure(self, states: Iterable[LayerState]) -> None:
        """Notes the bytes of tails and states in the layers of a sequence."""
        fixed = [state for state in states if not state.sliceable]
        self.fixed_bytes = max(self.fixed_bytes, sum(state.nbytes for state in fixed))
        self.point_bytes = max(self.point_bytes, sum(state.point_bytes for state in fixed))

    def correct(self, slot: int, offset: int) -> None:
        """Notes that the layer in this slot counted `offset` after another number of tokens."""
        log.info("a layer counts something other than tokens: its state is stored whole", layer=slot, at=offset)
        self.used |= {slot}
        self.untrusted |= {slot}


class Sketch:
    """The forwards of a short prompt and of one more token, over temporary layers.

    The forwards are built and not computed, which takes milliseconds for a model of any size. They show shapes, types,
    the layers that a forward fills, and the tokens that each layer counts. If a layer stays empty, a longer prompt
    shows whether it fills later: some layers have one entry for several tokens. Owner: the engine thread.
    """

    def __init__(self, make_layers: MakeLayers, forward: Forward, vocab_size: int, context_length: int = _MORE) -> None:
        """Raises the errors of the forward, for example for shapes that do not fit."""
        self._forward = forward
        self.facts = LayerFacts(make_layers)
        self.prompt, more = (
            [token * vocab_size // count for token in range(min(count, context_length or count))]
            for count in (_TOKENS, _MORE)
        )
        self.layers = make_layers()
        self._logits: list[mx.array] = []
        states = self._read(self.layers, self.prompt, [0])
        self.tokens = len(self.prompt) + 1
        """The number of tokens that the layers in `used` have seen."""
        if any(state.empty for state in states):
            states = self._read(make_layers(), more)
            self.tokens = len(more)
            del self._logits[2:]
        self.used = {slot: state for slot, state in enumerate(states) if not state.empty}
        """The adapters of the layers that the model uses, by slot."""
        self.facts.used = frozenset(self.used)
        self.facts.token_bytes = sum(
            array.nbytes // max(1, array.shape[-2])
            for state in self.used.values()
            if state.sliceable
            for array in state.arrays()
        )
        self.facts.measure(self.used.values())

    def forward(self, tokens: mx.array, layers: list[object]) -> mx.array:
        """Replaces the model's forward if the sketch is computed: returns logits that are built already, or builds new
        ones."""
        return self._logits.pop(0) if self._logits else self._forward(tokens, layers)

    def _read(self, layers: list[object], *texts: list[int]) -> list[LayerState]:
        """Builds a forward over each text. Returns the adapters of the layers, and notes untrusted layers."""
        states = [
            adapt(layer, Ledger(), slot not in self.facts.untrusted) for slot, layer in enumerate(flatten(layers))
        ]
        seen = 0
        for tokens in texts:
            reads = [state.watch(len(tokens), []) for state in states] if not seen else []
            with watched(shown := [each for each in reads if each is not None]):
                self._logits.append(self._forward(mx.array([tokens]), layers))
            self.facts.passes = self.facts.passes if seen else all(each.known for each in shown)
            seen += len(tokens)
            for slot, state in enumerate(states):
                if state.whole:
                    state.count_tokens(len(tokens))
                if not state.empty and state.offset != seen:
                    self.facts.correct(slot, state.offset)
                    states[slot] = distrust(state, seen)
        return states
