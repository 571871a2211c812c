"""A running model that sees, to be attacked with pictures, and somebody else who is answered meanwhile."""

import asyncio
import json
import struct
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from protocol.stats import Stats
from scripts.tools.host.lib import Client, Medium, Request
from scripts.tools.models.png import png_file
from scripts.tools.models.sources import write_source
from scripts.tools.models.store import write_store
from tests.process.conftest import read_stats, running
from tests.process.hostile.victim import HOST, PATIENCE_S, PLAIN_HEAD, Victim

SEEING = "seeing:latest"
STORY = Request("Tell me a story.", {"num_predict": 1000})
"""The request of somebody else: long enough to last, though its tokens are drafted from the second time on."""


def open_onlooker(directory: Path, context: int, name: str) -> "Iterator[Onlooker]":
    """Yields the onlooker of a process with a tiny model that sees, which has to outlive the block."""
    store = write_store(directory / "store", SEEING, write_source(directory / "source", name))
    config = json.loads(store.blob_of("config.json").read_text())
    config["text_config"]["max_position_embeddings"] = context
    store.put_json("config.json", config)
    with running(SEEING, store.models_dir, generation=HOST) as process:
        onlooker = Onlooker(Victim(process))
        asyncio.run(onlooker.prepare())
        yield onlooker
        assert process.exit_status is None, "it outlived everything"


def black_png(width: int, height: int, rows: int) -> bytes:
    """Returns a PNG of one bit a pixel with the packed zeros of `rows` rows, whatever its header claims."""
    squeeze, row = zlib.compressobj(9), bytes(1 + (width + 7) // 8)
    packed = b"".join(squeeze.compress(row) for _ in range(rows)) + squeeze.flush()
    return png_file(struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0), packed)


def asking(prompt: str, files: Iterable[bytes]) -> bytes:
    """The body of a request with these pictures."""
    media = [{"data": b64encode(data).decode(), "id": number} for number, data in enumerate(files)]
    return json.dumps({"Prompt": prompt, "Media": media, "Options": {"num_predict": 3}}).encode()


def head(length: int) -> bytes:
    """The head of a completion with a body of this length."""
    return f"POST /completion HTTP/1.1\r\nContent-Length: {length}\r\n".encode() + PLAIN_HEAD + b"\r\n"


class Onlooker:
    """Sends hostile requests, and looks at the process and at somebody else's answer meanwhile."""

    def __init__(self, victim: Victim) -> None:
        self.victim = victim
        self._story = ""
        self.threads_at_first = 0
        """Their number before anything hostile came."""

    async def prepare(self) -> None:
        """Asks for STORY when nothing else goes on, and shows a first picture: what decodes it is imported then."""
        async with Client.of(self.victim.process) as client:
            self._story = (await client.complete(STORY)).text
            await client.complete(Request("[img-0]", {"num_predict": 1}, media=[Medium(black_png(64, 64, 64))]))
        self.threads_at_first = len(self.threads)

    async def host(self, pieces: Sequence[bytes]) -> bytes:
        """Sends a request as hosts do, who read while they send, and hang up with the answer. Returns the answer."""
        reader, writer = await self.victim.open()

        async def send() -> None:
            writer.write(head(sum(map(len, pieces))))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()

        sending = asyncio.create_task(send())
        try:
            async with asyncio.timeout(PATIENCE_S):
                start = await reader.readuntil(b"\r\n\r\n")
                length = int(start.lower().split(b"content-length:")[1].split()[0])
                return start + await reader.readexactly(length)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.transport.abort()

    @asynccontextmanager
    async def beside_a_story(self) -> AsyncIterator[None]:
        """A block during which somebody else's answer begins, and behind which it ends as if nothing had happened."""
        begun = asyncio.Event()

        async def tell() -> str:
            text = ""
            async with client.stream(STORY) as stream:
                async for answer in stream:
                    text += answer.content
                    begun.set()
            return text

        async with Client.of(self.victim.process) as client:
            telling = asyncio.create_task(tell())
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            yield
            assert await asyncio.wait_for(telling, PATIENCE_S) == self._story

    async def stats(self) -> Stats:
        """Returns the present statistics."""
        async with Client.of(self.victim.process) as client:
            return await read_stats(client)

    async def at_rest(self) -> Stats:
        """Waits until nothing of any request is left, and returns the statistics."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                stats = await self.stats()
                if not (stats.requests.running or stats.requests.queued or stats.media.row_bytes):
                    return stats
                await asyncio.sleep(0.05)

    @property
    def threads(self) -> set[int]:
        """The threads of the process."""
        return {int(each.name) for each in Path(f"/proc/{self.victim.process.pid}/task").iterdir()}
