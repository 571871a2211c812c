"""Tries what a model allows on the device at hand, for `mlx-runner check --verify`.

The same trials make the table `TRIED` of runner/model/families.py, and a test holds every architecture against it.
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
from runner.model.weights.load import load
from runner.model.weights.parameters import refuse_infinite


class Verdict(msgspec.Struct, frozen=True):
    """Reasons why a model must not do something; each is empty if it may."""

    table: str
    """By the table, which decides how the model is served."""
    here: str
    """By the trial on this device."""


class TrialFacts(msgspec.Struct, frozen=True):
    """The abilities of a model."""

    batches: Verdict
    """Several answers in one forward."""
    drafts: Verdict
    """Several tokens of an answer in one forward, alone and together with other answers."""

    @property
    def warnings(self) -> Iterator[str]:
        """Yields what to do where the table allows what goes wrong here."""
        advised = ((self.batches, "computed together", "--parallel 1"), (self.drafts, "drafted", "--draft off"))
        for verdict, done, flag in advised:
            if verdict.here and not verdict.table:
                yield (
                    f"answers that are {done} would be wrong on this device ({verdict.here}): serve this model with"
                    f" {flag}, and report it"
                )


def try_model(model: OpenedModel, dtype: str, budget_bytes: int) -> TrialFacts:
    """Loads a model and tries it; the arguments after it are settings. Raises ModelError if it cannot be loaded, or
    computes no numbers."""
    if device() == "cpu":
        mx.disable_compile()  # as serving does
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


_SLICE_TOKENS = 16  # of a prompt: windows and chunks fill slice by slice
_LIMIT = 0.03
_LIMIT_BFLOAT16 = 0.1
"""The largest accepted difference between the logits of several rows at once and those of single rows, in relation to
their spread, in most of the rows that are compared.

Other numbers of rows have other kernels, which round differently. Measured over all architectures (tiny ones with
random weights, which amplify rounding), rounding alone costs 0.0007 in the median architecture and up to 0.009 in nine
of ten for float16, 0.027 and 0.13 for bfloat16; other kernels change a part of that. float32 may have the 10 bits of
float16 on GPUs. Single steps are off by up to 1.6, where two experts are nearly tied, so one step alone does not count.
"""


def _tried(find: Callable[[], str]) -> str:
    """Returns the fault that a trial finds, or the first line of what the model raises in it."""
    try:
        fault = find()
    except Exception as error:  # models raise anything when given what they do not expect
        fault = first_line(error)
    mx.clear_cache()  # so that the trial leaves no memory in use
    return fault


def _most(off: list[float]) -> float:
    """Returns the lower of the medians of some differences: single ones do not count."""
    return sorted(off)[(len(off) - 1) // 2]


def _verdict(off: float, layers: list[object]) -> str:
    """Returns the fault of a trial whose logits, over these layers, are off by `off`; empty if it is rounding."""
    coarse = any(array.dtype == mx.bfloat16 for array in gather(layers, set()))
    return "" if off <= (_LIMIT_BFLOAT16 if coarse else _LIMIT) else f"the logits of a trial are off by {off:.2f}"


# --- Tries whether a model gives the rows of a batch the logits that each row gets alone. The caches of a batch
# count the positions in an array, one for each row, and hide the padding of shorter rows behind a mask. Attention
# that is written out by hand may not know such a mask (gemma2, phi3small), a model may want one position for all
# rows (gpt_bigcode), or compute positions by itself (afm7, silently wrong).

_SHORT, _LONG, _LATE = 3, 48, 24
"""Lengths of the prompts, in tokens. Much padding for few tokens: the more there is, the more a wrong mask or position
changes."""

_STEPS = 4
"""The steps of a row at most.

Without the padding in its mask the median architecture is off by 0.55, and nine of ten by more than 0.1; one position
for all rows costs more. A model that hardly looks at its past may change less than the limit, and goes unnoticed.
"""


def batch_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    """Returns why rows that join and leave a batch do not get the logits that they get alone; empty if they do.

    `forward` takes token ids [B, L] and a cache list to logits [B, L, V]; an error that it raises is a fault. Computes
    prompts of 75 tokens, 9 forwards of a single token, and 4 of one token for two or three rows.
    """
    return _tried(lambda: _batch_fault(make_layers, forward, vocab_size))


class _Row:
    """A prompt that is read alone, and the tokens that follow it."""

    def __init__(self, layers: list[object], tokens: list[int], length: int, forward: Forward) -> None:
        self.layers = layers
        self.following = tokens[length:]
        self.off: list[float] = []
        """The differences between the logits of the batch and of the row alone, one for each step."""
        self._forward = forward
        for start in range(0, length, _SLICE_TOKENS):
            mx.eval(forward(mx.array([tokens[start : min(start + _SLICE_TOKENS, length)]]), layers))

    def compare(self, token: mx.array, ours: mx.array) -> None:
        """Compares the logits [1, V] that a batch gave for `token` [1, 1] with those that the row gives alone."""
        self.off.append(difference(ours, self._forward(token, self.layers)[0]))


def _rows(lengths: Sequence[int], steps: int, make_layers: MakeLayers, forward: Forward, vocab_size: int) -> list[_Row]:
    """Returns a row for each of these lengths, which `steps` tokens follow."""
    rows = []
    for place, length in enumerate(lengths):
        count = length + steps
        # From all over the vocabulary, whose first tokens are often special ones; different for each row.
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


# --- Tries whether a model may draft: whether several tokens in one forward get the logits that they get one by
# one, and whether its layers go back to where those that are right end. Some models see more of the tokens in one
# forward than they would one by one (phi3small, whose mask shows in every other layer what follows a token; plamo3,
# whose mask shows a token more than its window keeps), and layers of unknown classes cannot go back.

_PLACES = (3, 43)
"""The positions at which rounds begin. Tokens that a model should not see weigh most after few others, or with a full
window. Neither number is a multiple of the size of a chunk, a block or a pool of keys."""

_COUNT, _RIGHT = 5, 2
"""The tokens of a round, and how many of them are right."""

_LIMIT_DRAFTS = 1e-3
"""The largest accepted difference that other drafts after them make to the logits of the right tokens, in relation to
their spread. The kernels are the same, so nothing is rounded otherwise: it is 0 in all architectures but phi3small."""


def draft_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    """Returns why drafts would change the answers of a model; empty if they would not.

    `forward` takes token ids [1, L] and a cache list to logits [1, L, V]; an error that it raises is a fault. Computes
    prompts of 76 tokens, four rounds of 5 tokens, up to two more of 2, and 16 forwards of a single token.
    """
    return _tried(lambda: _draft_fault(make_layers, forward, vocab_size))


class _Line:
    """A sequence that reads tokens as a session does."""

    def __init__(self, facts: LayerFacts, forward: Forward) -> None:
        self.sequence = SequenceLayers(facts)
        self.layers = self.sequence.layers
        self._forward = forward

    def read(self, tokens: list[int]) -> mx.array:
        """Returns the logits [L, V] of a forward, evaluated."""
        logits = self._forward(mx.array([tokens]), self.layers)[0]
        mx.eval(logits, self.sequence.arrays())
        self.sequence.count_forward(len(tokens))
        return logits


def _draft_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    count = _PLACES[-1] + _COUNT
    # From all over the vocabulary, whose first tokens are often special ones.
    tokens = [i * 17 % count * vocab_size // count for i in range(count)]
    facts = Sketch(make_layers, forward, vocab_size).facts
    ours, alone = _Line(facts, forward), _Line(facts, forward)
    off = moved = 0.0
    for place in _PLACES:
        for line in (ours, alone):
            while (at := line.sequence.position) < place:
                line.read(tokens[at : min(at + _SLICE_TOKENS, place)])
        if not ours.sequence.markable:
            names = {type(getattr(s, "layer", s)).__name__ for _, s in ours.sequence.used if not s.markable}
            return f"{', '.join(sorted(names))} cannot go back"
        right = [alone.read([token]) for token in tokens[place : place + _COUNT]]
        wrong = [(token + vocab_size // 2) % vocab_size for token in tokens[place + _RIGHT : place + _COUNT]]
        found = _round(ours, tokens[place : place + _COUNT], wrong, right)
        off = max(off, _most(found.together), _most(found.after))
        moved = max(moved, _most(found.moved))
    if moved > _LIMIT_DRAFTS:
        return f"drafts change the logits before them by {moved:.2g}"
    return _verdict(off, ours.layers)


class _Found(NamedTuple):
    """Differences between logits, one for each row that was compared."""

    together: list[float]
    """A round, compared with single tokens."""
    moved: list[float]
    """The right tokens, compared with themselves before other drafts."""
    after: list[float]
    """The tokens after a round, compared with single tokens."""


def _round(line: _Line, tokens: list[int], wrong: list[int], right: list[mx.array]) -> _Found:
    """Reads a round, goes back to where it began, reads it again with wrong drafts, goes back to the end of what is
    right, and reads on one by one. `right` are the logits of single tokens."""
    sequence, at = line.sequence, line.sequence.position
    mark = sequence.mark(_COUNT)
    logits = line.read(tokens)
    together = [difference(ours[None], theirs) for ours, theirs in zip(logits, right, strict=True)]
    sequence.revert(mark, at)
    mark = sequence.mark(_COUNT)
    with mark.watched():
        again = line.read([*tokens[:_RIGHT], *wrong])
    moved = [difference(again[row][None], logits[row][None]) for row in range(_RIGHT)]
    sequence.revert(mark, at + _RIGHT)
    if sequence.position == at:  # a layer can only go back to the mark
        line.read(tokens[:_RIGHT])
    after = [
        difference(line.read([token]), theirs) for token, theirs in zip(tokens[_RIGHT:], right[_RIGHT:], strict=True)
    ]
    return _Found(together, moved, after)


# --- Tries whether a model may draft for several answers in one forward: whether the rows of a batch get the logits
# that they get one by one, and stand, each by itself, after those of its tokens that are right.

_RIGHTS = ((1, 4), (4, 2))
"""The tokens of each row that are right, in two rounds."""


def rounds_fault(make_layers: MakeLayers, forward: Forward, vocab_size: int) -> str:
    """Returns why drafts would change answers that are computed together; empty if they would not, or if their layers
    cannot go back one by one, so that nothing is drafted then.

    `forward` takes token ids [B, L] and a cache list to logits [B, L, V]; an error that it raises is a fault. Computes
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
