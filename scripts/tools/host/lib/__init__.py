"""An Ollama-like host: spawns a runner as each host generation does, reads its output and its answers as they do.

A small library without pytest in it, usable for any executable that speaks the runner protocol:

    with spawn([sys.executable, "-m", "runner"], "demo:latest", models_dir=store) as process:
        process.wait_ready()
        async with Client.of(process) as client:
            async with client.stream(Request("Hello", {"num_predict": 20})) as stream:
                async for answer in stream:
                    print(answer.content, end="", flush=True)

`Host` does what a host's scheduler does beyond that: it loads on demand, shares, keeps, evicts and reloads.

    async with Host([sys.executable, "-m", "runner"], models_dir=store) as host:
        completion = await host.complete("demo:latest", Request("Hello"), keep_alive_s=0)
"""

from scripts.tools.host.lib.answers import Answer, Logprob, Status, TokenLogprob, UndecodableError
from scripts.tools.host.lib.client import Client, Completion, Reply, StatusError, Stream, StreamError
from scripts.tools.host.lib.generations import (
    B_PRIME,
    F_PRIME,
    F_SECOND,
    G_PRIME,
    GENERATIONS,
    A,
    B,
    C,
    D,
    E,
    F,
    G,
    Generation,
    H,
)
from scripts.tools.host.lib.output import MARKERS, OUT_OF_MEMORY, RULES, OutputScanner, Rule, capture, is_out_of_memory
from scripts.tools.host.lib.process import LoadError, Process, free_port, spawn, write_decoys
from scripts.tools.host.lib.requests import Medium, Request, wire_format
from scripts.tools.host.lib.scheduler import Host, Loaded
from scripts.tools.host.lib.structured import Part, Thinking, ThinkingParser, parts

__all__ = [
    "B_PRIME",
    "F_PRIME",
    "F_SECOND",
    "GENERATIONS",
    "G_PRIME",
    "MARKERS",
    "OUT_OF_MEMORY",
    "RULES",
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
    "H",
    "Host",
    "LoadError",
    "Loaded",
    "Logprob",
    "Medium",
    "OutputScanner",
    "Part",
    "Process",
    "Reply",
    "Request",
    "Rule",
    "Status",
    "StatusError",
    "Stream",
    "StreamError",
    "Thinking",
    "ThinkingParser",
    "TokenLogprob",
    "UndecodableError",
    "capture",
    "free_port",
    "is_out_of_memory",
    "parts",
    "spawn",
    "wire_format",
    "write_decoys",
]
