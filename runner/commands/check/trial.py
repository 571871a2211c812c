"""Tries on this device, for `check --verify`, whether a model's answers can be batched, drafted, and both at once.

The table `TRIED` of runner/model/architectures.py has the results of these trials. A test tries every architecture.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import msgspec

from runner.assemble import sketch, warm_up
from runner.cache.layer_interface import MakeLayers
from runner.cache.layers.batched import BatchedLayers, unbatchable_layers
from runner.cache.layers.states import gather
from runner.cache.sequence import SequenceLayers
from runner.cache.sketch import LayerFacts, Sketch
from runner.device import device
from runner.engine.generation import Forward
from runner.errors import ComputeError
from runner.model import OpenedModel
from runner.model.trials import difference, first_line
from runner.model.weights.loading import load
from runner.model.weights.parameters import refuse_infinite


class Verdict(msgspec.Struct, frozen=True):
    """The reasons why a model lacks an ability. A reason is empty if there is none."""

    table: str
    """The reason in the table of abilities, which decides how the model is served."""
    here: str
    """The fault that the trial on this device found."""

    def __str__(self) -> str:
        if not self.table:
            return "wrong on this device" if self.here else "right"
        return f"never ({self.table}){'' if self.here else ', though nothing went wrong here'}"


class TrialFacts(msgspec.Struct, frozen=True):
    """The verdicts on a model's abilities."""

    batches: Verdict
    """The ability to compute several answers in one forward."""
    drafts: Verdict
    """The ability to compute several tokens of an answer in one forward, alone or in a batch."""

    @property
    def text(self) -> str:
        """The line of the report."""
        return f"answers together: {self.batches}; drafts: {self.drafts}"

    @property
    def warnings(self) -> Iterator[str]:
        """Yields advice for each ability that the table allows and the trial refutes."""
        advised = ((self.batches, "computed together", "--parallel 1"), (self.drafts, "drafted", "--draft off"))
        for verdict, done, flag in advised:
            if verdict.here and not verdict.table:
                yield (
                    f"answers that are {done} would be wrong on this device ({verdict.here}): serve this model with"
                    f" {flag}, and report it"
                )


def try_model(model: OpenedModel, dtype: str, budget_bytes: int) -> TrialFacts:
    """Loads a model and tries it. Raises ModelError if it cannot be loaded, ComputeError if it computes NaN."""
    if device() == "cpu":
        mx.disable_compile()  # serving does so, too
    loaded = load(model, dtype, budget_bytes)
    refuse_infinite(loaded.module)
    drawn = sketch(loaded.make_layers, loaded.logits, model.vocab_size, model.context_length)
    if not warm_up(drawn, drawn.forward, model.vocab_size, model.context_length):
        raise ComputeError(
            "the model computes NaN or infinity, though its weights are numbers: its values exceed their type (try"
            " --dtype float32), or those in config.json are wrong"
        )
    tried = loaded.make_layers, loaded.logits, model.vocab_size
    batches = batch_fault(*tried)
    drafts = draft_fault(*tried) or ("" if batches else rounds_fault(*tried))
    return TrialFacts(Verdict(loaded.unbatchable, batches), Verdict(loaded.undraftable, drafts))


_SLICE_TOKENS = 16  # a prompt is computed in slices of this many tokens, as in serving
_LIMIT = 0.03
_LIMIT_BFLOAT16 = 0.1
"""The largest accepted difference between logits computed for several rows at once and for single rows, relative to the
spread of the logits. The median of the compared rows must not exceed this.

Kernels for different numbers of rows round differently. Over all architectures (tiny models with random weights, which
amplify rounding), rounding alone causes a difference of 0.0007 in the median and 0.009 in the ninth decile for float16,
0.027 and 0.13 for bfloat16. On GPUs float32 may have the 10 bits of float16. Where a model chooses between two nearly
equal experts, a single step may differ by up to 1.6, so one step alone does not count.
"""


def _tried(find: Callable[[], str]) -> str:
    """Runs a trial. Returns the fault that it finds, or the first line of the error that the model raises."""
    try:
        fault = find()
    except Exception as error:  # a model may raise any error for inputs that it does not expect
        fault = first_line(error)
    mx.clear_cache()  # frees the memory that the trial used
    return fault


def _most(off: list[float]) -> float:
    """Returns the difference that most of the differences do not exceed: the lower median."""
    return sorted(off)[(len(off) - 1) // 2]


def _verdict(off: float, layers: list[object]) -> str:
    """Returns the fault of a trial whose logits differ by `off`, or an empty text if rounding explains that."""
    coarse = any(array.dtype == mx.bfloat16 for array in gather(layers, set()))
    return "" if off <= (_LIMIT_BFLOAT16 if coarse else _LIMIT) else f"the logits of a trial are off by {off:.2f}"


_SHORT, _LONG, _LATE = 3, 48, 24
"""Lengths of the prompts in a batch, in tokens. They differ much, so a wrong mask or position shows in the logits."""
_STEPS = 4
"""The most steps of a row.

Without a mask for padding, the logits of the median architecture differ by 0.55, and of nine in ten by more than 0.1.
With one position for all rows they differ more. A model whose logits hardly depend on earlier tokens may pass wrongly.
"""


def batch_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    """Returns the reason why a row in a batch gets other logits than alone, or an empty text. Rows join and leave.

    The caches of a batch have a position for each row, and a mask that hides the padding of shorter rows. A model may
    ignore the mask in attention of its own (gemma2, phi3small), use one position for all rows (gpt_bigcode), or compute
    positions by itself, without an error (afm7).

    `forward` maps token ids [B, L] and a cache list to logits [B, L, V]. An error that it raises is a fault. Computes
    prompts of 75 tokens, 9 forwards of a single token, and 4 of one token for two or three rows.
    """
    return _tried(lambda: _batch_fault(make_layers, forward, vocab_size))


class _Row:
    """A row of a batch that is also computed alone: its layers after the prompt, and the tokens after the prompt."""

    def __init__(self, layers: list[object], tokens: list[int], length: int, forward: Forward) -> None:
        self.layers = layers
        self.following = tokens[length:]
        self.off: list[float] = []
        """For each step, the difference between the row's logits in the batch and alone."""
        self._forward = forward
        for start in range(0, length, _SLICE_TOKENS):
            mx.eval(forward(mx.array([tokens[start : min(start + _SLICE_TOKENS, length)]]), layers))

    def compare(self, token: mx.array, ours: mx.array) -> None:
        """Compares the logits [1, V] of a batch after `token` [1, 1] with the logits of the row alone."""
        self.off.append(difference(ours, self._forward(token, self.layers)[0]))


def _rows(lengths: Sequence[int], steps: int, make_layers: MakeLayers, forward: Forward, vocab_size: int) -> list[_Row]:
    """Returns a row for each length of prompt, each with `steps` tokens after the prompt."""
    rows = []
    for place, length in enumerate(lengths):
        count = length + steps
        # The tokens are spread over the vocabulary, whose first are often special. Each row has other tokens.
        tokens = [(i * len(lengths) + place) * vocab_size // (count * len(lengths)) for i in range(count)]
        rows.append(_Row(make_layers(), tokens, length, forward))
    return rows


def _batch_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    if fault := unbatchable_layers(make_layers()):
        return fault
    rows = _rows((_SHORT, _LONG, _LATE), _STEPS, make_layers, forward, vocab_size)

    def step(*among: _Row) -> None:
        tokens = [mx.array([[row.following.pop()]]) for row in among]
        logits = forward(mx.concatenate(tokens), batch.layers)
        mx.eval(logits)
        for row, token, ours in zip(among, tokens, logits, strict=True):
            row.compare(token, ours)

    short, long, late = rows
    batch = BatchedLayers([short.layers, long.layers])
    step(short, long)
    batch.extend([late.layers])
    step(short, long, late)
    batch.keep([0, 2])
    for _ in range(_STEPS - 2):
        step(short, late)
    return _verdict(max(_most(row.off) for row in rows), short.layers)


_PLACES = (3, 43)
"""The positions at which rounds begin: one after few tokens, one where windows are full. There, a token that the model
must not see changes the logits most. No size of a chunk, a block or a pool of keys divides these numbers."""
_COUNT, _RIGHT = 5, 2
"""The number of tokens in a round, and the number of right tokens at its beginning."""
_LIMIT_DRAFTS = 1e-3
"""The largest accepted change of the logits of right tokens when the drafts after them change, relative to the logits'
spread. The kernels are the same, so the change is 0 in all architectures but phi3small."""


def draft_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    """Returns the reason why drafts would change the answers of a model, or an empty text.

    Several tokens in one forward must get the logits that they get one by one, and the layers must return to the last
    right token. In one forward, some models see more tokens (phi3small's mask shows the next token in every other
    layer, plamo3's a token more than its window keeps). Layers of unknown classes cannot return.

    `forward` maps token ids [1, L] and a cache list to logits [1, L, V]. An error that it raises is a fault. Computes
    prompts of 76 tokens, four rounds of 5 tokens, up to two more of 2, and 16 forwards of a single token.
    """
    return _tried(lambda: _draft_fault(make_layers, forward, vocab_size))


class _Line:
    """A sequence of tokens and its layers, computed as in a session."""

    def __init__(self, facts: LayerFacts, forward: Forward) -> None:
        self.sequence = SequenceLayers(facts)
        self.layers = self.sequence.layers
        self._forward = forward

    def compute(self, tokens: list[int]) -> mx.array:
        """Computes tokens in one forward, and returns their evaluated logits [L, V]."""
        logits = self._forward(mx.array([tokens]), self.layers)[0]
        mx.eval(logits, self.sequence.arrays())
        self.sequence.count_forward(len(tokens))
        return logits


def _draft_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    count = _PLACES[-1] + _COUNT
    # The tokens are spread over the vocabulary, whose first are often special.
    tokens = [i * 17 % count * vocab_size // count for i in range(count)]
    facts = Sketch(make_layers, forward, vocab_size).facts
    ours, alone = _Line(facts, forward), _Line(facts, forward)
    off = moved = 0.0
    for place in _PLACES:
        for line in (ours, alone):
            while (at := line.sequence.position) < place:
                line.compute(tokens[at : min(at + _SLICE_TOKENS, place)])
        if not ours.sequence.markable:
            names = {type(getattr(s, "layer", s)).__name__ for _, s in ours.sequence.used if not s.markable}
            return f"{', '.join(sorted(names))} cannot go back"
        right = [alone.compute([token]) for token in tokens[place : place + _COUNT]]
        wrong = [(token + vocab_size // 2) % vocab_size for token in tokens[place + _RIGHT : place + _COUNT]]
        found = _round(ours, tokens[place : place + _COUNT], wrong, right)
        off = max(off, _most(found.together), _most(found.after))
        moved = max(moved, _most(found.moved))
    if moved > _LIMIT_DRAFTS:
        return f"drafts change the logits before them by {moved:.2g}"
    return _verdict(off, ours.layers)


class _Found(NamedTuple):
    """The differences between logits, one for each compared token."""

    together: list[float]
    """The tokens of a round, compared with the same tokens computed one by one."""
    moved: list[float]
    """Right tokens before wrong drafts, compared with the same tokens before right drafts."""
    after: list[float]
    """The tokens computed after a round, compared with the same tokens without a round before."""


def _round(line: _Line, tokens: list[int], wrong: list[int], right: list[mx.array]) -> _Found:
    """Computes a round of right tokens and reverts it. Computes the round again with wrong drafts, and reverts to the
    last right token. Computes the other tokens one by one. `right` are the logits of single tokens."""
    sequence, at = line.sequence, line.sequence.position
    mark = sequence.mark(_COUNT)
    logits = line.compute(tokens)
    together = [difference(ours[None], theirs) for ours, theirs in zip(logits, right, strict=True)]
    sequence.revert(mark, at)
    mark = sequence.mark(_COUNT)
    with mark.watched():
        again = line.compute([*tokens[:_RIGHT], *wrong])
    moved = [difference(again[row][None], logits[row][None]) for row in range(_RIGHT)]
    sequence.revert(mark, at + _RIGHT)
    if sequence.position == at:  # some layer could only return to the mark
        line.compute(tokens[:_RIGHT])
    after = [
        difference(line.compute([token]), theirs) for token, theirs in zip(tokens[_RIGHT:], right[_RIGHT:], strict=True)
    ]
    return _Found(together, moved, after)


_RIGHTS = ((1, 4), (4, 2))
"""For each of two rounds, the number of right tokens in each row."""


def rounds_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    """Returns the reason why drafts would change answers in one batch, or an empty text. Returns an empty text, too, if
    layers of a batch cannot return to the last right tokens: serving then drafts nothing in a batch.

    `forward` maps token ids [B, L] and a cache list to logits [B, L, V]. An error that it raises is a fault. Computes
    prompts of 51 tokens, two rounds of 5 tokens for two rows, and 12 forwards of a single token.
    """
    return _tried(lambda: _rounds_fault(make_layers, forward, vocab_size))


def _rounds_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    if unbatchable_layers(make_layers()):
        return ""
    rows = _rows(
        (_SHORT, _LONG), 1 + max(sum(rights) for rights in zip(*_RIGHTS, strict=True)), make_layers, forward, vocab_size
    )
    batch = BatchedLayers([row.layers for row in rows])

    def compute(tokens: list[list[int]], rights: Sequence[int]) -> None:
        logits = forward(mx.array(tokens), batch.layers)
        mx.eval(logits)
        for row, read, ours, right in zip(rows, tokens, logits, rights, strict=True):
            for place in range(right):
                row.compare(mx.array([read[place : place + 1]]), ours[place : place + 1])

    for rights in _RIGHTS:
        right = [[row.following.pop() for _ in range(count)] for row, count in zip(rows, rights, strict=True)]
        tokens = [
            [*each, *((each[-1] + vocab_size // 2 + i) % vocab_size for i in range(_COUNT - len(each)))]
            for each in right
        ]
        with batch.draft_round(_COUNT):
            compute(tokens, rights)
        if not batch.may_accept:
            return ""
        batch.accept(rights)
    compute([[row.following.pop()] for row in rows], (1, 1))
    return _verdict(max(_most(row.off) for row in rows), rows[0].layers)
