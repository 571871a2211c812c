"""The program of the fork server and its workers: processes outside the runner that compile and follow grammars.

llguidance has limits, but some formats hang it, exhaust memory or overflow its stack before they reach a limit. A
process can have a memory limit, and can be killed.
"""

import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from protocol.format import Format
from runner.errors import RequestError
from runner.grammar.compiler import Compiler
from runner.grammar.explain_error import panics_as_errors
from runner.grammar.matcher import GrammarMatcher
from runner.grammar.messages import COMPILE_S, FORK, KILL, ORDER, SLOW, Compile, CompilerSetup, Follow, State
from runner.process.child import Channel
from runner.tokenizer import open_tokenizer

Message = TypeVar("Message", bound=msgspec.Struct)
_STEP_S = 10.0  # a safeguard for the case that the runner is gone; a running runner gives up earlier
_NICENESS = 10  # for slow workers, so that they do not slow down the engine
_SLOW_STEP_S = 0.05


def serve(control: Channel) -> None:
    """Forks workers for the runner, which is at the other end of `control`, until the runner closes that connection."""
    compiler = _open(control)
    gc.collect()
    gc.freeze()
    workers: dict[int, int] = {}
    while True:
        data, descriptors, *_ = socket.recv_fds(control.connection, ORDER.size, 1)
        if len(data) < ORDER.size:
            return
        order, number = ORDER.unpack(data)
        _reap(workers)
        if order == KILL and number in workers:
            os.kill(workers[number], signal.SIGKILL)
        if order == SLOW and number in workers:
            os.setpriority(os.PRIO_PROCESS, workers[number], _NICENESS)
        if order == FORK:
            with socket.socket(fileno=descriptors[0]) as connection:
                channel = Channel(connection)
                try:
                    process = os.fork()
                except OSError as error:
                    _send(channel, State(error=f"Format: cannot start a worker: {error.strerror}"))
                    continue
                if not process:
                    control.connection.close()
                    _run_worker(channel, compiler)
                    return
                workers[number] = process


def _open(control: Channel) -> Compiler:
    """Returns the compiler after telling the runner that it is ready. Ends the process if there is no tokenizer."""
    try:
        setup = _receive(control, CompilerSetup)
        files = {name: Path(os.fsdecode(path)) for name, path in setup.files.items()}
        tokenizer = open_tokenizer(
            lambda name: files[name].read_bytes() if name in files else None, merge_eos=setup.merge_eos
        )
        compiler = Compiler(tokenizer, setup.vocab_size)
        with panics_as_errors():
            compiler.bounds  # noqa: B018 - made now, with the vocabulary, so that all workers share both
    except Exception as error:
        _send(control, State(error=f"Format: the model's tokenizer cannot be read again: {error}"))
        os._exit(1)
    _send(control, State())
    return compiler


def _reap(workers: dict[int, int]) -> None:
    """Removes ended workers from `workers`: other processes may get their process ids."""
    while workers:
        process, _ = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        for number in [number for number, known in workers.items() if known == process]:
            del workers[number]


def _run_worker(channel: Channel, compiler: Compiler) -> None:
    """Compiles one format, then follows its grammar until the runner closes the channel."""
    gc.disable()
    memory = _Memory()
    matcher: GrammarMatcher | None = None

    def answer(limit_s: float, compute: Callable[[], State]) -> None:
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # after `limit_s`, its signal ends the process
        started_s = time.process_time()
        try:
            state = compute()
        except RequestError as error:
            state = State(error=str(error))
        except (MemoryError, RecursionError) as error:
            state = State(error=f"Format: too large or too complex to compile ({type(error).__name__})")
        signal.setitimer(signal.ITIMER_REAL, 0)
        took_s, nbytes = time.process_time() - started_s, memory.nbytes
        _send(channel, msgspec.structs.replace(state, seconds=took_s, nbytes=nbytes))
        if matcher is not None and took_s > _SLOW_STEP_S:
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)

    order = _receive(channel, Compile)
    memory.limit(order.memory_bytes)
    wanted = msgspec.json.decode(order.format, type=Format)

    def begin() -> State:
        nonlocal matcher
        matcher, beginning = compiler.compile(wanted)
        memory.look()
        return beginning

    answer(COMPILE_S, begin)
    while matcher is not None:
        step = _receive(channel, Follow)
        if step.tries and memory.nbytes > order.memory_bytes // 2:
            answer(_STEP_S, lambda: State(tried=[]))  # drafts must not use up the memory that the answer needs
        else:
            answer(_STEP_S, partial(matcher.follow, step))


class _Memory:
    """Measures and limits the memory that belongs to a worker alone. A worker has 30 MB, but shares most of them with
    the fork server and with other processes that use the same libraries."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC) if sys.platform == "linux" else None
        self._before_bytes = self._anonymous_bytes()

    @property
    def nbytes(self) -> int:
        """The bytes known to belong to this worker alone. Before `look`, most memory that was shared at the fork, and
        that the worker has written to since, is not counted."""
        return self._anonymous_bytes() - self._before_bytes

    def look(self) -> None:
        """Measures the memory so that `nbytes` is exact. Takes a third of a millisecond."""
        if self._statm is not None:
            rolled_up = Path("/proc/self/smaps_rollup").read_text().splitlines()
            dirty = next(line for line in rolled_up if line.startswith("Private_Dirty:"))
            self._before_bytes = self._anonymous_bytes() - (int(dirty.split()[1]) << 10)

    def limit(self, more_bytes: int) -> None:
        """Limits this process to `more_bytes` more than it has now. Does nothing on macOS, which has no such limit."""
        if self._statm is not None:
            most_bytes = self._pages()[0] * resource.getpagesize() + more_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))

    def _anonymous_bytes(self) -> int:
        """Returns the bytes that belong to no file; on macOS, which does not count these, the most bytes ever used."""
        if self._statm is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _, resident, shared = self._pages()
        return (resident - shared) * resource.getpagesize()

    def _pages(self) -> list[int]:
        assert self._statm is not None
        return [int(number) for number in os.pread(self._statm, 100, 0).split()[:3]]


def _send(channel: Channel, state: State) -> None:
    channel.send(msgspec.msgpack.encode(state))


def _receive(channel: Channel, kind: type[Message]) -> Message:
    return msgspec.msgpack.decode(channel.receive(), type=kind)
