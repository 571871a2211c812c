"""Tiny engines that are recorded, and replayed by others.

    story = Story("llama", 3)
    seen = story.record(file)  # requests come and go, grammars are late, forwards break, memory fluctuates
    done, again = story.replay(file)
    assert (done.difference, again) == ("", seen)

The second engine has another clock, another meter, and no faults of its own: whatever it does alike, the tape told it.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import runner.engine.batch
import runner.engine.scheduler
import runner.tape.recording
import runner.tape.taped_grammar
from protocol.format import Lark
from runner.drafts.draft_policy import DraftPolicy
from runner.drafts.drafting import Drafting
from runner.engine.answer_grammar import Grammar
from runner.engine.events import Outbox
from runner.engine.memory import MemoryBudget
from runner.engine.ports import Ranks
from runner.engine.request import Request
from runner.errors import RequestError
from runner.grammar.messages import State
from runner.grammar.worker import WorkerGrammar
from runner.sampling import SamplingOptions
from runner.tape.file import VERSION, Header, Identity, TapeFile, TapeReader
from runner.tape.recording import Recording, what_clients_read
from runner.tape.replay import Replay, Replayed
from runner.tape.tape import Entry, EntryKind, Player, Recorder, Tape, Value
from runner.tape.taped_world import TapedMeter, TapedPolicy
from scripts.tools.models.tiny import VOCAB
from tests.lib.tiny_engine import (
    SLICEABLE,
    ClientRequest,
    Clock,
    RequestSpec,
    TinyEngine,
    ZeroMeter,
    plain_outbox,
    text_of,
)

_ROOMS = (None, 3_000_000, 30_000_000)
EOS = frozenset({5, 23})
GRAMMARS = ('start: "<<=" /[0-9]{1,6}/ ("=>" /[0-9]{2,4}/)* ">>"', 'start: ("-" | "+" /[0-9]/)+', "start: /[!-)]{12}/")
HEADER = Header(
    "tiny",
    Identity(VERSION, "1", "2", "3", "4", "5", "cpu", "none", "none"),
    {"context_tokens": 4096, "blas_threads": None},
)
MIXES = (0, 4, 5, 8, 20, 52)
"""The seeds of mixes of the llama in which each thing that `events_in` counts happens at least twice."""
Seen = dict[int, list[list[Value]]]
"""The events of each client, by the number of its request."""


@contextmanager
def made_up(clock: Clock, numbers: random.Random) -> Iterator[None]:
    """Gives an engine this clock and these random numbers alone: a mix is the same in every run."""
    with (
        patch.object(runner.engine.scheduler, "perf_counter", clock),
        patch.object(runner.engine.batch, "monotonic", clock),
        patch.object(runner.tape.taped_grammar, "monotonic", clock),
        patch.object(runner.tape.recording, "os", SimpleNamespace(urandom=numbers.randbytes)),
    ):
        yield


def events_in(entries: Iterable[Entry]) -> Counter[str]:
    """Returns how often each thing happened to which an engine must come again."""
    found: Counter[str] = Counter()
    for kind, value in entries:
        if kind is EntryKind.ENDED:
            assert isinstance(value, list)
            _, outcome, _, matched, _, evicted, _, forced, known, drafted, accepted = value
            counts = {"matched": matched, "evicted": evicted, "forced": forced, "known": known}
            found += Counter({str(outcome): 1, "drafted": drafted, "accepted": accepted, **counts})
        elif kind is EntryKind.FAULT and value is not None:
            found["faults"] += 1
        elif kind is EntryKind.STATE and value is None:
            found["late"] += 1
    return found


class NoisyMeter(ZeroMeter):
    """A meter that shows what nobody could foresee."""

    def __init__(self, numbers: random.Random) -> None:
        self._numbers = numbers

    def active(self) -> int:
        return self._numbers.randrange(200_000)

    def peak(self) -> int:
        return self._numbers.randrange(400_000)


class Story:
    """A random mix of requests, made from one seed."""

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        self.joined = 0
        """The most answers that decoded together while it was recorded."""
        self.unwritten: list[int] = []
        """The values that were not written yet, at each forward."""
        self.idle_slices = 0

    ranks: Ranks | None = None
    """The other ranks of the next engine."""

    def engine(self, tape: Tape, outbox: Outbox, meter: ZeroMeter) -> TinyEngine:
        """Returns an engine with this tape. All engines of a story are alike."""
        numbers = random.Random(self._seed)
        drafts = numbers.random() < 0.7 and self._name in SLICEABLE
        drafting = Drafting(DraftPolicy()) if drafts else None
        engine = TinyEngine(
            self._name,
            TapedPolicy(numbers.choice((16, 64, 512)), numbers.choice((0.02, 0.1)), tape),
            parallel=1 if drafts else numbers.choice((1, 2, 4, 8)),
            budget=None if drafts else numbers.choice((None, 60_000, 400_000)),
            memory=MemoryBudget(TapedMeter(meter, tape), None if drafts else numbers.choice(_ROOMS), 512),
            eos=EOS,
            first_tokens=numbers.random() < 0.5,
            drafting=drafting,
            tape=tape,
            outbox=outbox,
            ranks=self.ranks,
        )
        if drafting is not None:
            drafting.clock = lambda: tape.input(EntryKind.SECONDS, engine.clock)
            drafting.step_s = lambda seconds: tape.input(EntryKind.SECONDS, lambda: seconds)
        return engine

    def record(self, file: Path) -> Seen:
        """Records the mix. Returns the events of the clients."""
        return self.run(Recording(Recorder(TapeFile(file, HEADER).write), plain_outbox()), faults=0.01)

    def run(self, recording: Recording, slices: int = 600, *, faults: float = 0.0) -> Seen:
        """Runs the mix with this recording; each forward breaks with the probability `faults`. Returns as `record`."""
        numbers = random.Random(f"{self._name} {self._seed}")
        engine = self.engine(recording.tape, recording.outbox, NoisyMeter(numbers))
        recording.end_slice(idle=True)

        def meanwhile() -> None:
            if late and numbers.random() < 0.2:
                self._compile(*late.pop(0), numbers)
            if here and numbers.random() < 0.01:
                numbers.choice(here).request.cancel()

        def breaks(rows: int, length: int) -> bool:
            self.unwritten.append(len(recording.tape._entries))
            meanwhile()
            return numbers.random() < faults

        engine.forward.breaks = breaks
        engine.forward.error = lambda text: numbers.choice((ValueError, MemoryError, RuntimeError))(text)
        bases = [[numbers.randrange(VOCAB) for _ in range(20)] * 3 for _ in range(2)]
        coming = [self._request(numbers, bases) for _ in range(numbers.randint(6, 12))]
        here: list[ClientRequest] = []
        late: list[tuple[ClientRequest, Grammar]] = []
        idle = True
        with made_up(engine.clock, numbers):
            for _ in range(slices):
                if not (coming or late or engine.scheduler.awaits_mask) and idle:
                    break
                if coming and (idle or numbers.random() < 0.1):
                    spec = coming.pop()
                    if here and numbers.random() < 0.3:  # what is known already
                        spec = here[0].spec
                    here.append(client := ClientRequest(engine.kind, spec, late=lambda: numbers.choice((0, 0, 0, 2))))
                    client.request.number = len(here)
                    if client.request.grammar is not None:
                        late.append((client, client.request.grammar.result()))
                        client.request.format, client.request.grammar = Lark(spec.grammar), Future()
                    recording.queue(engine.scheduler.add)(client.request)
                meanwhile()
                engine.forward.forward_s = numbers.choice((0.001, 0.01, 0.05))
                recording.begin_slice(engine.scheduler.add)
                engine.scheduler.compute_slice()
                idle = engine.scheduler.idle  # asked once a slice, as the engine does: a mask may come with it
                recording.end_slice(idle=idle)
                self.idle_slices += idle
                recording.outbox.send()
                self.joined = max(self.joined, *(len(each.generations) for each in engine.scheduler.batches.all), 0)
        recording.tape.flush()
        return {each.request.number: [what_clients_read(event) for event in each.received] for each in here}

    def _compile(self, client: ClientRequest, grammar: Grammar, numbers: random.Random) -> None:
        compiling = client.request.grammar
        assert compiling is not None
        if not compiling.set_running_or_notify_cancel():
            return
        if numbers.random() < 0.1:
            compiling.set_exception(RequestError("too hard"))
        else:
            compiling.set_result(grammar)

    def _request(self, numbers: random.Random, bases: list[list[int]]) -> RequestSpec:
        shared = numbers.choice(bases)[: numbers.choice((0, 30, 60))]
        prompt = (*shared, *(numbers.randrange(VOCAB) for _ in range(numbers.randint(1, 40))))
        options = SamplingOptions(
            temperature=numbers.choice((0, 0, 0.9)),
            repeat_penalty=numbers.choice((0, 0, 0, 1.3)),
            repeat_last_n=64,
            seed=numbers.choice((None, 7)),
            logprobs=numbers.random() < 0.3,
            top_logprobs=2,
        )
        grammar = numbers.choice(GRAMMARS) if numbers.random() < 0.3 else ""
        stop = text_of([numbers.randrange(VOCAB)]) if numbers.random() < 0.2 else ""
        return RequestSpec(prompt, numbers.choice((1, 12, 60)), options, stop, EOS, grammar)

    def replay(self, file: Path) -> tuple[Replayed, Seen]:
        """Replays a file with another engine. Returns what came of it, and what the clients would have been told."""
        player = Player(TapeReader(file).entries())
        return self.run_again(Replay(player, VOCAB))

    def run_again(self, replay: Replay) -> tuple[Replayed, Seen]:
        """Runs a replay with another engine. Returns as `replay`."""
        engine = self.engine(replay.tape, replay.turns.outbox, ZeroMeter())
        requests: list[Request] = []
        add = engine.scheduler.add

        def watched(request: Request) -> None:
            requests.append(request)
            add(request)

        with patch.object(engine.scheduler, "add", watched):
            done = replay.run(engine.scheduler, partial(WorkerGrammar, None, State()), lambda requests, slices: None)
        return done, {each.number: [what_clients_read(event) for event in each.stream._events] for each in requests}
