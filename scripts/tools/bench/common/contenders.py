"""The contenders over one model: servers that run throughout, and rest while another one is measured."""

import argparse
import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from runner.model.weights.dtype import device
from scripts.tools.bench.common.servers import Endpoint, Server, mlx_lm_server, other_runner, this_runner
from scripts.tools.bench.llamas import B3, M1, M10, M60, M700, Size, make_model, write_model
from scripts.tools.host.lib import Process

OURS, MLX_LM, BARE, BARE_ONE_CORE = "ours", "mlx_lm.server", "bare loop", "bare loop, one core"
SIZES = {"1M": M1, "10M": M10, "60M": M60, "700M": M700, "3B": B3}


def default_sizes() -> tuple[str, ...]:
    """Returns the sizes that the device is asked to compute by default."""
    return ("1M", "10M", "60M") if device() == "cpu" else ("10M", "700M", "3B")


class Served(NamedTuple):
    """A server that is ready."""

    endpoint: Endpoint
    process: Process


def servers(arguments: argparse.Namespace, say: Callable[[str], None], **settings: str) -> list[Server]:
    """Returns our runner, mlx-lm's server where its packages are installed, and the peers, one request at a time.

    `settings` go to our runner by their names in its environment.
    """
    blas, threads = arguments.blas, arguments.blas_threads
    ours = this_runner(OURS, 1, blas=blas, blas_threads=threads)
    ours.environment.update(settings)
    peers = [other_runner(name, command, 1) for name, command in arguments.peer]
    return [ours, *known_mlx_lm(blas, threads, say), *peers]


def known_mlx_lm(blas: str, blas_threads: str, say: Callable[[str], None]) -> list[Server]:
    """Returns mlx-lm's server; nothing where its packages are missing."""
    if importlib.util.find_spec("transformers") is None:
        say(f"{MLX_LM} is left out: it needs transformers")
        return []
    return [mlx_lm_server(MLX_LM, blas, blas_threads)]


def serve(
    size: Size, seed: int, servers: Sequence[Server], stack: ExitStack, loop: asyncio.Runner
) -> dict[str, Served]:
    """Starts the servers with the same random Llama, until the stack ends. ValueError if one does not start."""
    directory = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
    write_model(directory, make_model(size, seed), size)
    served = {}
    for server in servers:
        process = server.start(directory, stack)
        served[server.name] = Served(open_endpoint(server, process, directory, stack, loop), process)
    return served


def open_endpoint(server: Server, process: Process, model: Path, stack: ExitStack, loop: asyncio.Runner) -> Endpoint:
    """Returns an endpoint of a server's process, for use in `loop`; it is closed with the stack."""

    async def opened() -> Endpoint:
        return server.endpoint(process, model)  # its client belongs to the loop that runs

    endpoint = loop.run(opened())
    stack.callback(lambda: loop.run(endpoint.close()))
    return endpoint
