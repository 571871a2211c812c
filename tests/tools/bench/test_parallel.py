"""The benchmark of several users: its model, its clients on a stage, its arithmetic, and a miniature run of it all."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from aiohttp import web
from mlx_lm.models.cache import BatchKVCache
from pytest_aiohttp import AiohttpServer
from tokenizers import Tokenizer

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench import parallel as benchmark
from scripts.tools.bench.bare_loop import decode_bare
from scripts.tools.bench.llamas import VOCABULARY, Prompts, Size, make_model, write_model
from scripts.tools.bench.parallel import (
    BARE,
    OURS,
    SUFFIXES,
    Cell,
    Dropped,
    Figure,
    Gaps,
    Rate,
    Shared,
    decode,
    drop,
    gaps,
    report,
    share,
)
from scripts.tools.bench.servers import (
    FEW_TOKENS,
    Lines,
    MismeasuredError,
    ask,
    mlx_lm_server,
)
from scripts.tools.host.lib import StatusError

TINY = Size(hidden=64, layers=1)


# --- the model ---


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


def test_a_gap_counts_when_a_part_of_it_lies_within() -> None:
    lines = [0.0, 4.0, 5.0, 6.0, 7.0, 10.0, 16.0]
    assert Gaps.of(lines, 3.9, 7.1, 1.0) == Gaps(4.0, 1.0, 1.0)
    assert Gaps.of(lines, 4.0, 7.0, None) == Gaps(1.0, 1.0, None)
    assert Gaps.of(lines, 5.0, 10.5, None) == Gaps(6.0, 2.0, None)


def test_the_bound_of_sharing_is_one_cold_prompt_and_the_others_suffixes() -> None:
    assert Shared(cold_s=0.5, warm_s=0.3, together_s=1.0).ratio == 1.25
    assert (len(SUFFIXES), SUFFIXES[0], SUFFIXES[-1]) == (8, 16, 32)
    assert list(SUFFIXES) == sorted(set(SUFFIXES))


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
    monkeypatch.setattr(benchmark, "PATIENCE_S", 0.05)
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
    endpoint = mlx_lm_server("peer", "off", "1").endpoint(process, Path("model"))
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


# --- the report ---


def figures(speeds: Sequence[float], gap_s: float, after_s: float, together_s: float) -> dict[Cell, Sequence[Figure]]:
    return {
        **{("decode", number): [Rate(speed, True)] * 2 for number, speed in zip((1, 8), speeds, strict=True)},
        ("gap", 500): [Gaps(gap_s / 2, 0.01, 1.5), Gaps(gap_s, 0.01, None)],
        ("drop", 500): [Dropped(0.5, 0.03, after_s)] * 2,
        ("shared", 500): [Shared(0.5, 0.3, together_s)] * 2,
    }


REPORT = report(
    2,
    {
        OURS: figures((100, 250), 0.3, 0.149, 1.04),
        BARE: {("decode", 1): [Rate(1, True)], ("decode", 8): [Rate(8, False)]},
    },
)


def test_the_tables_have_a_line_for_each_figure() -> None:
    lines = REPORT.table().splitlines()
    assert [line.split() for line in lines if line.startswith("ours ")] == [
        ["ours", "1", "100.0"],
        ["ours", "8", "250.0"],
        ["ours", "500", "225", "300", "10", "1,500"],
        ["ours", "500", "500", "30", "149", "149"],
        ["ours", "500", "500", "300", "1,040", "1.30", "1.30"],
    ]
    assert [line.split() for line in lines if line.startswith(BARE)] == [[BARE, "1", "1.0"], [BARE, "8", "8.0*"]]
    assert max(map(len, lines)) <= 132


def test_targets_are_met_at_their_bounds() -> None:
    assert [target.met for target in REPORT.targets] == [True] * 4
    missed = report(2, {OURS: figures((100, 249), 0.301, 0.151, 1.05)})
    assert [target.met for target in missed.targets] == [False] * 4
    assert report(2, {OURS: {("decode", 2): [Rate(1, True)]}}).targets == []


# --- the command ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--contenders=ours,vllm"], "'vllm' is none of ours, in-turn, mlx_lm.server, bare-loop"),
        (["--measure=speed"], "'speed' is none of decode, gap, drop, shared"),
        (["--streams=1,many"], "'1,many' is no list of whole numbers"),
        (["--peer=ours=true"], "the name is taken"),
        (["--turns=0"], "turns, streams and lengths are at least 1"),
        (["--parallel=0"], "turns, streams and lengths are at least 1"),
        (["--streams=0"], "turns, streams and lengths are at least 1"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["parallel", *arguments])
    assert complaint in capsys.readouterr().err.splitlines()[-1]
