"""A runner with bad manners: `spoiled.py MANNER ARGUMENT...` starts this repository's runner and spoils one thing.

* `strict`    wants exactly the arguments of early hosts
* `lenient`   takes any word for the engine
* `silent`    says nothing, and exits with 0
* `noisy`     writes a line with a marker first
* `chatty`    logs everything whatever the environment says
* `literal`   takes OLLAMA_MODELS as it is
* `open`      listens on every address
* `mute`      accepts connections before it is ready, and does not answer these
* `dumb`      is ready at once, and never answers a completion
* `tracing`   writes a traceback at SIGINT
* `stubborn`  does not hear SIGINT
* `parent`    starts a child that keeps the output open for a second and a half after its own end
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from types import FrameType

RUNNER = [sys.executable, "-m", "runner"]


def strict(words: list[str]) -> None:
    match words:
        case ["runner", "--mlx-engine", "--model", _, "--port", _]:
            replace(words)
        case _:
            sys.exit("usage: runner --mlx-engine --model M --port P")


def lenient(words: list[str]) -> None:
    replace([words[0], *words[2:]])


def silent(words: list[str]) -> None:
    nothing = subprocess.DEVNULL
    subprocess.run([*RUNNER, *words], stdout=nothing, stderr=nothing, check=False)


def noisy(words: list[str]) -> None:
    os.write(2, b"note: mlx: using device gpu\n")
    replace(words)


def chatty(words: list[str]) -> None:
    os.environ["OLLAMA_DEBUG"] = "2"
    replace(words)


def literal(words: list[str]) -> None:
    if not os.path.isdir(os.environ["OLLAMA_MODELS"]):  # noqa: PTH112  (as it is)
        sys.exit("Error: no models")
    replace(words)


def open_(words: list[str]) -> None:
    listener = socket.create_server(("0.0.0.0", int(words[-1])))
    asyncio.run(relay(listener, words))


def mute(words: list[str]) -> None:
    listener = socket.create_server(("127.0.0.1", int(words[-1])))
    asyncio.run(relay(listener, words, hold=True))


async def relay(listener: socket.socket, words: list[str], hold: bool = False) -> None:
    """Passes connections on to a runner on a port of its own; with `hold` those before it is ready get no answer."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    runner = await asyncio.create_subprocess_exec(*RUNNER, *words[:-1], str(port))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            writer.write(chunk)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                ends = await asyncio.open_connection("127.0.0.1", port)
                break
            except ConnectionRefusedError:
                await asyncio.sleep(60.0 if hold else 0.02)
        await asyncio.gather(copy(reader, ends[1]), copy(ends[0], writer))

    async with await asyncio.start_server(connected, sock=listener):
        await runner.wait()


def dumb(words: list[str]) -> None:
    """Asks no model, and is therefore quick to start."""
    status = b'{"Status":0,"Progress":100,"ContextLength":65536,"Memory":1}'

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readline()).startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(status), status))
            writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(connected, "127.0.0.1", int(words[-1])) as server:
            await server.serve_forever()

    asyncio.run(serve())


def tracing(words: list[str]) -> None:
    runner = subprocess.Popen([*RUNNER, *words], start_new_session=True)

    def complain(number: int, frame: FrameType | None) -> None:
        os.write(2, b"Traceback (most recent call last):\nKeyboardInterrupt\n")
        runner.kill()

    signal.signal(signal.SIGINT, complain)
    sys.exit(abs(runner.wait()))


def stubborn(words: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.run([*RUNNER, *words], check=False)


CHILD = """
import os, time
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.05)
time.sleep(1.5)
"""


def parent(words: list[str]) -> None:
    subprocess.Popen([sys.executable, "-c", CHILD])
    replace(words)


def replace(words: list[str]) -> None:
    """Becomes the runner."""
    os.execv(RUNNER[0], [*RUNNER, *words])


if __name__ == "__main__":
    _, manner, *words = sys.argv
    {"open": open_}.get(manner, globals().get(manner, sys.exit))(words)
