"""An Ollama-like host: spawns a runner as each host generation does, reads its output and its answers as they do.

A small library without pytest in it, usable for any executable that speaks the runner protocol:

    with spawn([sys.executable, "-m", "runner"], "demo:latest", models_dir=store) as process:
        process.wait_ready()
        async with Client.of(process) as client:
            async with client.stream(Request("Hello", {"num_predict": 20})) as stream:
                async for answer in stream:
                    print(answer.content, end="", flush=True)
"""

from tests.host.answers import Answer, Logprob, Status, TokenLogprob, UndecodableError
from tests.host.client import Client, Completion, Reply, StatusError, Stream, StreamError
from tests.host.generations import B_PRIME, GENERATIONS, A, B, C, D, E, F, G, Generation
from tests.host.libraries import write_decoys
from tests.host.output import MARKERS, OUT_OF_MEMORY, OutputScanner, capture
from tests.host.process import LoadError, Process, free_port, spawn
from tests.host.requests import Medium, Request

__all__ = [
    "B_PRIME",
    "GENERATIONS",
    "MARKERS",
    "OUT_OF_MEMORY",
    "A",
    "Answer",
    "B",
    "C",
    "Client",
    "Completion",
    "D",
    "E",
    "F",
    "G",
    "Generation",
    "LoadError",
    "Logprob",
    "Medium",
    "OutputScanner",
    "Process",
    "Reply",
    "Request",
    "Status",
    "StatusError",
    "Stream",
    "StreamError",
    "TokenLogprob",
    "UndecodableError",
    "capture",
    "free_port",
    "spawn",
    "write_decoys",
]
