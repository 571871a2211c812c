"""Several requests over `Scheduler`, driven slice by slice in the thread of the test, and what each of them must get.

Nothing here waits: slices come from `advance`, time from a made-up clock, and the oracle of a request is a plain loop
over fresh layers that computes it alone.
"""

import json
import random
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, cast
from unittest.mock import patch

import mlx.core as mx
from llguidance import LLMatcher

import runner.engine.scheduler
from protocol import DoneReason, Logprob
from protocol.format import Lark
from runner.cache import make_cache
from runner.cache.session import LiveSession
from runner.cache.trie_cache import TrieCache
from runner.engine.context import BatchTrial, EngineContext, SettledTrial
from runner.engine.events import Event, EventStream, Failed, Finished, Outbox, Refused, Started, Text
from runner.engine.generation import Generation
from runner.engine.memory.budget import MemoryBudget
from runner.engine.policy import Begin, Decode, Prefill, Slice, SlicePolicy, View
from runner.engine.request import Request
from runner.engine.scheduler import Scheduler
from runner.engine.stop_strings import StopStrings
from runner.grammar import Grammar, Guide
from runner.grammar.compiler import Compiler
from runner.grammar.guide import StateSource
from runner.grammar.messages import Follow, State
from runner.grammar.vocabulary import make_vocabulary
from runner.sampling import SamplingOptions
from runner.sampling.sampler import Sampler
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, find_fault, tiny
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.lib.breaking import breaking as break_call
from tests.lib.driver import _breaking, check_trie, largest

CONTEXT = 4096
MOST_SLICES = 20_000
BATCHABLE = ("llama", "gemma3", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "deepseek_v32")
"""The kinds whose rows decode in one forward."""
BY_TURNS = ("quantized", "llama4", "deepseek_v41")
SLICEABLE = ("llama", "deepseek_v3", "deepseek_v32", "quantized")
"""The kinds of which any prefix can be used again."""


@cache
def tokenizer(eos: frozenset[int] = frozenset()) -> Tokenizer:
    """Token i is byte i + 1, so that every generated token is one ASCII character."""
    files = {
        "tokenizer.json": json.dumps(byte_level(ALL_BYTES[1 : VOCAB + 1])).encode(),
        "generation_config.json": json.dumps({"eos_token_id": sorted(eos)}).encode(),
    }
    return open_tokenizer(files.get)


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token + 1 for token in tokens).decode()


@cache
def fault_of(name: str) -> str:
    """Why a kind cannot decode several rows in one forward, as the engine finds out."""
    kind = tiny(name)
    return find_fault(kind.make_layers, plain(kind), VOCAB)


def plain(kind: Tiny) -> Callable[[mx.array, list[object]], mx.array]:
    return lambda tokens, layers: kind.model(tokens, cache=layers)


# --- what must come of a request


class Wish(NamedTuple):
    """What is asked, and the tokens that end an answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    options: SamplingOptions
    stop: str = ""
    eos: frozenset[int] = frozenset()
    grammar: str = ""
    """In Lark; none where it is empty."""


class Alone(NamedTuple):
    """What a plain loop without a cache samples, and the logits [VOCAB] that each token was taken from."""

    tokens: list[int]
    logits: list[mx.array]


class End(NamedTuple):
    """What the client reads of some tokens."""

    text: str
    reason: DoneReason | None  # None: they do not end the answer
    eval_count: int


@cache
def compiler(eos: frozenset[int]) -> Compiler:
    return Compiler(tokenizer(eos), VOCAB)


def compiled(wish: Wish) -> Future[Grammar] | None:
    """What the request has to follow, known already: nothing here waits."""
    if not wish.grammar:
        return None
    grammar: Future[Grammar] = Future()
    grammar.set_result(compiler(wish.eos).compile(Lark(wish.grammar)))
    return grammar


class Slow:
    """A grammar whose masks are late: each is there after it was asked for so often as `late` says."""

    def __init__(self, grammar: Grammar, late: Callable[[], int]) -> None:
        self._grammar = grammar
        self._late = late

    def guide(self) -> Guide:
        guide = self._grammar.guide()
        guide._source = _SlowSource(guide._source, self._late)
        return guide

    def release(self) -> None:
        self._grammar.release()


class _SlowSource:
    def __init__(self, source: StateSource, late: Callable[[], int]) -> None:
        self._source = source
        self._late = late
        self._left = 0

    def send(self, step: Follow) -> None:
        self._left = self._late()
        self._source.send(step)

    def receive(self, patience_s: float) -> State | None:
        self._left -= 1
        return self._source.receive(patience_s) if self._left < 0 else None

    def close(self) -> None:
        self._source.close()


class Rules:
    """What llguidance itself says about an answer, from its beginning again for every question."""

    def __init__(self, wish: Wish, tokens: Sequence[int]) -> None:
        vocabulary = make_vocabulary(tokenizer(wish.eos), VOCAB)
        self._matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(wish.grammar), log_level=0)
        self._forced: list[int] = []
        for token in tokens:
            self._take(token)

    def _take(self, token: int) -> None:
        """What is forced is forced all at once, as far as it was seen when the last choice was made."""
        self._look()
        if self._forced:
            assert self._forced.pop(0) == token
        else:
            assert self._matcher.consume_token(token)

    def _look(self) -> None:
        if not self._forced:
            self._forced = self._matcher.compute_ff_tokens()
            assert self._matcher.consume_tokens(self._forced)

    @property
    def complete(self) -> bool:
        self._look()
        return not self._forced and self._matcher.is_stopped()

    @property
    def allowed(self) -> mx.array:
        """Which tokens may come next, bool [VOCAB]."""
        self._look()
        if self._forced:
            return mx.arange(VOCAB) == self._forced[0]
        bits = self._matcher.compute_bitmask()
        return mx.array([bool(bits[token // 8] >> token % 8 & 1) for token in range(VOCAB)])


def end_of(wish: Wish, tokens: Sequence[int]) -> End:
    """The rules of an answer, token by token."""
    end = _end_without_grammar(wish, tokens)
    if wish.grammar and end.reason is not DoneReason.STOP and Rules(wish, tokens).complete:
        return end._replace(reason=DoneReason.STOP)
    return end


def _end_without_grammar(wish: Wish, tokens: Sequence[int]) -> End:
    text = ""
    for count, token in enumerate(tokens):
        if token in wish.eos:
            return End(text, DoneReason.STOP, count)
        text += text_of([token])
        if wish.stop and wish.stop in text:
            return End(text[: text.index(wish.stop)], DoneReason.STOP, count + 1)
        if count + 1 == wish.max_tokens:
            return End(text, DoneReason.LENGTH, count + 1)
    return End(text, None, len(tokens))


@cache
def alone(name: str, wish: Wish) -> Alone:
    """The oracle: the request by itself, its prompt in one forward, no cache, no token ahead."""
    kind, layers = tiny(name), tiny(name).make_layers()
    prompt = list(wish.prompt)
    if prompt[:-1]:
        mx.eval(kind.model(mx.array([prompt[:-1]]), cache=layers))
    answer, token = Alone([], []), prompt[-1]
    while end_of(wish, answer.tokens).reason is None:
        logits = kind.model(mx.array([[token]]), cache=layers)[:, -1]
        token = drawn_token(wish, answer.tokens, logits)
        answer.tokens.append(token)
        answer.logits.append(logits[0])
    return answer


def drawn_token(wish: Wish, drawn: Sequence[int], logits: mx.array) -> int:
    """What comes after those that were drawn, given logits [1, VOCAB]: each draw has its number, and so has each token
    that needed none."""
    if wish.grammar:
        logits = mx.where(Rules(wish, drawn).allowed, logits, -mx.inf)
    return Sampler(wish.options, wish.prompt, VOCAB, CONTEXT, drawn)(logits).read()[0].token


def could_be(wish: Wish, drawn: Sequence[int], logits: mx.array, token: int, tolerance: float) -> bool:
    """Whether logits that are off by no more than the tolerance give this token after those that were drawn."""
    ids, numbers = mx.arange(VOCAB), random.Random(7)
    pushes = [
        mx.where(ids == token, 1.0, mx.where(ids < token, float(below), float(above)))
        for below in (-1, 1)
        for above in (-1, 1)
    ]
    pushes += [mx.array([numbers.choice((-1.0, 1.0)) for _ in range(VOCAB)]) for _ in range(40)]
    return any(drawn_token(wish, drawn, (logits + tolerance * push)[None]) == token for push in pushes)


# --- a request on its way


class Asked(EventStream):
    """A request, and what it was told."""

    def __init__(self, kind: Tiny, wish: Wish, metered: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.wish = wish
        self.session: LiveSession | None = None
        """Once the request has one."""
        stops = StopStrings([wish.stop]) if wish.stop else None
        self.request = Request(
            prompt=list(wish.prompt),
            max_tokens=wish.max_tokens,
            sampling=wish.options,
            stops=stops,
            metered=metered,
            grammar=compiled(wish),
            stream=self,
        )

    @property
    def told(self) -> list[Event]:
        return self._events

    @property
    def tokens(self) -> list[int]:
        """What was sampled for it, the end-of-sequence token included."""
        return [] if self.session is None else self.session.recorded[self.session.total :]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.told if isinstance(event, Text))

    @property
    def entries(self) -> list[Logprob]:
        return [entry for event in self.told if isinstance(event, Text) for entry in event.logprobs]

    @property
    def started(self) -> bool:
        return bool(self.told)

    @property
    def finished(self) -> Finished | None:
        end = self.told[-1] if self.told else None
        return end if isinstance(end, Finished) else None

    @property
    def failed(self) -> bool:
        return bool(self.told) and isinstance(self.told[-1], Failed)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were not computed for it, as the client reads."""
        assert self.finished is not None
        return self.finished.metrics.prompt_eval_cached_count

    def check(self) -> bool:
        """All that was told is right, as far as it goes. False where noise has tipped a choice by a hair: the rest of
        the answer says nothing then."""
        self._check_order()
        sure = self._check_tokens()
        self._check_told()
        return sure

    def check_answer(self) -> None:
        """It was answered to the end, and rightly."""
        assert self.finished is not None, f"{self.told[-1:]}"
        self.check()

    def _check_order(self) -> None:
        kinds = [type(event) for event in self.told]
        if kinds:
            assert kinds[0] is Started
            assert set(kinds[1:-1]) <= {Text}, f"{kinds}"
            assert kinds[-1] is not Started or len(kinds) == 1
        if not self.request.cancelled:
            assert kinds[-1] in (Finished, Failed), "never ended"

    def _check_tokens(self) -> bool:
        """The tokens are those of the oracle, and so is what was told about their probabilities."""
        oracle, tolerance = alone(self.kind.name, self.wish), self.kind.tolerance
        sure, known = True, len(self.tokens)
        for step, token in enumerate(self.tokens):
            if sure and step >= len(oracle.tokens):  # the layers have seen what the grammar forced behind a stop string
                allowed = Rules(self.wish, self.tokens[:step]).allowed if self.wish.grammar else mx.ones(VOCAB)
                assert allowed.sum().item() == 1, f"goes on after {oracle.tokens}: {self.tokens}"
                continue
            if token != oracle.tokens[step]:
                drawn = oracle.tokens[:step]
                assert could_be(self.wish, drawn, oracle.logits[step], token, tolerance), (
                    f"step {step}: {self.tokens} instead of {oracle.tokens}, for {self.wish}"
                )
                sure, known = False, step + 1
                break
        if sure and self.finished:
            assert len(self.tokens) >= len(oracle.tokens), f"{self.tokens} instead of {oracle.tokens}, for {self.wish}"
        for entry, token, logits in zip(self.entries, self.tokens[:known], oracle.logits, strict=False):
            assert entry.token == text_of([token])
            self._check_entry(entry, token, logits)
        return sure

    def _check_entry(self, entry: Logprob, token: int, logits: mx.array) -> None:
        right = logits - mx.logsumexp(logits)
        wanted = self.wish.options.top_logprobs
        ranked = mx.sort(right)[::-1][:wanted]
        off = [entry.logprob - right[token].item()]
        assert len(entry.top_logprobs) == wanted
        for rank, top in enumerate(entry.top_logprobs):
            off += [top.logprob - right[ord(top.token) - 1].item(), top.logprob - ranked[rank].item()]
        assert largest(mx.array(off)) <= 2 * self.kind.tolerance

    def _check_told(self) -> None:
        """Text, reason and counters follow from the tokens."""
        end = end_of(self.wish, self.tokens)
        assert end.text.startswith(self.text)
        if self.wish.options.logprobs:
            assert len(self.entries) >= len(self.text)
        else:
            assert not self.entries
        if self.finished is None:
            return
        metrics = self.finished.metrics
        assert (self.text, self.finished.reason, metrics.eval_count) == end
        assert metrics.prompt_eval_count == len(self.wish.prompt)
        assert self.session is not None
        assert metrics.prompt_eval_cached_count == self.session.cached < len(self.wish.prompt)


# --- all of them


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """The forward of a model: notes the shape [B, L] of every call, takes made-up time, and breaks on demand."""

    def __init__(self, kind: Tiny, clock: Clock) -> None:
        self.calls: list[tuple[int, int]] = []
        self.forward_s, self.token_s = 0.010, 0.001
        self.breaks: Callable[[int, int], bool] = lambda rows, length: False
        """Given the shape; says whether this call raises in the last layer of the model."""
        self.error: Callable[[str], Exception] = ValueError
        """What it raises then; for want of memory a request begins again."""
        self._kind = kind
        self._clock = clock

    def __call__(self, tokens: mx.array, layers: list[object]) -> mx.array:
        rows, length = tokens.shape
        self.calls.append((rows, length))
        self._clock.now += self.forward_s + self.token_s * length
        with _breaking(self._kind, self.breaks(rows, length), self.error):
            return self._kind.model(tokens, cache=layers)

    @property
    def tokens(self) -> int:
        """All that were computed."""
        return sum(rows * length for rows, length in self.calls)

    @property
    def most_rows(self) -> int:
        return max(rows for rows, _ in self.calls)


class _Loop:
    """Of an event loop what an outbox needs of it: events arrive when they are sent."""

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)


class NoMeter:
    """MLX holds nothing but what the cache counts, and computing takes nothing."""

    def active(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def restart(self) -> None: ...

    def clear(self) -> None: ...


class Company:
    """`Scheduler` over a tiny model and all who were asked for. `slices` counts what has been advanced."""

    def __init__(
        self,
        name: str,
        schedule: SlicePolicy | None = None,
        *,
        parallel: int = 8,
        cache: str = "trie",
        budget: int | None = None,
        room: int | None = None,
        memory: MemoryBudget | None = None,
        eos: frozenset[int] = frozenset(),
        trial: BatchTrial | None = None,
    ) -> None:
        self.kind = tiny(name)
        self.everyone: list[Asked] = []
        self.clock = Clock()
        self.forward = Watched(self.kind, self.clock)
        self.schedule = schedule or SlicePolicy(2048, 0.1)
        self.slices = 0
        self.late: Callable[[], int] = lambda: 0
        """How late the next mask is, as `Slow` counts it."""
        self._eos = eos
        known = SettledTrial("" if trial else fault_of(name))  # found before a test breaks anything
        means = EngineContext(
            self.forward,
            tokenizer(eos),
            CONTEXT,
            lambda: make_cache(cache, self.kind.make_layers, budget_bytes=budget),
            memory or MemoryBudget(NoMeter(), room, 2048),
            trial=trial or known,
        )
        self._outbox = Outbox(cast("AbstractEventLoop", _Loop()))
        self.running = Scheduler(means, self.schedule, parallel, self._outbox)
        self.running.matching.lone_steps = 0  # so that short answers join, too
        self._place, self.running._place = self.running._place, self._notice  # type: ignore[method-assign]  # to see all

    def _notice(self, generation: Generation) -> None:
        """A request has a session."""
        cast("Asked", generation.request.stream).session = generation.session
        self._place(generation)

    @property
    def trie(self) -> TrieCache:
        assert isinstance(self.running.cache, TrieCache)
        return self.running.cache

    def ask(
        self, prompt: Sequence[int], max_tokens: int = 12, stop: str = "", metered: bool = False, **options: float
    ) -> Asked:
        """A request joins the queue."""
        wanted = SamplingOptions(**options)  # type: ignore[arg-type]  # names and types are the struct's own
        return self.admit(Wish(tuple(prompt), max_tokens, wanted, stop, self._eos), metered)

    def admit(self, wish: Wish, metered: bool = False) -> Asked:
        """The same for what is known already."""
        asked = Asked(self.kind, wish, metered)
        if asked.request.grammar is not None:
            grammar, asked.request.grammar = asked.request.grammar.result(), Future()
            asked.request.grammar.set_result(Slow(grammar, lambda: self.late()))
        self.everyone.append(asked)
        self.running.add(asked.request)
        return asked

    def advance(self, slices: int = 1) -> None:
        """What the engine does in a slice."""
        for _ in range(slices):
            with patch.object(runner.engine.scheduler, "perf_counter", self.clock):
                self.running.advance()
            self._outbox.send()
            self.slices += 1

    def until(self, reached: Callable[[], bool]) -> None:
        """Advances up to there."""
        for _ in range(MOST_SLICES):
            if reached():
                return
            assert not self.idle, "all is done, and it was not reached"
            self.advance()
        raise AssertionError("never reached")

    def finish(self) -> None:
        """Advances until nothing is left to do."""
        self.until(lambda: self.idle)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, and no mask is late."""
        return self.running.idle and not self.running.expectant

    def generations(self) -> list[Generation]:
        """All that run."""
        decoding = [generation for group in self.running._groups for generation in group.generations]
        return [*self.running.prefilling, *self.running._compiling, *decoding]

    def taken(self) -> int:
        """How many places are in use."""
        return len(self.generations()) + len(self.running._waiting.behind)

    def phase(self, asked: Asked) -> str:
        """Where a request is: waiting, behind, prefilling, alone, batch or gone."""
        running, request = self.running, asked.request
        if request in running._waiting.queue:
            return "waiting"
        if request in running._waiting.behind:
            return "behind"
        if any(generation.request is request for generation in running.prefilling):
            return "prefilling"
        for group in running._groups:
            if any(generation.request is request for generation in group.generations):
                return "batch" if len(group.generations) > 1 else "alone"
        if any(generation.request is request for generation in running._compiling):
            return "compiling"
        return "gone"

    def check(self) -> None:
        """Everyone got the right answer, or what there was of it, and the cache is as it must be."""
        for asked in self.everyone:
            if not isinstance(asked.told[0] if asked.told else None, Refused):
                asked.check()
        self.check_cache()

    def check_cache(self) -> None:
        """Nobody is left behind in the cache."""
        assert self.idle
        if isinstance(self.running.cache, TrieCache):
            described = self.trie.describe()
            budget_bytes = described.counts.budget_bytes
            assert (described.sessions, described.reserved_bytes) == (0, 0)
            assert budget_bytes is None or self.trie.nbytes <= budget_bytes
            check_trie(self.trie)


class Dice(SlicePolicy):
    """Any slice that is possible, by chance: what is right under it is right under every schedule."""

    def __init__(self, numbers: random.Random, most_tokens: int = 40) -> None:
        super().__init__(most_tokens, 0.1)
        self._numbers = numbers
        self._most_tokens = most_tokens
        self._weights = [numbers.choice((1, 3, 9)) for _ in range(3)]  # of a beginning, a prompt, a step

    def next(self, view: View) -> Slice | None:
        begin, prompt, step = self._weights
        possible: list[tuple[int, Slice]] = [(begin, Begin())] if view.startable else []
        for index, left in enumerate(view.prefilling):
            assert left > 0
            possible.append((prompt, Prefill(index, self._numbers.randint(1, self._most_tokens))))
        possible += [(step, Decode(index)) for index in range(len(view.decoding))]
        if not possible:
            return None
        return self._numbers.choices([each for _, each in possible], [weight for weight, _ in possible])[0]


@contextmanager
def breaking(where: object, name: str, at: int) -> Iterator[list[int]]:
    """`tests.lib.breaking.breaking`, once it is known which kinds can decode together: the trial must not break."""
    for kind in KINDS:
        fault_of(kind)
    with break_call(where, name, at) as calls:
        yield calls
