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

from scripts.tools.host.lib.answers import Answer, Logprob, UndecodableError
from scripts.tools.host.lib.client import Client, Completion, Reply, StatusError, Stream, StreamError
from scripts.tools.host.lib.generations import F_PRIME, F_SECOND, G_PRIME, GENERATIONS, A, E, F, G, Generation, H
from scripts.tools.host.lib.output import OUT_OF_MEMORY, RULES, OutputScanner, Rule, capture
from scripts.tools.host.lib.process import LoadError, Process, descriptors, free_port, rss_bytes, spawn, write_decoys
from scripts.tools.host.lib.requests import Medium, Request, wire_format
from scripts.tools.host.lib.scheduler import Host, Loaded
from scripts.tools.host.lib.structured import Part, Thinking, parts
