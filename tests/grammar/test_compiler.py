"""Grammars are compiled once, off the callers' threads, and kept as long as there is room; what is none is not kept."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from threading import Barrier, Event
from typing import ParamSpec, TypeVar

import pytest
from llguidance import LLTokenizer

from protocol.format import ConstString, Format, Lark
from runner.errors import RequestError
from runner.grammar import Compiler, vocabulary
from runner.grammar import compiler as module
from runner.tokenizer import Tokenizer
from tests.grammar.walks import Inline, bits, bytes_tokenizer, format_of, spelled, words_tokenizer

P = ParamSpec("P")
T = TypeVar("T")
NONE = Lark("start: nowhere")


class Counting(Executor):
    """Counts what it hands on to another one."""

    def __init__(self, inner: Executor) -> None:
        self.count = 0
        self._inner = inner

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        self.count += 1
        return self._inner.submit(fn, *args, **kwargs)


class Bench:
    """A compiler, and how often it compiles."""

    def __init__(self, inner: Executor | None = None) -> None:
        self._helper = Counting(inner or Inline())
        self.compiler = Compiler(bytes_tokenizer(), 0, self._helper)

    def compiles(self, wanted: Format) -> bool:
        """Whether it has to."""
        before = self._helper.count
        self.compiler.submit(wanted)
        return self._helper.count > before

    @property
    def count(self) -> int:
        return self._helper.count


def answer(compiling: "Future[module.Compiled]") -> bytes:
    return spelled(compiling.result().guide().forced(99), bytes_tokenizer())


def test_the_same_grammar_is_compiled_once() -> None:
    bench = Bench()
    first = bench.compiler.submit(ConstString("a"))
    assert bench.compiler.submit(ConstString("a")) is first
    assert (
        bench.compiler.submit(format_of({"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}))
        is first
    )
    assert bench.count == 1
    assert answer(bench.compiler.submit(ConstString("b"))) == b"b"
    assert answer(first) == b"a"
    assert bench.count == 2


def test_one_that_is_being_compiled_is_waited_for() -> None:
    released = Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(released.wait)
        bench = Bench(pool)
        waiting = [bench.compiler.submit(ConstString("a")) for _ in range(3)]
        assert not waiting[0].done()
        assert waiting[1] is waiting[0]
        assert waiting[2] is waiting[0]
        released.set()
        assert answer(waiting[0]) == b"a"
    assert bench.count == 1


def test_many_threads_may_ask_at_once() -> None:
    asked = 8
    barrier = Barrier(asked)
    with ThreadPoolExecutor(2) as helper, ThreadPoolExecutor(asked) as callers:
        bench = Bench(helper)

        def ask(number: int) -> bytes:
            barrier.wait()
            return answer(bench.compiler.submit(ConstString("ab"[number % 2])))

        assert [*callers.map(ask, range(asked))] == [b"a", b"b"] * (asked // 2)
    assert bench.count == 2


def test_it_is_compiled_by_the_helper_and_not_by_who_asks() -> None:
    released = Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(released.wait)
        compiling = Bench(pool).compiler.submit(NONE)
        assert not compiling.done()
        released.set()
        assert wait([compiling]).done
        with pytest.raises(RequestError):
            compiling.result()


def test_one_that_is_none_is_not_kept() -> None:
    bench = Bench()
    for _ in range(2):
        with pytest.raises(RequestError, match="nowhere"):
            bench.compiler.submit(NONE).result()
    assert bench.count == 2


def test_what_is_seen_without_compiling_is_told_at_once() -> None:
    bench = Bench()
    with pytest.raises(RequestError, match="nothing to choose from"):
        bench.compiler.submit(format_of({"type": "or", "elements": []}))
    assert bench.count == 0


def test_the_one_that_was_not_asked_for_the_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KEPT", 3)
    bench = Bench()
    texts = [ConstString(text) for text in "abcd"]
    for text in texts[:3]:
        assert bench.compiles(text)
    assert not bench.compiles(texts[0])
    assert bench.compiles(texts[3]), "in place of b"
    assert not bench.compiles(texts[0])
    assert not bench.compiles(texts[2])
    assert bench.compiles(texts[1])


def test_large_ones_leave_room_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KEPT_CHARACTERS", 1000)
    bench = Bench()
    small, large, vast = ConstString("a"), ConstString("b" * 900), ConstString("c" * 2000)
    assert bench.compiles(small)
    assert bench.compiles(large)
    assert not bench.compiles(small)
    assert bench.compiles(vast)
    assert not bench.compiles(vast), "the last one stays however large it is"
    assert bench.compiles(small)


def test_the_vocabulary_is_built_once_and_not_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    make = vocabulary.make_vocabulary

    def counted(tokenizer: Tokenizer, size: int) -> LLTokenizer:
        built.append(size)
        return make(tokenizer, size)

    monkeypatch.setattr(vocabulary, "make_vocabulary", counted)
    tokenizer = words_tokenizer()
    with ThreadPoolExecutor(4) as pool:
        compiler = Compiler(tokenizer, 0, pool)
        assert built == []
        assert len(wait([compiler.submit(ConstString(str(number))) for number in range(8)]).done) == 8
    assert built == [tokenizer.vocab_size]


def test_the_vocabulary_has_as_many_tokens_as_model_and_tokenizer_have() -> None:
    tokenizer = words_tokenizer()
    for vocab_size, size in ((0, tokenizer.vocab_size), (300, 300), (5000, tokenizer.vocab_size)):
        guide = Compiler(tokenizer, vocab_size, Inline()).submit(format_of({"type": "any_text"})).result().guide()
        assert max(bits(guide.mask())) == size - 1 or max(bits(guide.mask())) == size, "one that ends it may be made up"


@pytest.mark.parametrize("properties", [500, 2000])
def test_as_many_properties_as_anybody_has_may_all_be_left_out(properties: int) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(properties)}}
    guide = Bench().compiler.submit(format_of(schema)).result().guide()
    assert bits(guide.mask()) == [ord("{")] or guide.forced(1) == [ord("{")]
