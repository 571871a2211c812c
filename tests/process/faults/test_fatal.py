"""Faults that end the process: one line for the host, an exit status, and streams that break off without an end."""

import asyncio
import resource
import signal
from pathlib import Path

import aiohttp
import pytest

from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Request, StreamError
from tests.process.conftest import CHUNKED, FAULTY, SpawnModel, linux_only
from tests.process.faults.fault_control import FaultControl


def address_bytes(pid: int) -> int:
    """Returns the size of the process's address space, used or not."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


async def text_of_end(client: Client, request: Request) -> str:
    """Returns the host's message about a request whose stream breaks off."""
    with pytest.raises(StreamError) as broken:
        await client.complete(request)
    return str(broken.value)


@pytest.mark.parametrize(
    ("point", "fault", "told"),
    [
        ("sample", "exit", "SystemExit: Error: mlx: enough"),
        (
            "hand over",
            "fault",
            "RuntimeError: Error: mlx: panic: CUDA error, allocation-failed in a place that has no memory",
        ),
        ("report", "mlx memory", "out of memory: RuntimeError: [malloc] Unable to allocate 123456789 bytes."),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else value,
)
async def test_the_process_ends_with_one_line_when_the_engine_dies(
    point: str, fault: str, told: str, faults: FaultControl, start: SpawnModel
) -> None:
    # One at a time: answers that are computed together are sampled elsewhere.
    process = start(executable=FAULTY, environment=faults.environment, arguments=[*CHUNKED, "--parallel", "1"])
    line = f"Error: the engine died: {told}"
    async with Client.of(process) as client:
        first = await client.post_completion(Request("0"))
        ends = asyncio.gather(*(text_of_end(client, Request("0")) for _ in range(2)))  # queued behind the first
        await first.content.readline()
        faults.arm(point, fault)
        if point == "report":
            first.close()
        assert await asyncio.to_thread(process.wait, 60) == 1
        assert all(line in text for text in await asyncio.wait_for(ends, 60))
        if point != "report":
            with pytest.raises(aiohttp.ClientPayloadError):
                await first.read()
    assert process.output.captured == line
    assert process.output.lines[-1] == line


@linux_only
async def test_a_crash_within_mlx_leaves_a_line_that_hosts_recognize_as_an_error(start: SpawnModel) -> None:
    """MLX on a CPU does not check whether an allocation has succeeded. Its own kernels take so much that it is one of
    theirs that fails."""
    process = start(arguments=["--prefill-chunk", "40000", "--kernels", "off"])
    async with Client.of(process) as client:
        await client.complete(Request("q", {"num_predict": 1}))  # starts the threads
        resource.prlimit(process.pid, resource.RLIMIT_AS, (address_bytes(process.pid) + (8 << 20),) * 2)
        await text_of_end(client, Request("q" * (CONTEXT - 100)))
    assert await asyncio.to_thread(process.wait, 60) == -signal.SIGSEGV
    assert process.output.captured.startswith("error:")  # Python writes the line in pieces
    assert "\nFatal Python error: Segmentation fault\n" in process.output.text
    assert "generation.py" in process.output.text
