"""The language of the engine's tests: a `Scheduler` over a tiny model, which the test advances slice by slice.

    engine = TinyEngine("llama")
    first = engine.ask(words(50), max_tokens=8)
    engine.until(lambda: len(first.tokens) > 3)  # it decodes
    second = engine.ask(words(60, 2), max_tokens=5, temperature=0.8, seed=4)
    engine.until(lambda: engine.phase(second) == "batch")  # both decode in one forward
    first.request.cancel()
    engine.finish()
    engine.check()  # every answer is right so far, and the cache is in order

Nothing here waits: slices come from `advance`, time comes from a made-up clock, and the expected answer comes from
`oracle_answer`, a plain loop over fresh layers that computes one request alone.
"""

import itertools
import json
import random
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple, cast
from unittest.mock import patch

import mlx.core as mx
from llguidance import LLMatcher

import runner.engine.scheduler
from protocol import DoneReason, Logprob
from protocol.format import Lark
from runner.cache import PrefixCache, make_cache
from runner.cache.session import Session
from runner.cache.trie_cache import TrieCache
from runner.drafts.drafting import Drafting
from runner.drafts.rounds import BatchRounds
from runner.engine.answer_grammar import Grammar
from runner.engine.core import CoreParts
from runner.engine.events import Event, EventStream, Failed, Finished, Outbox, Refused, Started, Text
from runner.engine.first_tokens import FirstTokens
from runner.engine.generation import Forward, Generation
from runner.engine.memory import MemoryBudget, Meter
from runner.engine.parts import Parts, WingCounts
from runner.engine.policy import Begin, Decode, Prefill, Slice, SlicePolicy, Workload
from runner.engine.ports import Drafter, Ranks
from runner.engine.request import Request
from runner.engine.scheduler import Scheduler
from runner.grammar.compiler import Compiler
from runner.grammar.vocabulary import make_vocabulary
from runner.numbers.journal import Journal
from runner.ranks import rank_world
from runner.sampling import SamplingOptions
from runner.sampling.sampler import Sampler
from runner.tape.tape import Tape
from runner.tape.taped_world import TapedGeneration, flushed_forward
from runner.tokenizer import Tokenizer, open_tokenizer
from runner.tokenizer.detokenizer import StopStrings
from scripts.tools.models.architectures import build
from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.lib.driver import breaking_layer, check_trie, largest
from tests.lib.local_grammar import LocalGrammar

CONTEXT = 4096
MOST_SLICES = 20_000
BATCHABLE = ("llama", "gemma3", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "deepseek_v32")
"""The kinds of model that decode several rows in one forward."""
UNBATCHABLE = ("quantized", "llama4", "deepseek_v41")
"""The kinds whose layers mlx-lm cannot join."""
SLICEABLE = ("llama", "deepseek_v3", "deepseek_v32", "quantized")
"""The kinds of model of which any prefix can be reused."""


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
def model_of(name: str) -> Tiny:
    """Returns the model of a kind, of gemma4, or of an architecture."""
    return tiny(name) if name in (*KINDS, "gemma4") else build(name)


def plain_forward(kind: Tiny) -> Callable[[mx.array, list[object]], mx.array]:
    return lambda tokens, layers: kind.model(tokens, cache=layers)


class RequestSpec(NamedTuple):
    """A request as its client writes it, and the tokens that end its answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    options: SamplingOptions
    stop: str = ""
    eos: frozenset[int] = frozenset()
    grammar: str = ""
    """A grammar in Lark; empty for none."""


class OracleAnswer(NamedTuple):
    """The tokens that a plain loop without a cache samples, and the logits [VOCAB] that each one is taken from."""

    tokens: list[int]
    logits: list[mx.array]


class Ending(NamedTuple):
    """The text and the counters that a client reads."""

    text: str
    reason: DoneReason | None  # None: the answer goes on
    eval_count: int


@cache
def compiler(eos: frozenset[int]) -> Compiler:
    return Compiler(tokenizer(eos), VOCAB)


def compiled_grammar(spec: RequestSpec, late: Callable[[], int] = lambda: 0) -> Future[Grammar] | None:
    """Returns the grammar of a request, already compiled: nothing here waits."""
    if not spec.grammar:
        return None
    compiled: Future[Grammar] = Future()
    compiled.set_result(grammar := LocalGrammar(compiler(spec.eos), Lark(spec.grammar)))
    grammar.late = late
    return compiled


@cache
def _matcher(grammar: str, eos: frozenset[int]) -> LLMatcher:
    return LLMatcher(make_vocabulary(tokenizer(eos), VOCAB), LLMatcher.grammar_from_lark(grammar), log_level=0)


class GrammarRules:
    """llguidance's own verdict on an answer, from its first token on."""

    def __init__(self, spec: RequestSpec, tokens: Sequence[int]) -> None:
        self._matcher = _matcher(spec.grammar, spec.eos).deep_copy()
        self._forced: list[int] = []
        for token in tokens:
            self._take(token)

    def _take(self, token: int) -> None:
        """Takes a token. A run of forced tokens is fixed when the choice before it is made."""
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
        """The tokens that may come next, bool [VOCAB]."""
        self._look()
        if self._forced:
            return mx.arange(VOCAB) == self._forced[0]
        bits = self._matcher.compute_bitmask()
        return mx.array([bool(bits[token // 8] >> token % 8 & 1) for token in range(VOCAB)])


def expected_ending(spec: RequestSpec, tokens: Sequence[int]) -> Ending:
    """Returns what a client must read of an answer of these tokens."""
    end = _ending_without_grammar(spec, tokens)
    if spec.grammar and end.reason is not DoneReason.STOP and GrammarRules(spec, tokens).complete:
        return end._replace(reason=DoneReason.STOP)
    return end


def _ending_without_grammar(spec: RequestSpec, tokens: Sequence[int]) -> Ending:
    text = ""
    for count, token in enumerate(tokens):
        if token in spec.eos:
            return Ending(text, DoneReason.STOP, count)
        text += text_of([token])
        if spec.stop and spec.stop in text:
            return Ending(text[: text.index(spec.stop)], DoneReason.STOP, count + 1)
        if count + 1 == spec.max_tokens:
            return Ending(text, DoneReason.LENGTH, count + 1)
    return Ending(text, None, len(tokens))


@cache
def oracle_answer(name: str, spec: RequestSpec) -> OracleAnswer:
    """Computes a request by itself: its prompt in one forward, no cache, no token ahead."""
    kind = model_of(name)
    layers = kind.make_layers()
    prompt = list(spec.prompt)
    if prompt[:-1]:
        mx.eval(kind.model(mx.array([prompt[:-1]]), cache=layers))
    answer, token = OracleAnswer([], []), prompt[-1]
    while expected_ending(spec, answer.tokens).reason is None:
        logits = kind.model(mx.array([[token]]), cache=layers)[:, -1]
        token = expected_token(spec, answer.tokens, logits)
        answer.tokens.append(token)
        answer.logits.append(logits[0])
    return answer


def expected_token(spec: RequestSpec, drawn: Sequence[int], logits: mx.array) -> int:
    """Returns the token that follows `drawn`, given logits [1, VOCAB]. Every token has a random number of its own, also
    one that needs none."""
    logits = masked_logits(spec, drawn, logits)
    return Sampler(spec.options, spec.prompt, VOCAB, CONTEXT, drawn)(logits).read()[0].token


def masked_logits(spec: RequestSpec, drawn: Sequence[int], logits: mx.array) -> mx.array:
    """Returns the logits after `drawn`, -inf for tokens that the grammar forbids."""
    return mx.where(GrammarRules(spec, drawn).allowed, logits, -mx.inf) if spec.grammar else logits


def is_plausible(spec: RequestSpec, drawn: Sequence[int], logits: mx.array, token: int, tolerance: float) -> bool:
    """Returns True if logits that differ by at most the tolerance give this token after `drawn`."""
    ids, numbers = mx.arange(VOCAB), random.Random(7)
    pushes = [
        mx.where(ids == token, 1.0, mx.where(ids < token, float(below), float(above)))
        for below in (-1, 1)
        for above in (-1, 1)
    ]
    pushes += [mx.array([numbers.choice((-1.0, 1.0)) for _ in range(VOCAB)]) for _ in range(40)]
    return any(expected_token(spec, drawn, (logits + tolerance * push)[None]) == token for push in pushes)


class EngineClient(EventStream):
    """A request, and the events that its client receives."""

    request: Request

    def __init__(self) -> None:
        super().__init__()
        self.session: Session | None = None
        """Set once the request has one."""

    @property
    def received(self) -> list[Event]:
        """All events so far."""
        return self._events

    @property
    def tokens(self) -> list[int]:
        """The sampled tokens, the end-of-sequence token included."""
        return [] if self.session is None else self.session.recorded[self.session.total :]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.received if isinstance(event, Text))

    @property
    def entries(self) -> list[Logprob]:
        return [entry for event in self.received if isinstance(event, Text) for entry in event.logprobs]

    @property
    def finished(self) -> Finished | None:
        end = self.received[-1] if self.received else None
        return end if isinstance(end, Finished) else None


class ClientRequest(EngineClient):
    """A request by its specification, whose answer is compared with that of the oracle."""

    def __init__(
        self, kind: Tiny, spec: RequestSpec, metered: bool = False, late: Callable[[], int] = lambda: 0
    ) -> None:
        super().__init__()
        self.kind = kind
        self.spec = spec
        stops = StopStrings([spec.stop]) if spec.stop else None
        self.request = Request(
            prompt=list(spec.prompt),
            max_tokens=spec.max_tokens,
            sampling=spec.options,
            stops=stops,
            metered=metered,
            grammar=compiled_grammar(spec, late),
            stream=self,
        )

    @property
    def started(self) -> bool:
        return bool(self.received)

    @property
    def failed(self) -> bool:
        return bool(self.received) and isinstance(self.received[-1], Failed)

    @property
    def cached(self) -> int:
        """The tokens of the prompt that came from the cache, as the client reads."""
        assert self.finished is not None
        return self.finished.metrics.prompt_eval_cached_count

    def check(self) -> bool:
        """Checks all events so far. Returns False if rounding tipped the choice between two equally likely tokens: the
        rest of the answer cannot be compared then."""
        self._check_order()
        sure = self._check_tokens()
        self._check_events()
        return sure

    def check_answer(self) -> None:
        """Checks that the answer is complete and right."""
        assert self.finished is not None, f"{self.received[-1:]}"
        self.check()

    def _check_order(self) -> None:
        kinds = [type(event) for event in self.received]
        if kinds:
            assert kinds[0] is Started
            assert set(kinds[1:-1]) <= {Text}, f"{kinds}"
            assert kinds[-1] is not Started or len(kinds) == 1
        if not self.request.cancelled:
            assert kinds[-1] in (Finished, Failed), "never ended"

    def _check_tokens(self) -> bool:
        """Compares tokens and probabilities with those of the oracle."""
        oracle, tolerance = oracle_answer(self.kind.name, self.spec), self.kind.tolerance
        sure, known = True, len(self.tokens)
        for step, token in enumerate(self.tokens):
            if sure and step >= len(oracle.tokens):  # the layers have seen what the grammar forced behind a stop string
                allowed = GrammarRules(self.spec, self.tokens[:step]).allowed if self.spec.grammar else mx.ones(VOCAB)
                assert allowed.sum().item() == 1, f"goes on after {oracle.tokens}: {self.tokens}"
                continue
            if token != oracle.tokens[step]:
                drawn = oracle.tokens[:step]
                assert is_plausible(self.spec, drawn, oracle.logits[step], token, tolerance), (
                    f"step {step}: {self.tokens} instead of {oracle.tokens}, for {self.spec}"
                )
                sure, known = False, step + 1
                break
        if sure and self.finished:
            assert len(self.tokens) >= len(oracle.tokens), f"{self.tokens} instead of {oracle.tokens}, for {self.spec}"
        for step, (entry, token) in enumerate(zip(self.entries, self.tokens[:known], strict=False)):
            assert entry.token == text_of([token])
            self._check_entry(entry, token, masked_logits(self.spec, self.tokens[:step], oracle.logits[step]))
        return sure

    def _check_entry(self, entry: Logprob, token: int, logits: mx.array) -> None:
        right = logits - mx.logsumexp(logits)
        wanted = self.spec.options.top_logprobs
        ranked = mx.sort(right)[::-1][:wanted]
        off = [entry.logprob - right[token].item()]
        assert len(entry.top_logprobs) == mx.isfinite(ranked).sum().item()
        for rank, top in enumerate(entry.top_logprobs):
            off += [top.logprob - right[ord(top.token) - 1].item(), top.logprob - ranked[rank].item()]
        assert largest(mx.array(off)) <= 2 * self.kind.tolerance

    def _check_events(self) -> None:
        """Checks that text, reason and counters follow from the tokens."""
        end = expected_ending(self.spec, self.tokens)
        assert end.text.startswith(self.text)
        if self.spec.options.logprobs:
            assert len(self.entries) >= len(self.text)
        else:
            assert not self.entries
        if self.finished is None:
            return
        metrics = self.finished.metrics
        assert (self.text, self.finished.reason, metrics.eval_count) == end
        assert metrics.prompt_eval_count == len(self.spec.prompt)
        assert self.session is not None
        assert metrics.prompt_eval_cached_count == self.session.cached < len(self.spec.prompt)


class Clock:
    """A clock that a test sets forward, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CountedForward:
    """The forward of a model. Notes the shape [B, L] of every call, takes made-up time, and raises on demand."""

    def __init__(self, kind: Tiny, clock: Clock) -> None:
        self.calls: list[tuple[int, int]] = []
        self.forward_s, self.token_s = 0.010, 0.001
        self.breaks: Callable[[int, int], bool] = lambda rows, length: False
        """Returns True, given the shape of a call, if it is to raise in the last layer of the model."""
        self.error: Callable[[str], Exception] = ValueError
        """Makes the exception that it raises then. A request restarts after one that says that memory ran out."""
        self._kind = kind
        self._clock = clock

    def __call__(self, tokens: mx.array, layers: list[object]) -> mx.array:
        rows, length = tokens.shape
        self.calls.append((rows, length))
        self._clock.now += self.forward_s + self.token_s * length
        with breaking_layer(self._kind, self.breaks(rows, length), self.error):
            return self._kind.model(tokens, cache=layers)

    @property
    def tokens(self) -> int:
        """The number of tokens in all calls."""
        return sum(rows * length for rows, length in self.calls)

    @property
    def most_rows(self) -> int:
        """The rows of the largest call."""
        return max(rows for rows, _ in self.calls)


def at_call(number: int) -> Callable[[int, int], bool]:
    """Returns what breaks the forward after `number - 1` others."""
    calls = itertools.count(1)
    return lambda rows, length: next(calls) == number


class _Loop:
    """The part of an event loop that an outbox needs. Events arrive when they are sent."""

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)


def plain_outbox() -> Outbox:
    """Returns an outbox whose events arrive at once."""
    return Outbox(cast("AbstractEventLoop", _Loop()))


class ZeroMeter(Meter):
    """A meter by which MLX holds nothing beside the cache, and computing takes no memory."""

    def active(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def restart(self) -> None: ...

    def clear(self) -> None: ...

    def settle(self) -> None: ...


def core_parts(
    forward: Forward,
    tokenizer: Tokenizer,
    make_cache: Callable[[], PrefixCache],
    memory: MemoryBudget | None = None,
    drafting: Drafting | None = None,
) -> CoreParts:
    """Returns the parts for a scheduler of these; nothing else is set."""
    parts = CoreParts()
    parts.forward, parts.tokenizer, parts.context_length, parts.make_cache = forward, tokenizer, CONTEXT, make_cache
    parts.memory = memory or MemoryBudget(ZeroMeter(), None, 2048)
    if drafting is not None:
        parts.drafter, parts.rounds = drafting.drafter, partial(BatchRounds, drafting)
    return parts


class SlicedEngine:
    """A `Scheduler` that a test advances slice by slice, on a clock of its own. `slices` counts the slices so far."""

    def __init__(
        self,
        parts: CoreParts,
        schedule: SlicePolicy,
        parallel: int,
        clock: Clock,
        outbox: Outbox | None = None,
        show: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.clock = clock
        self.schedule = schedule
        self.slices = 0
        self._drafter: Callable[[Generation], Drafter] | None = None
        self._outbox = outbox or plain_outbox()
        self.journal = Journal(clock, show)
        self.parts = parts
        parts.policy, parts.observer = schedule, self.journal
        self.scheduler = Scheduler(parts, parallel, self._outbox)
        self.scheduler.batches.lone_steps = 0  # so that short answers join, too
        self._continue = self.scheduler._continue
        self.scheduler._continue = self._note_session  # type: ignore[method-assign]  # to see the session of each

    def _note_session(self, generation: Generation) -> None:
        cast("EngineClient", generation.request.stream).session = generation.session
        if self._drafter is not None:
            generation.drafter = self._drafter(generation)
        self._continue(generation)

    def let_draft(self, drafting: Drafting, drafter: Callable[[Generation], Drafter]) -> None:
        """Lets answers be drafted, each by the drafter that is made for it."""
        self._drafter = drafter
        self.parts.rounds = partial(BatchRounds, drafting)

    @property
    def idle(self) -> bool:
        """True if nothing is left to do, and no mask is late."""
        return self.scheduler.idle and not self.scheduler.awaits_mask

    def advance(self, slices: int = 1) -> None:
        """Computes slices as the engine does."""
        for _ in range(slices):
            with patch.object(runner.engine.scheduler, "perf_counter", self.clock):
                self.scheduler.compute_slice()
            self._outbox.send()
            self.slices += 1

    def until(self, reached: Callable[[], bool]) -> None:
        """Advances until `reached` returns True."""
        for _ in range(MOST_SLICES):
            if reached():
                return
            assert not self.idle, "all is done, and this was not reached"
            self.advance()
        raise AssertionError("never reached")

    def finish(self) -> None:
        """Advances until nothing is left to do."""
        self.until(lambda: self.idle)

    def check_cache(self) -> None:
        """Checks that no session is left in the cache, and that the trie is in order."""
        assert self.idle
        assert not self.scheduler._generations
        cache = self.scheduler.cache
        if isinstance(cache, TrieCache):
            assert (len(cache.sequences.sessions), cache.reserved_bytes) == (0, 0)
            assert cache.budget_bytes is None or cache.nbytes <= cache.budget_bytes
            check_trie(cache)


def parts_of(
    engine: SlicedEngine,
    counts: WingCounts | None = None,
    *,
    inspect_text: bool = False,
    spelled_by: Tokenizer | None = None,
) -> Parts:
    """Returns the parts of an engine from which its numbers are read; of the model, any."""
    model = SimpleNamespace(title="tiny:latest", directory="", architecture="llama", context_length=CONTEXT)
    parts = SimpleNamespace(
        model=model,
        settings=SimpleNamespace(cache="trie", inspect_text=inspect_text),
        ranks=None,
        on_cpu=True,
        held_bytes=(0, 0),
        tokenizer=spelled_by or tokenizer(),
        scheduler=engine.scheduler,
        observer=engine.journal,
        counts=counts or WingCounts(),
    )
    return cast("Parts", parts)


class TinyEngine(SlicedEngine):
    """An engine over a tiny model, and all requests so far."""

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
        unbatchable: str = "",
        watch: Callable[[Forward], Forward] = lambda forward: forward,
        drafting: Drafting | None = None,
        tape: Tape | None = None,
        outbox: Outbox | None = None,
        ranks: Ranks | None = None,
        first_tokens: bool = False,
        show: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`watch` puts something between the engine and the forward of the model."""
        self.kind = model_of(name)
        self.requests: list[ClientRequest] = []
        clock = Clock()
        self.forward = CountedForward(self.kind, clock)
        self.late: Callable[[], int] = lambda: 0
        """Returns how many polls the next mask is late."""
        self._eos = eos
        taped = flushed_forward if ranks is None else rank_world.checked_forward
        parts = core_parts(
            watch(self.forward if tape is None else taped(self.forward, tape)),
            tokenizer(eos),
            lambda: make_cache(cache, self.kind.facts, budget_bytes=budget),
            memory or MemoryBudget(ZeroMeter(), room, 2048),
            drafting,
        )
        parts.unbatchable = unbatchable or ("its layers" if name in UNBATCHABLE else "")
        parts.ranks = ranks
        if tape is not None:
            parts.begin = partial(TapedGeneration, tape)
        if first_tokens and ranks is None and cache != "none":
            parts.first_tokens = FirstTokens(CONTEXT)
        super().__init__(parts, schedule or SlicePolicy(2048, 0.1), parallel, clock, outbox, show)

    @property
    def trie(self) -> TrieCache:
        assert isinstance(self.scheduler.cache, TrieCache)
        return self.scheduler.cache

    def ask(
        self, prompt: Sequence[int], max_tokens: int = 12, stop: str = "", metered: bool = False, **options: float
    ) -> ClientRequest:
        """Submits a request. `options` are those of SamplingOptions."""
        wanted = SamplingOptions(**options)  # type: ignore[arg-type]  # names and types are the struct's own
        return self.submit(RequestSpec(tuple(prompt), max_tokens, wanted, stop, self._eos), metered)

    def submit(self, spec: RequestSpec, metered: bool = False) -> ClientRequest:
        """Submits a request."""
        asked = ClientRequest(self.kind, spec, metered, lambda: self.late())
        self.requests.append(asked)
        self.scheduler.add(asked.request)
        return asked

    def generations(self) -> list[Generation]:
        """Returns the running requests."""
        decoding = [generation for group in self.scheduler.batches.all for generation in group.generations]
        return [*self.scheduler.prefilling, *self.scheduler._compiling, *decoding]

    def running(self) -> int:
        """Returns the number of requests that have left the queue, as `--parallel` counts them."""
        return len(self.generations()) + len(self.scheduler.queue.awaiting_prefix)

    def phase(self, asked: ClientRequest) -> str:
        """Returns where a request is: queued, awaiting prefix, prefilling, compiling, alone, batch or gone."""
        scheduler, request = self.scheduler, asked.request
        if request in scheduler.queue.awaiting_prefix:
            return "awaiting prefix"
        if request in scheduler.queue.requests:
            return "queued"
        if any(generation.request is request for generation in scheduler.prefilling):
            return "prefilling"
        for group in scheduler.batches.all:
            if any(generation.request is request for generation in group.generations):
                return "batch" if len(group.generations) > 1 else "alone"
        if any(generation.request is request for generation in scheduler._compiling):
            return "compiling"
        return "gone"

    def check(self) -> None:
        """Checks every answer so far, and the cache. Call it when all is done."""
        for asked in self.requests:
            if not isinstance(asked.received[0] if asked.received else None, Refused):
                asked.check()
        self.check_cache()


class RandomPolicy(SlicePolicy):
    """Chooses at random among the possible slices: what holds under it holds under every policy."""

    def __init__(self, numbers: random.Random) -> None:
        super().__init__(40, 0.1)
        self._numbers = numbers
        self._weights = [numbers.choice((1, 3, 9)) for _ in range(3)]  # of a beginning, a prompt, a step

    def next(self, work: Workload) -> Slice | None:
        begin, prompt, step = self._weights
        possible: list[tuple[int, Slice]] = [(begin, Begin())] if work.startable else []
        for index, left in enumerate(work.prefilling):
            assert left > 0
            possible.append((prompt, Prefill(index, self._numbers.randint(1, 40))))
        possible += [(step, Decode(index)) for index in range(len(work.decoding))]
        if not possible:
            return None
        return self._numbers.choices([each for _, each in possible], [weight for weight, _ in possible])[0]
