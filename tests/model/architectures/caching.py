"""What is asked of an architecture that answers: the same with a cache, in rounds, and from another process's disk.

All three look at one talk. The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize

from runner import cpu
from runner.cache.layers.batched import BatchedLayers
from runner.cache.layers.compiled import CompiledSteps
from runner.cache.single import NullCache
from runner.cache.trie_cache import TrieCache
from runner.commands.check.trial import batch_fault, draft_fault, rounds_fault
from runner.kv_bits.wing import find_format
from runner.model import latent
from runner.model.architectures import UNBATCHABLE, UNDRAFTABLE
from scripts.tools.models import architectures as made
from scripts.tools.models.architectures import Values, build, values
from scripts.tools.models.tiny import VOCAB, Tiny, words
from tests.lib.driver import Answer, ask, ask_uncached, check_equal, check_facts, forwards_at_once, largest
from tests.lib.kernels import in_front
from tests.lib.rounds import Drafting, ask_in_rounds, closing, contents
from tests.model.architectures.subject import Subject
from tests.model.architectures.talk import FOREIGN, LEAST_TOKENS, PROMPT, started
from tests.model.cache.test_disk import same

NOT_SHOWN = "minimax_m3_vl"
"""Its requests take turns, though no short trial shows why they have to."""

QUANTIZED = {
    **dict.fromkeys(("llama", "gemma3_text", "cohere2", "jamba", "falcon_h1"), 8),
    **dict.fromkeys(("gpt2", "gemma3n", "qwen3_next", "lfm2_moe", "baichuan_m1", "afm7"), 4),
    "llama4": 3,
    "step3p5": 5,
}
"""Of each mixture of layers whose keys and values can be quantized, a few; and the bits for each."""
_WIDTHS = ("hidden_size", "hidden_dim", "d_model", "n_embd")
_HEAD_WIDTHS = ("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim")

_ROUNDS = [(5, 3), (2, 1), (3, 3), (8, 4), (5, 1), (8, 8)]


def holds_what_a_sketch_shows(it: Subject) -> None:
    check_facts(it.tiny)


def a_prompt_comes_back_from_the_cache(it: Subject) -> None:  # scenario 48
    """With what an uncached run says, though another one was between; and the first token counts."""
    talk = it.talk
    _, foreign, (back, _), (edited, _), _ = talk.asked
    assert foreign[1].session.cached == 0
    for answer in (talk.back, talk.edited):
        assert (answer.session.matched, answer.session.cached) == (41, 41)
    check_equal(it.tiny, talk.back, ask_uncached(it.tiny, back, say=4, chunk=talk.other_chunk))
    boundaries = [1] * len(edited) if talk.chunk == 1 else [len(edited)]
    plain, other = (
        forwards_at_once(it.tiny, [first, *edited[1:]], boundaries)[-1]
        for first in (edited[0], (edited[0] + 1) % VOCAB)
    )
    assert largest(talk.edited.logits[0] - plain) <= it.tiny.tolerance
    assert largest(other - plain) > 10 * it.tiny.tolerance


def another_process_goes_on_from_the_disk(it: Subject) -> None:
    """Bit for bit as the one that wrote."""
    talk = it.talk
    assert talk.saved >= 1
    same(_restored(it.tiny, talk.directory, talk.asked[2][0], talk.chunk), talk.back)


def _restored(tiny: Tiny, directory: Path, prompt: Sequence[int], chunk: int) -> Answer:
    """What a new process answers."""
    reader = started(tiny, directory)
    with patch("runner.disk.segment_reader.WORTH_TOKENS", LEAST_TOKENS):
        assert reader.restore(prompt) >= len(PROMPT)
    return ask(tiny, reader.cache, prompt, say=4, chunk=chunk)


def answers_in_rounds_as_in_steps(it: Subject) -> None:
    """Before its windows and chunks are full, while they fill, and after; and leaves the same behind."""
    if it.name in UNDRAFTABLE:
        return
    cache = TrieCache(it.tiny.facts)
    for turn, ((prompt, plain), told) in enumerate(zip(it.talk.asked, it.talk.told, strict=True)):
        rounds = _ROUNDS[turn - 1 :] + _ROUNDS[: turn - 1]
        answer = ask_in_rounds(it.tiny, cache, prompt, plain, rounds, chunk=it.talk.chunk)
        assert (answer.session.matched, answer.session.cached) == (plain.session.matched, plain.session.cached)
        check_equal(it.tiny, answer, plain)
        assert contents(cache) == told


def answers_in_rounds_together_as_alone(it: Subject) -> None:
    """Rows of other lengths, of which other drafts are right."""
    if it.name in UNDRAFTABLE or it.name in UNBATCHABLE:
        return
    texts, at = [words(60, seed) for seed in (1, 2, 3)], [9, 40, 23]
    alone = [_read(it.tiny, text[:length]) for text, length in zip(texts, at, strict=True)]
    batch = BatchedLayers(alone)
    for right in ((4, 2, 1), (1, 1, 1), (1, 4, 3), (2, 1, 4)):
        count = 4 if max(right) > 1 else 1
        coming = [text[start : start + count] for text, start in zip(texts, at, strict=True)]
        drafts = [
            [*said[:passed], *((wrong + 1) % VOCAB for wrong in said[passed:])]
            for said, passed in zip(coming, right, strict=True)
        ]
        with batch.draft_round(count) if count > 1 else nullcontext(), cpu.asks_for(right, count):
            logits = it.tiny.logits(mx.array(drafts), batch.layers)
        if count > 1:
            assert batch.may_accept
            batch.accept(right)
        mx.eval(logits, batch.arrays())
        for row, passed in enumerate(right):
            for place in range(passed):
                own = it.tiny.logits(mx.array([[coming[row][place]]]), alone[row])[0, 0]
                assert largest(logits[row, place] - own) <= it.tiny.tolerance
            at[row] += passed


def packed(name: str, bits: int = 8, mode: str = "affine", kinds: Collection[type] = (Linear,)) -> Tiny:
    """The model with packed layers of these kinds, which our kernels compute."""
    module = made.make_module(name)

    def fits(_: str, layer: Module) -> bool:
        return type(layer) in kinds and layer.weight.shape[-1] % 32 == 0

    quantize(module, 32, bits, mode=mode, class_predicate=fits)
    return made.tiny_of(name, module)


def changes_no_answer_by_leaving_out_padding(name: str) -> None:
    """To the bit, where weights are packed."""
    tiny, texts, at, counts = packed(name), [words(60, seed) for seed in (1, 2, 3)], [9, 40, 23], (3, 1, 2)
    rounds = [
        [*text[start : start + count], *[0] * (3 - count)] for text, start, count in zip(texts, at, counts, strict=True)
    ]
    found = []
    for leaves_out in (False, True):
        batch = BatchedLayers([_read(tiny, text[:length]) for text, length in zip(texts, at, strict=True)])
        with batch.draft_round(3), cpu.asks_for(counts, 3) if leaves_out else nullcontext():
            logits = tiny.logits(mx.array(rounds), batch.layers)
        if not batch.may_accept:
            return
        batch.accept(counts)
        found.append([logits, tiny.logits(mx.array([[5], [6], [7]]), batch.layers)])
        mx.eval(found[-1])
    (whole, after), (part, after_part) = found
    for row, count in enumerate(counts):
        assert mx.array_equal(whole[row, :count], part[row, :count])
    assert mx.array_equal(after, after_part)


def answers_together_as_alone_to_the_bit(name: str) -> None:
    """Compares by bits what our kernels compute for packed weights."""
    if not in_front():
        return
    tiny, texts, at = packed(name), [words(60, seed) for seed in (4, 5, 6)], [9, 40, 23]
    alone = [_read(tiny, text[:length]) for text, length in zip(texts, at, strict=True)]
    batch = BatchedLayers(alone)
    for step in range(3):
        coming = mx.array([[text[length + step]] for text, length in zip(texts, at, strict=True)])
        together = tiny.logits(coming, batch.layers)
        for row, layers in enumerate(alone):
            assert mx.array_equal(together[row], tiny.logits(coming[row : row + 1], layers)[0])


def computes_the_same_bits_wherever_a_text_is_cut(model: Tiny) -> bool:
    """Returns True if logits of a text are equal to the bit when it is read at once, in parts, token by token, and
    beside others. Latent attention takes its form of few tokens in all of these."""
    texts = mx.array([words(24, seed) for seed in (1, 2, 3)])

    def read(rows: int, cuts: Sequence[int]) -> mx.array:
        layers = model.make_layers()
        parts = [model.logits(part, layers) for part in mx.split(texts[:rows], cuts, axis=1)]
        mx.eval(parts)
        return mx.concatenate(parts, axis=1)[0]

    with patch.object(latent, "is_absorbed", lambda *_: True):
        whole, *others = [read(rows, cuts) for rows in (1, 3) for cuts in ([], [8, 23], [*range(1, 24)])]
    return all(mx.array_equal(whole, other) for other in others)


def _read(tiny: Tiny, tokens: Sequence[int]) -> list[object]:
    layers = tiny.make_layers()
    for start in range(0, len(tokens), 16):
        mx.eval(tiny.logits(mx.array([tokens[start : start + 16]]), layers))
    return layers


def forgets_a_round_that_was_given_up(it: Subject) -> None:
    """To the bit: what follows is what would have followed without the round."""
    if it.name in UNDRAFTABLE:
        return
    said = [(7 * i + 3) % VOCAB for i in range(3)]
    logits = []
    for drafts in (True, False):
        with closing(Drafting(it.tiny, NullCache(it.tiny.facts), PROMPT, said, chunk=41)) as drafting:
            for _ in range(2):
                if drafts:
                    drafting.draft(5, 1)
                    drafting.session.accept(0)
                drafting.step()
        logits.append(mx.stack(drafting.logits))
    assert mx.array_equal(logits[0], logits[1])


def may_draft_as_the_table_says(it: Subject) -> None:
    fault = draft_fault(it.tiny.make_layers, it.tiny.logits, VOCAB)
    assert (not fault) == (it.name not in UNDRAFTABLE), fault
    if it.name not in {*UNBATCHABLE, *UNDRAFTABLE}:
        assert rounds_fault(it.tiny.make_layers, it.tiny.logits, VOCAB) == ""


def goes_on_from_the_disk_with_quantized_keys_and_values(it: Subject) -> None:
    if not (bits := QUANTIZED.get(it.name)):
        return
    with patch.object(made, "values", _widened):
        model = build(it.name)
    chosen = find_format(model.make_layers, model.logits, VOCAB, bits)
    assert chosen.name == f"kv{bits}"
    model = model._replace(make_layers=chosen.make_layers, tolerance=0.1)
    prompt = [*PROMPT, *words(12, seed=3)]
    process = started(model, it.root / "kv")
    for said in (PROMPT, FOREIGN):
        ask(model, process.cache, said, say=0, chunk=24)
    assert process.save() >= 1
    answer = ask(model, process.cache, prompt, say=4, chunk=24)
    same(_restored(model, it.root / "kv", prompt, 24), answer)
    check_equal(model, answer, ask_uncached(model, prompt, say=4, chunk=24))


def _widened(name: str) -> Values:
    """Values of a configuration with heads as wide as a group of quantized numbers."""
    wide = {**dict.fromkeys(_WIDTHS, 128), **dict.fromkeys(_HEAD_WIDTHS, 32)}
    return {field: wide.get(field, value) for field, value in values(name).items()}


def can_be_batched_as_the_table_says(it: Subject) -> None:
    fault = batch_fault(it.tiny.make_layers, it.tiny.logits, VOCAB)
    assert (not fault and it.name != NOT_SHOWN) == (it.name not in UNBATCHABLE), fault


def compiled_steps_are_plain_ones(it: Subject) -> None:
    """To the bit, as far as steps can be compiled."""
    if it.name in UNBATCHABLE or not in_front():
        return
    steps = CompiledSteps(it.tiny.logits, it.tiny.logits)
    ways = [(forward, _read(it.tiny, PROMPT)) for forward in (it.tiny.logits, steps)]
    for token in range(8):
        plain, compiled = (forward(mx.array([[token]]), layers) for forward, layers in ways)
        mx.eval(plain, compiled)
        assert mx.array_equal(plain, compiled)
    assert steps.ran or not steps.on


QUESTIONS = (
    holds_what_a_sketch_shows,
    a_prompt_comes_back_from_the_cache,
    another_process_goes_on_from_the_disk,
    answers_in_rounds_as_in_steps,
    answers_in_rounds_together_as_alone,
    forgets_a_round_that_was_given_up,
    may_draft_as_the_table_says,
    can_be_batched_as_the_table_says,
    compiled_steps_are_plain_ones,
)
"""The questions that every model can be asked, however its layers are made."""
