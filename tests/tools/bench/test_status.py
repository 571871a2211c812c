"""The arithmetic of `scripts/bench status` on figures made by hand, its polls, and a miniature run of it."""

import json
import socket
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.tools.bench import status
from scripts.tools.bench.llamas import Size
from scripts.tools.bench.polling import Waits, poll
from scripts.tools.bench.report import percentile
from scripts.tools.bench.servers import Server
from scripts.tools.bench.stage import MLX_LM, OURS
from scripts.tools.bench.status import IDLE, PHASES, PREFILL, StatusReport

MS = 0.001
REPORT = StatusReport(
    2,
    {
        IDLE: {OURS: [Waits([MS], [MS])] * 2, MLX_LM: [Waits([], [2 * MS])] * 2},
        PREFILL: {
            OURS: [Waits([MS] * 98, []), Waits([0.009], [0.099])],
            MLX_LM: [Waits([], [300 * MS])] * 2,
        },
        "decode 8": {OURS: [Waits([2 * MS], [11 * MS])] * 2, MLX_LM: [Waits([], [5 * MS])] * 2},
    },
)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 102), 99) == 100
    assert percentile([7.0], 1) == 7.0


def test_targets_hold_for_ours_at_work_over_connections_of_both_kinds() -> None:
    prefill, decode = REPORT.targets
    assert [prefill.value, decode.value] == pytest.approx([9.0, 11.0]), "the 99th of 100, and the worst"
    assert [prefill.met, decode.met] == [True, False]


def test_the_table_and_the_json_hold_all_of_it() -> None:
    lines = REPORT.table().splitlines()
    assert all(len(line) <= 132 for line in lines)
    assert [line.split() for line in lines if line.startswith("decode 8")] == [
        ["decode", "8,", OURS, "2.00", "2.00", "2.00", "11.00", "11.00", "11.00"],
        ["decode", "8,", MLX_LM, "-", "-", "-", "5.00", "5.00", "5.00"],
    ]
    data = json.loads(json.dumps(REPORT.data()))
    assert data["waits_s"][PREFILL][OURS][1] == {"kept": [0.009], "fresh": [0.099]}


def test_the_picture_has_a_place_for_every_server(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    REPORT.plot(tmp_path / "status.png")
    assert (tmp_path / "status.png").read_bytes().startswith(b"\x89PNG")


@contextmanager
def answering(answer: bytes, *, close: bool) -> Iterator[tuple[int, list[int]]]:
    """A server on that port, which gives this answer to everything; and how many requests each connection brought."""
    asked: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(client: socket.socket, number: int) -> None:
            with client:
                while client.recv(65536):
                    asked[number] += 1
                    client.sendall(answer[:20])
                    client.sendall(answer[20:])
                    if close:
                        return

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                asked.append(0)
                threading.Thread(target=serve, args=(client, len(asked) - 1), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], asked
        listener.shutdown(socket.SHUT_RDWR)


def test_a_connection_is_kept_where_the_server_keeps_it_and_every_other_poll_has_a_fresh_one() -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", close=False) as (port, asked):
        waits = poll(port, "/v1/status", 3, 0.001)
    assert (len(waits.kept), len(waits.fresh)) == (3, 3)
    assert min(*waits.kept, *waits.fresh) > 0
    assert sorted(asked) == [1, 1, 1, 1, 3]


def test_a_server_that_closes_is_asked_over_fresh_connections_only() -> None:
    with answering(b"HTTP/1.0 200 OK\r\n\r\n{}", close=True) as (port, _):
        waits = poll(port, "/health", 3, 0.001)
    assert (len(waits.kept), len(waits.fresh)) == (0, 3)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 20"])
def test_what_is_no_answer_is_no_measurement(answer: bytes) -> None:
    with answering(answer, close=True) as (port, _), pytest.raises(ConnectionError):
        poll(port, "/v1/status", 1, 0.001)


def only_ours(ours: Server, *_: object) -> list[Server]:
    return [ours]


def options(**changed: object) -> Namespace:
    usual = {"turns": 1, "polls": 2, "interval_ms": 1.0, "prompt": 50, "seed": 3}
    return Namespace(**{**usual, "blas": "auto", "blas_threads": 1, "peer": [], **changed})


def test_a_miniature_run_polls_in_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "servers", only_ours)
    said: list[str] = []
    report = status.run(options(), said.append, Size(64, 1))
    assert said == [f"{phase} ..." for phase in PHASES]
    for phase in PHASES:
        (waits,) = report.waits[phase][OURS]
        assert (len(waits.kept), len(waits.fresh)) == (2, 2)


def test_work_that_breaks_off_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than the model's context holds."""
    monkeypatch.setattr(status, "servers", only_ours)
    monkeypatch.setattr(status, "PHASES", (PREFILL,))
    with pytest.raises(Exception, match="exceeds the model's maximum context length"):
        status.run(options(prompt=20_000), print, Size(64, 1))


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"polls": 0}, {"prompt": 0}, {"interval_ms": 0.0}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        status.run(options(**wrong), print)
