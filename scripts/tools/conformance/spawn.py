"""Cases 1-14: how the process is started, and how it goes."""

import asyncio
import re
import signal
import socket
from collections.abc import Iterator

from scripts.tools.conformance.assertions import ALPHABET, expect, generating, long_prompt, quiet, refusal, under_way
from scripts.tools.conformance.cases import Need, Section, argv, once, ready, told
from scripts.tools.conformance.models import ARCHITECTURE, UNSUPPORTED
from scripts.tools.conformance.runners import Target, caught
from scripts.tools.host.lib import Client, LoadError, Process, Request

SPAWN = Section("Spawn and life")
ENGINE_FLAG = Need(lambda generation: generation.engine_flag, "the host passes no engine flag")
ANSWER_S = 2.0
"""A poll that is accepted gets an answer, of whatever kind, in this time."""
SIGINT = Need(lambda generation: generation.close_grace_s > 0, "the host sends SIGKILL at once")


async def answer(target: Target, process: Process) -> str:
    """Returns the answer of a process of the main model to "Hi"."""
    async with Client(process.port, target.generation, process.output) as client:
        return (await client.complete(Request("Hi"))).text


async def exited(process: Process, limit_s: float) -> int:
    """Its exit status. Fails unless it exits, and lets go of its output, within the limit."""
    status = await asyncio.to_thread(process.wait, limit_s)
    if status is None:
        raise AssertionError(f"it did not exit, or somebody held its output, for {limit_s} s")
    return status


async def failed(process: Process) -> str:
    """Returns what its host reads of a process that must not become ready."""
    try:
        await asyncio.to_thread(process.wait_ready, 30)
    except LoadError as error:
        return str(error)
    raise AssertionError("it became ready")


def other_addresses() -> Iterator[str]:
    """Addresses of this machine that are not 127.0.0.1."""
    yield from ("127.0.0.2", "::1")
    for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
        if address[0] not in ("127.0.0.1", "127.0.0.2", "::1"):
            yield str(address[0])


@SPAWN.case(1, "loopback-only", argv)
async def listens_on_127_0_0_1_only(target: Target) -> None:
    """It listens on the given port of 127.0.0.1 and on no other address."""
    port = await target.port()
    expect("answer", await target.text("Hi"), ALPHABET)
    for address in other_addresses():
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 0.5)
        except (OSError, TimeoutError):
            continue
        writer.close()
        raise AssertionError(f"it listens on {address} too")


@SPAWN.case(2, "verbose", argv)
async def verbose_changes_nothing(target: Target) -> None:
    """`--verbose` is accepted."""
    async with target.spawn(words=[*target.generation.argv("{model}", 0)[:-1], "{port}", "--verbose"]) as process:
        expect("answer", await answer(target, process), ALPHABET)


@SPAWN.case(3, "spelled-with-equals", argv)
async def flags_are_spelled_as_go_reads_them(target: Target) -> None:
    """`--model=M --port=P` is accepted, and one dash is enough."""
    engine = ["--mlx-engine"] if target.generation.engine_flag else []
    async with target.spawn(words=["runner", *engine, "--model={model}", "-port={port}", "-verbose=true"]) as process:
        expect("answer", await answer(target, process), ALPHABET)


@SPAWN.case(4, "another-engine", argv, ENGINE_FLAG)
async def another_engine_is_refused(target: Target) -> None:
    """A first argument other than `--mlx-engine` ends it with a line that says so."""
    for word in ("--imagegen-engine", "--ollama-engine", "engine"):
        words = ["runner", word, "--model", "{model}", "--port", "{port}"]
        async with target.spawn(words=words, ready=False) as process:
            told = await failed(process)
            assert process.exit_status, f"{word}: exit status {process.exit_status}"
            assert "Error: unknown runner engine, expected --mlx-engine" in told, f"{word}: the user reads {told!r}"


@SPAWN.case(5, "missing-model", told)
async def a_missing_model_is_told(target: Target) -> None:
    """A missing model ends it with exit status 1 and one line, which reaches the user."""
    async with target.spawn("nobody/nothing:v1", ready=False) as process:
        told = await failed(process)
        wanted = r"mlx runner failed: Error: read manifest: [^\n]*\(exit: exit status 1\)"
        assert re.fullmatch(wanted, told), f"the user reads {told!r}"
        expect("lines that hosts capture", len(caught(process)), 1)


@SPAWN.case(6, "unsupported-architecture", told)
async def an_unsupported_architecture_is_named(target: Target) -> None:
    """An unknown architecture ends it with exit status 1 and a line that names it."""
    async with target.spawn(UNSUPPORTED, ready=False) as process:
        wanted = f"mlx runner failed: Error: unsupported architecture: {ARCHITECTURE} (exit: exit status 1)"
        expect("what the user reads", await failed(process), wanted)


@SPAWN.case(7, "port-taken", told)
async def a_taken_port_is_told(target: Target) -> None:
    """A port that is taken ends it with a line that names the port."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        async with target.spawn(port=port, ready=False) as process:
            assert await exited(process, 60) != 0, "exit status 0"
            captured = process.output.captured
            assert captured.startswith("Error:"), f"captured: {captured!r}"
            assert str(port) in captured, f"captured: {captured!r}"


@SPAWN.case(8, "not-ready-early", ready)
async def refusal_or_503_until_ready(target: Target) -> None:
    """Until it is ready, connections are refused or answered with 503; none is left waiting."""
    path = target.generation.ready_path
    async with target.spawn(ready=False) as process, asyncio.timeout(60):
        seen: list[str] = []
        while not seen or seen[-1] in ("refused", "503"):
            expect("exit status", process.exit_status, None)
            seen.append(await poll(process.port, path))
            await asyncio.sleep(0.02)
    assert seen[-1] in ("200", "308"), f"readiness was answered with {seen[-1]}"
    assert len(seen) > 1, "it was ready at the first look"


async def poll(port: int, path: str) -> str:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return "refused"
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return (await asyncio.wait_for(reader.readline(), ANSWER_S)).decode().split()[1]
    except TimeoutError:
        raise AssertionError("a connection was accepted and not answered") from None
    finally:
        writer.close()


@SPAWN.case(9, "sigint-idle", argv, SIGINT)
async def sigint_ends_an_idle_process(target: Target) -> None:
    """SIGINT ends an idle process within a second and without an error message."""
    async with target.spawn() as process:
        process.send_signal(signal.SIGINT)
        await exited(process, 1.0)
        quiet(process)


@SPAWN.case(10, "sigint-prefill", argv, SIGINT)
async def sigint_ends_a_prefill(target: Target) -> None:
    """SIGINT in the middle of a prefill ends it within five seconds."""
    async with target.spawn() as process, Client(process.port, target.generation) as client:
        async with under_way(client.complete(Request(long_prompt(target)))):
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGINT)
            await exited(process, 5.0)
        quiet(process)


@SPAWN.case(10, "sigint-decode", argv, SIGINT)
async def sigint_ends_a_decode(target: Target) -> None:
    """SIGINT in the middle of an answer ends it within five seconds."""
    async with target.spawn() as process, Client(process.port, target.generation) as client, generating(client):
        process.send_signal(signal.SIGINT)
        await exited(process, 5.0)
        quiet(process)


@SPAWN.case(11, "pipe-let-go", argv)
async def nobody_else_holds_the_pipe(target: Target) -> None:
    """After the process has ended, no other process holds its output."""
    async with target.spawn() as process, Client(process.port, target.generation) as client, generating(client):
        process.send_signal(signal.SIGKILL)
        await exited(process, 1.0)


@SPAWN.case(12, "session-without-marker", ready)
async def a_session_writes_no_marker(target: Target) -> None:
    """Loading and five requests, one of them cancelled and one refused, write nothing that hosts take for an error."""
    async with target.spawn() as process:
        async with Client(process.port, target.generation, process.output) as client:
            for prompt in ("Hi", "Hi", "w"):
                await client.complete(Request(prompt, target.generation.default_options), tokenize=True)
            assert (await client.complete(Request("0"), cancel_after=3)).cancelled, "there was nothing to cancel"
            await refusal(client.complete(Request("")))
            await asyncio.sleep(0.1)
        await asyncio.to_thread(process.close)
        quiet(process)


@SPAWN.case(13, "quoted-models-dir", once)
async def quotes_around_ollama_models_are_stripped(target: Target) -> None:
    """Spaces, then quotes around OLLAMA_MODELS are stripped."""
    environment = {"OLLAMA_MODELS": f" '\"{target.runners.models_dir}\"' \n"}
    async with target.spawn(environment=environment) as process:
        expect("answer", await answer(target, process), ALPHABET)


LEVELS: tuple[tuple[str, set[str], set[str]], ...] = (
    ("0", {"INFO"}, {"DEBUG", "TRACE"}),
    ("1", {"INFO", "DEBUG"}, {"TRACE"}),
    ("2", {"INFO", "DEBUG", "TRACE"}, set()),
)
"""Values of OLLAMA_DEBUG, the levels that then appear, and those that do not."""


@SPAWN.case(14, "log-level", once)
async def ollama_debug_sets_the_level(target: Target) -> None:
    """OLLAMA_DEBUG=1 shows debug lines, 2 trace lines, unset or 0 neither."""
    await levels(target, await target.process(), *LEVELS[0])  # where it is unset
    for value, wanted, unwanted in LEVELS:
        async with target.spawn(environment={"OLLAMA_DEBUG": value}) as process:
            await levels(target, process, value, wanted, unwanted)


async def levels(target: Target, process: Process, value: str, wanted: set[str], unwanted: set[str]) -> None:
    """After a request and a wrong one the log has lines of the wanted levels, and none of the others."""
    await answer(target, process)
    async with Client(process.port) as client, asyncio.timeout(10):
        await client.send("POST", "/v1/status")  # a warning at every level: once it is there, so are the others
        while "level=WARN" not in process.output.text:
            await asyncio.sleep(0.01)
    seen = set(re.findall(r"^time=\S+ level=([A-Z]+) ", process.output.text, re.MULTILINE))
    assert wanted <= seen, f"OLLAMA_DEBUG={value}: no {wanted - seen} among {seen}"
    assert not unwanted & seen, f"OLLAMA_DEBUG={value}: {unwanted & seen}"
