"""The processes in which grammars are compiled and followed: whatever a format does there, it does to itself alone.

One process holds the vocabulary and is forked for each worker; a worker compiles one format and then leads one answer
at a time through it. llguidance has limits, but there are formats that hang it, exhaust memory or overflow its stack
before they reach one. A process can be given a limit of memory, and be killed.
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
from typing import NoReturn, TypeVar

import msgspec

from protocol.format import Format
from runner.errors import RequestError
from runner.grammar.compiler import Compiler
from runner.grammar.messages import (
    COMPILE_S,
    FORK,
    HEAD_BYTES,
    KILL,
    ORDER,
    SLOW,
    Compile,
    CompilerSetup,
    Follow,
    State,
    body_length,
    encode_message,
)
from runner.tokenizer import open_tokenizer

_STEP_S = 10.0  # the runner gives up before; this is for when the runner is gone
_NICENESS = 10  # of a worker that takes long: it must not slow those who compute answers
_SLOW_STEP_S = 0.05
Message = TypeVar("Message", bound=msgspec.Struct)


def serve(control: socket.socket) -> NoReturn:
    """Fork workers for the runner at the other end of `control`, until it closes that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the runner decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = _open(control)
    gc.collect()
    gc.freeze()
    workers: dict[int, int] = {}
    while True:
        data, descriptors, *_ = socket.recv_fds(control, ORDER.size, 1)
        if len(data) < ORDER.size:
            os._exit(0)
        order, number = ORDER.unpack(data)
        _reap(workers)
        if order == KILL and number in workers:
            os.kill(workers[number], signal.SIGKILL)
        if order == SLOW and number in workers:
            os.setpriority(os.PRIO_PROCESS, workers[number], _NICENESS)
        if order == FORK:
            with socket.socket(fileno=descriptors[0]) as channel:
                try:
                    process = os.fork()
                except OSError as error:
                    channel.sendall(encode_message(State(error=f"Format: no process can be started: {error.strerror}")))
                    continue
                if not process:
                    control.close()
                    _work(channel, compiler)
                workers[number] = process


def _open(control: socket.socket) -> Compiler:
    """Says whether it can compile; ends the process if it cannot."""
    try:
        setup = _receive(control, CompilerSetup)
        files = {name: Path(os.fsdecode(path)) for name, path in setup.files.items()}
        tokenizer = open_tokenizer(
            lambda name: files[name].read_bytes() if name in files else None, merge_eos=setup.merge_eos
        )
        compiler = Compiler(tokenizer, setup.vocab_size)
        compiler.vocabulary  # noqa: B018 - made here, and shared by all workers
    except Exception as error:
        control.sendall(encode_message(State(error=f"Format: the model's tokenizer cannot be read again: {error}")))
        os._exit(1)
    control.sendall(encode_message(State()))
    return compiler


def _reap(workers: dict[int, int]) -> None:
    """Forget those that have ended: their process ids may go to others now."""
    while workers:
        process, _ = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        for number in [number for number, known in workers.items() if known == process]:
            del workers[number]


def _work(channel: socket.socket, compiler: Compiler) -> NoReturn:
    """Compile one format, then follow it until the runner closes the channel."""
    gc.disable()
    before_bytes, steps = _used_bytes(), None

    def answer(limit_s: float, compute: Callable[[], State]) -> None:
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # whose signal ends the process, wherever it is
        started_s = time.process_time()
        try:
            state = compute()
        except RequestError as error:
            state = State(error=str(error))
        except (MemoryError, RecursionError) as error:
            state = State(error=f"Format: too large or too intricate to compile ({type(error).__name__})")
        signal.setitimer(signal.ITIMER_REAL, 0)
        took_s, nbytes = time.process_time() - started_s, _used_bytes() - before_bytes
        channel.sendall(encode_message(msgspec.structs.replace(state, seconds=took_s, nbytes=nbytes)))
        if steps is not None and took_s > _SLOW_STEP_S:
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)

    order = _receive(channel, Compile)
    _limit_memory(order.memory_bytes)
    wanted = msgspec.json.decode(order.format, type=Format)

    def begin() -> State:
        nonlocal steps
        steps = compiler.compile(wanted).steps()
        return steps.begin()

    answer(COMPILE_S, begin)
    while steps is not None:
        answer(_STEP_S, partial(steps.follow, _receive(channel, Follow)))
    os._exit(0)


def _limit_memory(more_bytes: int) -> None:
    """Let this process allocate so much more. macOS knows no such limit; there, time alone bounds it."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most_bytes = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def _used_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _receive(channel: socket.socket, kind: type[Message]) -> Message:
    """The next message. Ends the process when the other end is closed."""
    return msgspec.msgpack.decode(_exactly(channel, body_length(_exactly(channel, HEAD_BYTES))), type=kind)


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = channel.recv(min(count - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)
