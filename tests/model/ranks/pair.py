"""Two processes on this machine that share models over MLX's ring."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import mlx.core as mx

from runner.model import open_model
from runner.model.weights.loading import load
from tests import ROOT
from tests.model.ranks.jobs import Job, Outcome, answer

RANKS = 2
_MOST_S = 60.0


class Pair:
    """A group of two processes. Each job is done by both at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports()]))
        environment = {**os.environ, "MLX_HOSTFILE": str(hosts), "PYTHONPATH": str(ROOT)}
        self._members = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.model.ranks.member"],
                env={**environment, "MLX_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def load(
        self,
        model: str | Path,
        models_dir: Path = Path("unused"),
        *,
        dtype: str = "keep",
        budget_bytes: int | None = None,
        more_bytes: int = 0,
        kv_bits: int | None = None,
    ) -> tuple[list[Outcome], list[mx.array]]:
        """Returns what each process says of its share, and the scores that each computes."""
        out = self._folder / "scores"
        job = Job(
            model=str(model),
            models_dir=str(models_dir),
            dtype=dtype,
            budget_bytes=budget_bytes,
            more_bytes=more_bytes,
            kv_bits=kv_bits,
            out=str(out),
        )
        for member in self._members:
            assert member.stdin
            member.stdin.write(json.dumps(job) + "\n")
            member.stdin.flush()
        outcomes = [self._answer(member) for member in self._members]
        files = [] if outcomes[0]["error"] else [f"{out}-{rank}.safetensors" for rank in range(RANKS)]
        return outcomes, [cast("dict[str, mx.array]", mx.load(file))["scores"] for file in files]

    def _answer(self, member: subprocess.Popen[str]) -> Outcome:
        assert member.stdout
        ready, _, _ = select.select([member.stdout], [], [], _MOST_S)
        line = member.stdout.readline() if ready else ""
        assert line, f"a process of the group {'ended' if ready else 'hangs'}: {member.poll()}"
        return cast("Outcome", json.loads(line))

    def end(self) -> None:
        for member in self._members:
            member.kill()
            member.communicate()


@contextlib.contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """A group for the time of the block."""
    members = Pair(folder)
    try:
        yield members
    finally:
        members.end()


def alone(model: str | Path, models_dir: Path = Path("unused"), dtype: str = "keep") -> mx.array:
    """The scores of the same model in this process, without a group."""
    loaded = load(open_model(str(model), models_dir), dtype)
    return answer(loaded, loaded.make_layers)[0]


def _free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(RANKS)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
