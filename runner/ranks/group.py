"""Joins the ranks in a group of `mx.distributed`, which reads its settings from the environment."""

import json
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx

from runner.device import on_cuda
from runner.errors import RunnerError
from runner.ranks.join_watchdog import join_watchdog

JOIN_S = 30.0
_SMALL_BYTES, _LARGE_BYTES = 16 << 10, 8 << 20
_SMALL_ROUNDS = 5


class Speed(NamedTuple):
    """The speed of the slowest connection between ranks."""

    latency_us: int
    """The time of an `all_sum` over 16 KB."""
    gbit_s: float
    """The speed of an `all_sum` over 8 MB: the bits that a rank sends, by its time."""


def backend() -> str:
    """Returns the backend of `mx.distributed` for this device."""
    return "nccl" if on_cuda() else "ring"


def free_address(host: str) -> str:
    """Returns HOST:PORT with a port that is free now. If another process binds it first, joining the group fails."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def join(rank: int, addresses: Sequence[str], backend: str, peers: Mapping[int, str]) -> mx.distributed.Group:
    """Returns the group of all ranks, which lasts as long as the process. `peers` are names by descriptors of
    connections. If joining takes too long or a peer is gone, the process is killed. Raises RunnerError if joining
    fails."""
    os.environ |= {"MLX_RANK": str(rank), "MLX_WORLD_SIZE": str(len(addresses))}
    if backend == "nccl":
        host, _, port = addresses[0].rpartition(":")
        os.environ |= {"NCCL_HOST_IP": host, "NCCL_PORT": port}
    try:
        with tempfile.TemporaryFile("w+") as file:  # without a name: a killed process leaves no file
            json.dump([[address] for address in addresses], file)
            file.seek(0)
            os.environ["MLX_HOSTFILE"] = f"/dev/fd/{file.fileno()}"
            with join_watchdog(JOIN_S, peers, reports=rank == 0):
                group = mx.distributed.init(strict=True, backend=backend)
    except (OSError, RuntimeError, ValueError) as error:  # a full disk, for example
        raise RunnerError(f"the ranks cannot be joined by {backend}: {error}") from error
    if (group.rank(), group.size()) != (rank, len(addresses)):
        raise RunnerError(f"{backend} joined rank {group.rank()} of {group.size()}, not {rank} of {len(addresses)}")
    return group


def measure(group: mx.distributed.Group) -> Speed:
    """Measures the connections between ranks. All ranks must call this at the same time."""
    small, large = mx.zeros((_SMALL_BYTES // 4,)), mx.zeros((_LARGE_BYTES // 4,))
    mx.eval(small, large, mx.distributed.all_sum(small, group=group))
    latencies = []
    for _ in range(_SMALL_ROUNDS):
        started = perf_counter()
        mx.eval(mx.distributed.all_sum(small, group=group))
        latencies.append(perf_counter() - started)
    started = perf_counter()
    mx.eval(mx.distributed.all_sum(large, group=group))
    seconds = perf_counter() - started
    sent = 2 * (group.size() - 1) / group.size() * _LARGE_BYTES
    return Speed(round(min(latencies) * 1e6), round(sent * 8 / seconds / 1e9, 2))


def agreement(token: mx.array, group: mx.distributed.Group) -> mx.array:
    """Returns, on every rank, the tokens uint32 [B] that rank 0 drew. Lazy. `token` holds the tokens that this rank
    drew; to the sum of all ranks, followers add zeros."""
    own = token if group.rank() == 0 else token * 0
    return mx.distributed.all_sum(own, group=group)
