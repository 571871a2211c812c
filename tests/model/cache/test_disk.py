"""A restored answer is bit for bit what the trie of the process that wrote would have answered."""

import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.cache.checkpoints import CheckpointPolicy
from runner.cache.sketch import Sketch
from runner.cache.trie_cache import TrieCache
from runner.disk import serialize
from runner.disk.restores import insert_restored
from runner.disk.segment import Name, SegmentError
from runner.disk.segment_reader import Reader, Wanted
from runner.disk.serialize import Part, array_in, array_of, copy_piece, copy_tokens, forms_of
from runner.disk.store import SegmentStore
from runner.disk.unsaved import UnsavedSegments
from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny
from tests.lib.driver import Answer, ask, ask_uncached, check_equal, check_trie
from tests.lib.tiny_engine import SLICEABLE
from tests.unit.disk.made import NAMESPACE, ROOT, store
from tests.unit.disk.test_hostile import FIELDS, reseal


def words(count: int, seed: int = 0) -> list[int]:
    return [(7 * index + 3 * seed + index * index) % VOCAB for index in range(count)]


class Process:
    """A process with a trie over a model, and a directory."""

    def __init__(
        self, model: Tiny, directory: Path, budget: int | None = None, policy: CheckpointPolicy | None = None
    ) -> None:
        self.model = model
        self.cache = TrieCache(model.facts, budget, policy or CheckpointPolicy(gap=8, first_distance=64))
        self.store: SegmentStore = store(directory)
        self.unsaved = UnsavedSegments(self.cache, self.store.index, NAMESPACE, ROOT)
        self.reader = Reader(self.store, ROOT)
        self.adopted: list[Name] = []
        self.layers = forms_of(Sketch(model.make_layers, model.logits, VOCAB))

    def ask(self, prompt: Sequence[int], say: int = 4) -> Answer:
        answer = ask(self.model, self.cache, prompt, say=say, chunk=32)
        check_trie(self.cache)
        return answer

    def save(self) -> int:
        """Writes everything that is not on disk; returns the number of segments."""
        count = 0
        while (copy := self.unsaved.next_copy()) is not None:
            while copy.segment is None:
                assert copy.copy_next()
            self.unsaved.send(copy)
            assert self.store.publish(copy.segment)
            self.unsaved.end(copy, written=True)
            count += 1
        return count

    def restore(self, prompt: Sequence[int]) -> int:
        """Adopts what there is of a prompt; returns the tokens that can be reused now."""
        tokens = array("i", prompt)
        states = self.cache.sequences.kept.states
        tails = [state for state in states if not state.sliceable and not state.whole]
        wanted = Wanted(
            tokens,
            "",
            self.cache.reusable_tokens(tokens, ""),
            lambda at: min((state.needs(at) for state in tails), default=at - 1),
            self.layers,
        )
        for found in self.reader.read_prompt(wanted):
            if not insert_restored(self.cache, found.prefix, "", found.segment):
                break
            self.adopted.append(found.segment.name)
        check_trie(self.cache)
        return self.cache.reusable_tokens(tokens, "")


def written(model: Tiny, directory: Path, prompt: list[int]) -> Process:
    """Returns a process that has computed a prompt and written it to the directory."""
    writer = Process(model, directory)
    writer.ask(prompt)
    writer.save()
    return writer


def same(one: Answer, other: Answer) -> None:
    assert one.session.cached == other.session.cached
    assert one.tokens == other.tokens
    for ours, theirs in zip(one.logits, other.logits, strict=True):
        assert mx.array_equal(ours, theirs)


def following(answer: Answer, prompt: Sequence[int], count: int = 20) -> list[int]:
    return [*prompt, *answer.tokens, *words(count, 5)]


FIRST, OTHER = words(600), [*words(300), *words(280, 9)]
PROMPTS: dict[str, Callable[[Answer], list[int]]] = {
    "one turn more": lambda answer: following(answer, FIRST),
    "the same again": lambda _: FIRST,
    "an edit": lambda _: [*FIRST[:450], *words(60, 3)],
    "the other branch": lambda _: [*OTHER, *words(30, 2)],
}


@pytest.mark.parametrize("ask", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_answer_is_what_the_writer_would_have_answered(kind: str, ask: str, tmp_path: Path) -> None:
    writer = Process(tiny(kind), tmp_path)
    writer.ask(OTHER)
    prompt = PROMPTS[ask](writer.ask(FIRST))
    writer.ask(words(40, 4))  # what the reader will ask for is paged out
    assert writer.save() >= 3
    assert writer.save() == 0
    reader = Process(tiny(kind), tmp_path)
    assert reader.restore(prompt) >= 250
    ours, theirs = reader.ask(prompt), writer.ask(prompt)
    if ask == "one turn more" or kind in SLICEABLE:
        same(ours, theirs)
    else:  # memory also knows what it cannot stand at: it stops there, or within a tail, a few tokens later
        assert theirs.session.cached - 32 <= ours.session.cached <= theirs.session.cached
        check_equal(tiny(kind), ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_over_many_processes(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    lasting = Process(model, tmp_path / "lasting")
    prompt, written = words(400), 0
    for turn in range(4):
        process = Process(model, tmp_path / "short")
        process.restore(prompt)
        answer = process.ask(prompt)
        lasting.ask(words(40, turn + 50))  # what it is asked for is paged out
        same(answer, lasting.ask(prompt))
        assert (answer.session.cached > 0) == (turn > 0)
        process.save()
        written += process.store.written_bytes
        prompt = following(answer, prompt, 40)
    again = Process(model, tmp_path / "short")
    again.restore(prompt[:-40])
    assert again.save() == 0


def test_a_budget_takes_the_beginning_and_keeps_its_bound(tmp_path: Path) -> None:
    for kind in ("llama", "qwen3_next"):
        writer = Process(tiny(kind), tmp_path / kind)
        prompt = words(1500)
        writer.ask(prompt)
        writer.save()
        budget = writer.cache.session_bytes(800)
        reader = Process(tiny(kind), tmp_path / kind, budget)
        reader.restore(prompt)
        assert 0 < reader.cache.nbytes <= budget
        reader.ask(prompt[:700])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_segments_are_found_through_any_number_of_branches(kind: str, tmp_path: Path) -> None:
    """Each prompt parts from the one before inside a segment that is on disk already."""
    writer, prompt = Process(tiny(kind), tmp_path), words(600)
    for seed, at in enumerate((300, 700, 1100), start=1):
        writer.ask(prompt)
        writer.save()
        prompt = [*prompt[:at], *words(500, seed)]
    writer.ask(prompt)
    writer.save()
    assert Process(tiny(kind), tmp_path).restore(prompt) >= len(prompt) - 10
    if kind == "llama":  # memory has the tokens before a segment that is gone
        reader = Process(tiny(kind), tmp_path)
        reader.ask(prompt[:400])
        for name in list(reader.store.index.names.values()):
            if name.start == 0:
                reader.store.reject(name, "torn")
        assert reader.restore(prompt) == len(prompt) - 1


def test_the_restored_prompt_makes_others_give_way(tmp_path: Path) -> None:
    """Both the conversation that ran last and the older ones, but not what memory has of the prompt itself."""
    prompt = words(800)
    writer = written(tiny("llama"), tmp_path, prompt)
    budget = writer.cache.session_bytes(1150)
    reader = Process(tiny("llama"), tmp_path, budget)
    reader.ask(prompt[:300])
    for seed in (5, 6):
        reader.ask(words(300, seed))
    assert reader.restore(prompt) == len(prompt) - 1
    assert reader.cache.nbytes <= budget
    assert reader.adopted[0].start == 256
    small = Process(tiny("llama"), tmp_path, writer.cache.session_bytes(500))
    small.ask(prompt[:450])
    small.restore(prompt)
    assert small.cache.sequences.end is not None  # nothing gives way to a segment beyond the budget


def test_a_tail_from_disk_replaces_the_end_of_one_in_memory(tmp_path: Path) -> None:
    model, prompt = tiny("gemma3"), words(600)
    written(model, tmp_path, prompt)
    reader = Process(model, tmp_path)
    reader.ask(prompt[:590], say=1)
    answer = reader.ask(prompt)
    reader.ask(words(40, 4))
    for node in [*reader.cache.trie.nodes()]:
        for slot, held in enumerate(node.slots):
            if node.end < 596 and held is not None and not reader.cache.sequences.kept.states[slot].sliceable:
                held.close()
                node.slots[slot] = None
    assert reader.cache.reusable_tokens(array("i", prompt), "") < 340
    assert reader.restore(prompt) == 599
    check_equal(model, reader.ask(prompt), answer)


@pytest.mark.parametrize("kind", ["llama", "quantized", "gemma3", "qwen3_next", "deepseek_v41"])
def test_a_file_with_right_sums_that_no_layer_can_hold_is_removed(kind: str, tmp_path: Path) -> None:
    """Of each kind of segments one, of other types, shapes, or places."""
    model, prompt = tiny(kind), words(400)
    written(model, tmp_path, prompt)
    clean = Process(model, tmp_path)
    right = clean.restore(prompt)
    assert right > 300
    for victim in {name.kind: clean.store.folder / name.file for name in clean.adopted}.values():
        whole = victim.read_bytes()
        for field in ("types", "axes", "widths", "no records", "starts later", "another tree", "fewer layers"):
            reseal(victim, FIELDS[field])
            reader = Process(model, tmp_path)
            assert reader.restore(prompt) < right
            assert reader.store.rejected == {"layers": 1}, field
            assert not victim.exists()
            victim.write_bytes(whole)
    assert Process(model, tmp_path).restore(prompt) == right


def test_memory_may_hold_the_beginning_of_a_segment(tmp_path: Path) -> None:
    """The segment begins at 256, and memory parts from the prompt at 300."""
    model, prompt = tiny("llama"), words(700)
    written(model, tmp_path, prompt)
    reader = Process(model, tmp_path)
    reader.ask([*prompt[:300], *words(40, 7)])
    assert reader.restore(prompt) == 699
    check_equal(model, reader.ask(prompt), ask_uncached(model, prompt, chunk=32))


def test_a_segment_is_not_adopted_without_what_it_follows(tmp_path: Path) -> None:
    writer = Process(tiny("llama"), tmp_path)
    prompt = words(700)
    writer.ask(prompt)
    writer.save()
    reader = Process(tiny("llama"), tmp_path)
    wanted = Wanted(array("i", prompt), "", 0, lambda at: at - 1, reader.layers)
    first, second, *_ = reader.reader.read_prompt(wanted)
    assert not insert_restored(reader.cache, second.prefix, "", second.segment)
    assert reader.cache.reusable_tokens(wanted.tokens, "") == 0
    assert reader.cache.sequences.totals.ledger.count == 0
    for found in (first, second):
        assert insert_restored(reader.cache, found.prefix, "", found.segment)
    assert reader.cache.reusable_tokens(wanted.tokens, "") == 512


def test_a_small_bound_makes_small_segments(tmp_path: Path) -> None:
    """Of tokens, a quarter of it at most; a state that takes more than half of it is not kept."""
    for kind, most_bytes in (("llama", 40_000), ("qwen3_next", 1)):
        process = Process(tiny(kind), tmp_path / kind)
        process.unsaved = UnsavedSegments(process.cache, process.store.index, NAMESPACE, ROOT, most_bytes=most_bytes)
        process.ask(words(400))
        assert (process.save() > 10) == (kind == "llama")
        limit = most_bytes // 4 // process.cache.sequences.facts.token_bytes
        assert all(name.stop - name.start <= limit for name in process.store.index.names.values())
    assert Process(tiny("llama"), tmp_path / "llama").restore(words(400)) == 399


def test_a_copy_is_dropped_when_its_node_changes(tmp_path: Path) -> None:
    process = Process(tiny("llama"), tmp_path)
    process.ask(words(400))
    copy = process.unsaved.next_copy()
    assert copy is not None
    assert copy.copy_next()
    process.ask([*words(100), 3, 4, 5])  # splits the node
    assert not copy.copy_next()
    process.unsaved.end(copy, written=False)
    assert process.save() >= 2
    assert Process(tiny("llama"), tmp_path).restore(words(400)) == 399


def test_pictures_are_found_by_their_digest_whatever_their_name(tmp_path: Path) -> None:
    digests = {-1: b"a" * 32, -2: b"b" * 32}
    prompt = [*words(200), *[-1] * 40, *words(80), *[-2] * 30, *words(50)]
    writer = Process(tiny("llama"), tmp_path)
    writer.unsaved = UnsavedSegments(writer.cache, writer.store.index, NAMESPACE, ROOT, digest_of=digests.get)
    writer.ask(prompt)
    writer.save()

    names = {b"a" * 32: -7, b"b" * 32: -3, b"c" * 32: -9}
    of = {name: digest for digest, name in names.items()}
    for pictures, held in (((-7, -3), 399), ((-7, -9), 320), ((-9, -3), 200)):
        shown = [pictures[-1 - token] if token < 0 else token for token in prompt]
        reader = Process(tiny("llama"), tmp_path)
        reader.reader = Reader(reader.store, ROOT, of.get, names.__getitem__)
        assert reader.restore(shown) == (held if held > 256 else 0)

    forgotten = Process(tiny("llama"), tmp_path / "other")
    forgotten.ask(prompt)
    assert forgotten.save() == 0


def test_views_of_live_layers_do_not_outlive_the_copy() -> None:
    """A view that is left, and MLX would copy the whole buffer with the next write; a reference, likewise."""
    layers = mx.zeros((1, 2, 512, 8))
    mx.eval(layers)
    into = memoryview(bytearray(2 * 512 * 8 * 4))
    before = sys.getrefcount(layers)
    copy_tokens(Part(layers, (100, 200)), into, 0, 512, on_device=False)
    copy_piece(layers, into, 0, on_device=False)
    assert sys.getrefcount(layers) == before


@pytest.mark.parametrize(
    "dtype",
    [
        *(mx.bfloat16, mx.float16, mx.float32, mx.complex64, mx.bool_, mx.int8, mx.uint8, mx.int16, mx.uint16),
        *(mx.int32, mx.uint32, mx.int64, mx.uint64),
    ],
)
@pytest.mark.parametrize("shape", [(1, 2, 6, 4), (1, 1, 6, 3), (5,), (), (1, 2, 0, 4), (3, 2, 2, 2)])
def test_arrays_are_copied_bit_for_bit(
    dtype: mx.Dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    array_ = (mx.random.uniform(shape=shape) * 100).astype(dtype)
    turned = mx.transpose(mx.contiguous(mx.transpose(array_)))
    for source, on_device, piece in product((array_, turned), (False, True), (dtype.size, 24, 1 << 19)):
        monkeypatch.setattr(serialize, "PIECE_BYTES", piece)
        data, at = memoryview(bytearray(array_.nbytes)), 0
        while at < len(data):
            before, at = at, copy_piece(source, data, at, on_device=on_device)
            assert before < at <= before + piece
        back = array_of(data, Part(source).dtype, array_.shape)
        assert (back.shape, back.dtype) == (array_.shape, array_.dtype)
        assert mx.array_equal(back, array_)
        for start in (0, 3, 8):
            room = mx.zeros((start + len(data) + 5,), mx.uint8)
            memoryview(cast("bytes", room))[start : start + len(data)] = data
            shared = array_in(room, start, Part(source).dtype, array_.shape)
            assert (shared.shape, shared.dtype) == (array_.shape, array_.dtype)
            assert mx.array_equal(shared, array_)
            if data:
                memoryview(cast("bytes", room))[start : start + len(data)] = bytes(len(data))
                assert bytes(shared) == (bytes(data) if start % dtype.size else bytes(len(data)))
        if len(shape) == 4 and shape[-2] == 6:
            data = memoryview(bytearray(array_.nbytes // 2))
            for first, span in ((0, (2, 3)), (1, (3, 5))):
                copy_tokens(Part(source, span), data, first, 3, on_device=on_device)
            assert mx.array_equal(array_of(data, Part(source).dtype, (*shape[:2], 3, shape[3])), array_[..., 2:5, :])


def test_what_was_kept_of_a_layer_in_another_form_is_refused(tmp_path: Path) -> None:
    written(tiny("llama"), tmp_path, words(400))
    reader = Process(tiny("llama"), tmp_path)
    reader.cache.sequences.facts.correct(0, 1)
    reader.cache.detach()
    with pytest.raises(SegmentError, match="layers"):
        reader.restore(words(400))
