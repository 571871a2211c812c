"""The benchmark of several users: its model, its clients on a stage, its arithmetic, and a miniature run of it all."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from aiohttp import web
from mlx_lm.models.cache import BatchKVCache
from pytest_aiohttp import AiohttpServer
from tokenizers import Tokenizer

from runner.cli.flags import FLAGS
from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.common import exits
from scripts.tools.bench.common.bare_loop import decode_bare
from scripts.tools.bench.common.requests import FEW_TOKENS, MismeasuredError, ask
from scripts.tools.bench.common.servers import Lines, Server, mlx_lm_server, other_runner, this_runner
from scripts.tools.bench.llamas import VOCABULARY, Prompts, Size, count_parameters, make_model, write_model
from scripts.tools.bench.parallel import clients
from scripts.tools.bench.parallel.benchmark import Options, measure
from scripts.tools.bench.parallel.clients import SUFFIXES, Dropped, Gaps, Rate, Shared, decode, drop, gaps, share
from scripts.tools.bench.parallel.contenders import Cell, Served, take_turns
from scripts.tools.bench.parallel.report import BARE, OURS, ParallelReport, Row, Shape
from scripts.tools.host.lib import Process, StatusError

TINY = Size(hidden=64, layers=1)


# --- the model ---


def test_the_model_has_the_size_of_the_benchmark_model() -> None:
    assert 10_500_000 < count_parameters(make_model(Size(), 1)) < 11_500_000


def test_the_same_seed_makes_the_same_weights() -> None:
    first, again, other = (make_model(TINY, seed).model.embed_tokens.weight for seed in (1, 1, 2))
    assert mx.array_equal(first, again)
    assert not mx.array_equal(first, other)


@pytest.mark.parametrize("size", [Size(hidden=0), Size(hidden=100), Size(layers=0)])
def test_a_model_that_cannot_be_is_refused(size: Size) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        make_model(size, 1)


def test_bytes_and_the_end_are_never_the_best_token() -> None:
    model = make_model(TINY, 1)
    logits = model(mx.array([Prompts(1).ids(64)]))[0]
    silent = [*range(256), VOCABULARY - 1]
    assert not mx.any(logits[:, mx.array(silent)]).item()
    assert mx.all(logits.max(axis=-1) > 0).item()


def test_a_prompt_of_n_tokens_is_n_tokens_and_never_the_same(tmp_path: Path) -> None:
    write_model(tmp_path, make_model(TINY, 1), TINY)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompts, same = Prompts(3), Prompts(3)
    text = prompts.text(2000)
    assert tokenizer.encode(text).ids == same.ids(2000)
    assert prompts.text(2000) != text
    assert [tokenizer.decode([token]) for token in (256, VOCABULARY - 2)] == [" a", " eqq"]


# --- the loop without a server ---


@pytest.mark.parametrize("rows", [1, 3])
def test_the_bare_loop_reads_prompts_alone_and_steps_all_rows_at_once(rows: int) -> None:
    model = make_model(TINY, 1)
    shapes, batched = [], []

    class Watched:
        layers = model.layers

        def __call__(self, tokens: mx.array, cache: list[object]) -> mx.array:
            shapes.append(tuple(tokens.shape))
            batched.append(isinstance(cache[0], BatchKVCache))
            logits: mx.array = model(tokens, cache)
            return logits

    prompts = Prompts(1)
    assert decode_bare(Watched(), [prompts.ids(6 + row) for row in range(rows)], 5) > 0  # type: ignore[arg-type]
    assert shapes == [*((1, 5 + row) for row in range(rows)), *[(rows, 1)] * 6]
    assert batched == [False] * rows + [rows > 1] * 6


# --- figures ---


def test_a_rate_counts_from_the_last_first_line_to_the_first_end() -> None:
    assert Rate.of([[1.0, 2.0, 3.0, 4.0]]) == Rate(1.0, True)
    assert Rate.of([[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 2.5, 3.0, 3.5, 4.0, 9.0]]) == Rate(7 / 3, True)


def test_streams_that_never_all_ran_count_as_a_whole() -> None:
    assert Rate.of([[1.0, 1.5, 2.0], [4.0, 4.5, 5.0]]) == Rate(5 / 4, False)
    assert Rate.of([[1.0, 1.5, 2.0], [2.0, 3.0]]) == Rate(4 / 2, False)


def test_a_gap_counts_when_a_part_of_it_lies_within() -> None:
    lines = [0.0, 4.0, 5.0, 6.0, 7.0, 10.0, 16.0]
    assert Gaps.of(lines, 3.9, 7.1, 1.0) == Gaps(4.0, 1.0, 1.0)
    assert Gaps.of(lines, 4.0, 7.0, None) == Gaps(1.0, 1.0, None)
    assert Gaps.of(lines, 5.0, 10.5, None) == Gaps(6.0, 2.0, None)


def test_the_bound_of_sharing_is_one_cold_prompt_and_the_others_suffixes() -> None:
    assert Shared(cold_s=0.5, warm_s=0.3, together_s=1.0).ratio == 1.25
    assert (len(SUFFIXES), SUFFIXES[0], SUFFIXES[-1]) == (8, 16, 32)
    assert list(SUFFIXES) == sorted(set(SUFFIXES))


def test_a_ratio_is_that_of_each_turn() -> None:
    row = Row(OURS, {1: [Rate(100, True), Rate(50, True)], 8: [Rate(200, True), Rate(200, True)]})
    assert row.ratios(1, 8) == [2.0, 4.0]


# --- what clients do ---


class Stage:
    """An endpoint without a server: who asked for what, and who was there when."""

    cached: int | None = None

    def __init__(self, *prefills_s: float, step_s: float = 0.001, most_lines: int = 1 << 30) -> None:
        self._prefills_s = [*prefills_s]
        self._step_s = step_s
        self._most_lines = most_lines
        self.prompts: list[list[str]] = []
        self.log: list[str] = []
        self.present = 0
        self.presence: list[int] = []

    @property
    def lengths(self) -> list[int]:
        return [len(words) for words in self.prompts]

    @asynccontextmanager
    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Lines]:
        number = len(self.prompts)
        prefill_s = self._prefills_s[number] if number < len(self._prefills_s) else 0.0
        self.prompts.append(prompt.split())
        self.log.append(f"{number} asks for {tokens}")
        self.present += 1
        self.presence.append(self.present)

        async def lines() -> Lines:
            await asyncio.sleep(prefill_s)
            self.log.append(f"{number} begins")
            for _ in range(min(tokens, self._most_lines)):
                await asyncio.sleep(self._step_s)
                yield " a"

        try:
            yield lines()
        finally:
            self.present -= 1
            self.log.append(f"{number} leaves")

    async def close(self) -> None:
        pass


async def test_an_answer_of_another_length_is_no_measurement() -> None:
    assert len(await ask(Stage(), "a b", 5)) == 5
    with pytest.raises(MismeasuredError, match="3 lines came for 5 tokens"):
        await ask(Stage(most_lines=3), "a b", 5)


async def test_decoding_streams_start_together_with_short_prompts_of_their_own() -> None:
    stage = Stage(0.0, 0.02)
    rate = await decode(stage, Prompts(1), 4, 50)
    assert rate.together
    assert stage.log[:4] == [f"{number} asks for 50" for number in range(4)]
    assert stage.lengths == [16] * 4
    assert len({words[0] for words in stage.prompts}) == 4


async def test_a_newcomer_comes_while_a_stream_runs_and_the_stream_outlasts_it() -> None:
    stage = Stage(0.0, 0.1)
    found = await gaps(stage, Prompts(1), 500)
    assert stage.lengths == [16, 500]
    assert stage.log == [
        "0 asks for 8192",
        "0 begins",
        f"1 asks for {FEW_TOKENS}",
        "1 begins",
        "1 leaves",
        "0 leaves",
    ]
    assert found.newcomer_s is not None
    assert found.newcomer_s > 0.1
    assert 0.001 <= found.median_s <= found.largest_s


async def test_a_newcomer_that_waits_too_long_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 0.05)
    stage = Stage(0.0, 60.0)
    found = await gaps(stage, Prompts(1), 500)
    assert found.newcomer_s is None
    assert found.largest_s > 0
    assert stage.log[-2:] == ["1 leaves", "0 leaves"]


@pytest.mark.parametrize("lines", [3, 20])
async def test_a_stream_that_ends_before_its_newcomer_is_no_measurement(lines: int) -> None:
    with pytest.raises(MismeasuredError, match="ended before its time"):
        await gaps(Stage(0.0, 0.2, most_lines=lines), Prompts(1), 500)


async def test_a_client_leaves_in_the_middle_of_a_prefill_and_a_short_prompt_comes_at_once() -> None:
    stage = Stage(0.6, 0.0, 60.0, 0.01)
    found = await drop(stage, Prompts(1), 500)
    assert stage.lengths == [500, 16, 500, 16]
    assert stage.log[-5:] == [
        f"2 asks for {FEW_TOKENS}",
        "2 leaves",
        f"3 asks for {FEW_TOKENS}",
        "3 begins",
        "3 leaves",
    ]
    assert (found.cold_s > 0.6, found.idle_s < found.cold_s, found.after_s > 0.01) == (True, True, True)


async def test_a_prefill_that_was_over_too_soon_is_tried_again_with_half_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits_s: list[float] = []
    timeout = asyncio.timeout

    def watched(delay_s: float) -> asyncio.Timeout:
        waits_s.append(delay_s)
        return timeout(delay_s)

    monkeypatch.setattr(asyncio, "timeout", watched)
    stage = Stage(0.2, 0.0, 0.0, 60.0, 0.0)
    found = await drop(stage, Prompts(1), 500)
    assert stage.lengths == [500, 16, 500, 500, 16]
    assert waits_s == [0.4 * found.cold_s, 0.2 * found.cold_s]
    assert len({stage.prompts[number][0] for number in (0, 2, 3)}) == 3
    assert "2 begins" in stage.log
    assert "3 begins" not in stage.log


async def test_prompts_with_one_prefix_come_alone_and_then_together_with_another_prefix() -> None:
    stage = Stage(0.1, *[0.01] * 7, *[0.05] * 8)
    found = await share(stage, Prompts(1), 100)
    alone, together = stage.prompts[:8], stage.prompts[8:]
    assert stage.lengths == [100 + suffix for suffix in SUFFIXES] * 2
    for prompts in (alone, together):
        assert len({tuple(words[:100]) for words in prompts}) == 1
        assert len({words[100] for words in prompts}) == 8
    assert alone[0][0] != together[0][0]
    assert stage.presence == [1] * 8 + [1, 2, 3, 4, 5, 6, 7, 8]
    assert found.cold_s > 0.1
    assert found.warm_s > 7 * 0.01
    assert found.together_s > 0.05


# --- protocols ---


async def test_the_protocol_of_openai(aiohttp_server: AiohttpServer) -> None:
    asked: list[object] = []
    left = asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        if "bad" in str(asked[-1]):
            raise web.HTTPNotFound(text="no such model")
        response = web.StreamResponse()
        await response.prepare(request)
        for text in (" one", "", " two"):
            await response.write(b": keepalive 1/2\n\n")
            await response.write(f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode())
        if "for ever" in str(asked[-1]):
            try:
                await asyncio.sleep(60)
            finally:
                left.set()
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    port = (await aiohttp_server(app)).port
    assert port is not None
    process = type("Listening", (), {"port": port})()
    endpoint = mlx_lm_server("peer", "off", 1).endpoint(process, Path("model"))
    try:
        assert len(await ask(endpoint, "a", 2)) == 2
        with pytest.raises(StatusError, match="no such model"):
            await ask(endpoint, "bad", 2)
        async with endpoint.stream("for ever", 8) as lines:
            await anext(lines)
        await asyncio.wait_for(left.wait(), 10)
    finally:
        await endpoint.close()
    assert asked[0] == {"model": "model", "prompt": "a", "max_tokens": 2, "temperature": 0.0, "stream": True}


def test_what_the_servers_are_told() -> None:
    assert this_runner("ours", 8, 50, blas="off", blas_threads=2).environment == {
        "MLX_RUNNER_PARALLEL": "8",
        "MLX_RUNNER_MAX_GAP_MS": "50",
        "MLX_RUNNER_BLAS": "off",
        "MLX_RUNNER_BLAS_THREADS": "2",
    }
    assert set(this_runner("ours", 8, 50, blas="off", blas_threads=2).environment) < {flag.variable for flag in FLAGS}
    assert other_runner("peer", ["run", "it"], 3) == Server("peer", ["run", "it"], {"OLLAMA_NUM_PARALLEL": "3"})
    assert mlx_lm_server("peer", "/a/blas.so", 2).command[-3:] == [
        "scripts.tools.bench.common.mlx_lm_server",
        "/a/blas.so",
        "2",
    ]


# --- turns ---


async def test_contenders_take_turns_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name = name

        async def measure(self, cell: Cell, prompts: Prompts, row: Row) -> None:
            order.append(f"{self.name}{cell[1]}")
            row.decode.setdefault(cell[1], []).append(Rate(len(order), True))

    rows = await take_turns([Counting("a"), Counting("b")], [("decode", 1), ("decode", 8)], 2, Prompts(1), print)
    assert order == ["a1", "b1", "a8", "b8", "b1", "a1", "b8", "a8", "a1", "b1", "a8", "b8"]
    assert [row.name for row in rows] == ["a", "b"]
    assert [[rate.tokens_per_s for rate in row.decode[8]] for row in rows] == [[8, 11], [7, 12]]


@pytest.mark.parametrize(
    ("cell", "lengths", "prefills_s"),
    [
        (("decode", 3), [16, 16, 16], []),
        (("gap", 40), [16, 40], []),
        (("drop", 40), [40, 16, 40, 16], [0.05, 0.0, 60.0, 0.0]),
        (("shared", 40), [40 + suffix for suffix in SUFFIXES] * 2, []),
    ],
)
async def test_a_server_ends_what_it_has_before_it_is_measured(
    cell: Cell, lengths: list[int], prefills_s: list[float]
) -> None:
    stage = Stage(0.0, *prefills_s)
    row = Row("ours")
    await Served("ours", stage, Shape(tokens=8)).measure(cell, Prompts(1), row)
    assert stage.log[:3] == ["0 asks for 1", "0 begins", "0 leaves"]
    assert stage.lengths == [16, *lengths]
    found = {"decode": [*row.decode], "gap": [*row.gap], "drop": [*row.drop], "shared": [cell[1]] * len(row.shared)}
    assert {what: numbers for what, numbers in found.items() if numbers} == {cell[0]: [cell[1]]}


# --- the report ---


def a_row(name: str, speeds: Sequence[float], gap_s: float, after_s: float, together_s: float) -> Row:
    return Row(
        name,
        {number: [Rate(speed, True)] * 2 for number, speed in zip((1, 2, 4, 8), speeds, strict=True)},
        {length: [Gaps(gap_s / 2, 0.01, 1.5), Gaps(gap_s, 0.01, 2.5)] for length in (500, 2000)},
        {length: [Dropped(0.5, 0.03, after_s)] * 2 for length in (500, 2000)},
        [Shared(0.5, 0.3, together_s)] * 2,
    )


def a_report(*rows: Row) -> ParallelReport:
    return ParallelReport(7, 2, 11_000_000, Shape(), rows)


def lines_of(report: ParallelReport, name: str) -> list[list[str]]:
    return [line.split() for line in report.table().splitlines() if line.startswith(f"{name} ")]


def test_a_table_has_a_line_for_each_figure_and_says_what_was_met() -> None:
    report = a_report(
        a_row("ours", (100, 150, 200, 250), 0.3, 0.149, 1.04), a_row("b", (100, 1, 2, 249), 0.301, 0.15, 1.05)
    )
    assert lines_of(report, "ours") == [
        ["ours", "100.0", "150.0", "200.0", "250.0", "2.50", "2.50", "2.50", "met"],
        ["ours", "500", "225", "300", "10", "2,000", "met"],
        ["ours", "2000", "225", "300", "10", "2,000", "met"],
        ["ours", "500", "500", "30", "149", "149", "met"],
        ["ours", "2000", "500", "30", "149", "149", "met"],
        ["ours", "500", "300", "800", "1,040", "1.30", "1.30", "1.30", "met"],
    ]
    assert [line[-1] for line in lines_of(report, "b")] == ["missed"] * 6
    assert max(map(len, report.table().splitlines())) <= 132


def test_a_gap_is_no_gap_well_kept_when_the_newcomer_had_to_give_up() -> None:
    row = a_row("ours", (1, 1, 1, 1), 0.1, 0.1, 1)
    row.gap[500][1] = Gaps(0.1, 0.01, None)
    row.gap[2000] = [Gaps(0.1, 0.01, None)] * 2
    assert [line[-2:] for line in lines_of(a_report(row), "ours")[1:3]] == [["1,500", "missed"], ["-", "missed"]]


def test_what_was_not_measured_is_not_shown() -> None:
    table = a_report(Row("bare", {number: [Rate(number, number < 8)] for number in (1, 2, 4, 8)})).table()
    assert "1.0         2.0         4.0        8.0*" in table
    assert "gap:" not in table
    assert "drop:" not in table
    assert "shared:" not in table


def test_other_numbers_of_streams_have_no_target() -> None:
    row = Row("ours", {2: [Rate(10, True)], 4: [Rate(50, True)]})
    report = ParallelReport(1, 1, 1, Shape(streams=(2, 4)), [row])
    assert "target at" not in report.table()
    assert lines_of(report, "ours") == [["ours", "10.0", "50.0", "5.00", "5.00", "5.00"]]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    file = tmp_path / "found.png"
    bare = Row(BARE, {number: [Rate(number, True)] for number in (1, 2, 4, 8)})
    a_report(bare).plot(file)
    a_report(a_row("ours", (1, 2, 3, 4), 0.3, 0.1, 1), bare).plot(file)
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", head[16:])) > 500


# --- the command ---


def test_a_miniature_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 0.5)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept: list[Process] = []
    start = Server.start

    def start_and_keep(server: Server, model: Path, stack: ExitStack) -> Process:
        kept.append(start(server, model, stack))
        return kept[-1]

    monkeypatch.setattr(Server, "start", start_and_keep)
    file = tmp_path / "found.json"
    sizes = ["--hidden=64", "--layers=1", "--streams=1,2", "--tokens=6", "--prompts=100", "--prefix=60"]
    assert (
        bench.main(["parallel", "--contenders=ours,bare-loop", "--turns=1", *sizes, f"--json={file}"]) in exits.MEASURED
    )
    data = json.loads(file.read_text())
    assert list(tmp_path.iterdir()) == [file]
    assert [process.exit_status is None for process in kept] == [False]
    assert set(data) == {
        *(
            "benchmark",
            "machine",
            "seed",
            "turns",
            "parameters",
            "streams",
            "tokens",
            "prompts",
            "prefix",
            "max_gap_ms",
        ),
        *("targets", "limits", "contenders"),
    }
    assert (data["streams"], data["tokens"], data["prompts"], data["prefix"]) == ([1, 2], 6, [100], 60)
    ours, bare = data["contenders"]["ours"], data["contenders"]["bare-loop"]
    assert set(ours["decode"]) == {"1", "2", "ratio"}
    assert set(ours["decode"]["2"]) == set(Rate._fields)
    assert set(ours["gap"]["100"]) == set(Gaps._fields)
    assert set(ours["drop"]["100"]) == set(Dropped._fields)
    assert set(ours["shared"]) == {*Shared._fields, "ratio"}
    assert {len(values) for values in (*ours["shared"].values(), *ours["drop"]["100"].values())} == {1}
    assert all(value > 0 for found in (ours["decode"]["1"], bare["decode"]["2"]) for value in found["tokens_per_s"])
    assert (bare["gap"], bare["drop"], bare["shared"]["ratio"]) == ({}, {}, [])
    table = capsys.readouterr().out
    assert "tokens/s of all streams, 6 tokens each" in table
    assert max(map(len, table.splitlines()[1:])) <= 132


def test_a_contender_that_does_not_start_ends_the_benchmark() -> None:
    options = Options(contenders=[], peers=[("other", ["false"])], size=TINY)
    with pytest.raises(ValueError, match="other did not start"):
        measure(options)


def test_a_server_without_its_packages_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    options = Options(contenders=["mlx_lm.server"], size=TINY, turns=1, measured=["decode"])
    assert measure(options, said.append).rows == []
    assert said[0] == "mlx_lm.server is left out: it needs transformers"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--contenders=ours,vllm"], "'vllm' is none of ours, in-turn, mlx_lm.server, bare-loop"),
        (["--measure=speed"], "'speed' is none of decode, gap, drop, shared"),
        (["--streams=1,many"], "'1,many' is no list of whole numbers"),
        (["--peer=other"], "NAME=COMMAND is wanted"),
        (["--peer=other="], "NAME=COMMAND is wanted"),
        (["--peer=other='"], "No closing quotation"),
        (["--peer=ours=true"], "the name is taken"),
        (["--turns=0"], "turns, streams and lengths are at least 1"),
        (["--parallel=0"], "turns, streams and lengths are at least 1"),
        (["--streams=0"], "turns, streams and lengths are at least 1"),
        (["--tokens=1"], "a stream has at least 2 tokens"),
        (["--hidden=100"], "the width of the model is a multiple of 64"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["parallel", *arguments])
    assert complaint in capsys.readouterr().err.splitlines()[-1]
