"""A miniature run of each benchmark has the figures that it names; and the command line that all of them share."""

import json
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench import decode, embeddings, families, family_models, parallel, start, ttft
from scripts.tools.bench.llamas import Size
from scripts.tools.bench.machine import BLAS, Others
from scripts.tools.bench.servers import BARE, OLLAMA, OURS, SIZES, Server, servers, this_runner
from scripts.tools.conformance.this_runner import RUNNER

Found = Mapping[str, Any]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a busy machine be: miniature benchmarks measure nothing worth knowing."""
    for name in BLAS:
        monkeypatch.setenv(name, "auto")  # a benchmark sets them
    monkeypatch.setattr(bench, "check_quiet", lambda: None)
    monkeypatch.setattr(Others, "check", lambda _: None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Found]:
    """Runs a benchmark of tiny models and prompts, without other servers. Returns its JSON."""

    def ours_alone(arguments: Namespace, *_: object) -> list[Server]:
        return [this_runner(OURS, 1)]

    tiny, folder = Size(64, 1), tmp_path / "made"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    for module in (start, decode, ttft, parallel):
        monkeypatch.setattr(module, "servers", ours_alone)
    for module, name, value in (
        (decode, "TOKENS", {"1M": 20, "10M-packed": 20}),
        (ttft, "COLD_TOKENS", 60),
        (ttft, "PREFIX_TOKENS", 50),
        (ttft, "OWN_TOKENS", 20),
        (ttft, "APPENDED_TOKENS", 8),
        (parallel, "STREAMS", (1, 2)),
        (parallel, "STREAM_TOKENS", 6),
        (parallel, "LENGTHS", (100,)),
        (parallel, "PREFIX_TOKENS", 60),
        (parallel, "PATIENCE_S", 0.5),
        (families, "PROMPT_TOKENS", 40),
        (families, "LONG_TOKENS", 60),
        (families, "STREAM_TOKENS", 4),
    ):
        monkeypatch.setattr(module, name, value)
    for size in ("1M", "10M"):
        monkeypatch.setitem(SIZES, size, tiny)
    monkeypatch.setitem(SIZES, "10M-packed", Size(192, 1, bits=4))
    for field, few in {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3}.items():
        monkeypatch.setitem(family_models.SHARED, field, few)

    def run(*words: str) -> Found:
        file = tmp_path / "found.json"
        assert bench.main([*words, f"--json={file}"]) in (bench.MET, bench.MISSED)
        assert [*folder.iterdir()] == []
        return cast("Found", json.loads(file.read_text()))

    return run


def test_start(measured: Callable[..., Found]) -> None:
    found = measured("start", "--size=1M", "--turns=1")
    (turn,) = found["started"]["1M"][OURS]
    assert 0 < turn["ready_s"] < turn["token_s"]


def test_decode(measured: Callable[..., Found]) -> None:
    found = measured("decode", "--size=1M", "--turns=1")
    model = found["models"]["1M"]
    assert {OURS, BARE} <= {*model["tokens_per_s"]}
    assert all(len(speeds) == 1 and speeds[0] > 0 for speeds in model["tokens_per_s"].values())
    assert model["of_bare"][BARE] == 1.0


def test_ollamas_own_runner_gets_the_model_in_a_store(
    measured: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "servers", servers)
    found = measured("decode", "--size=10M-packed", "--turns=1", f"--ollama={shlex.join(RUNNER)}")
    assert {*found["models"]["10M-packed"]["tokens_per_s"]} >= {OURS, OLLAMA}


def test_ttft(measured: Callable[..., Found]) -> None:
    found = measured("ttft", "--size=1M", "--turns=1")["ms"]
    assert {*found} == {OURS, BARE}
    assert all(took > 0 for (turn,) in found.values() for took in turn["ms"].values())
    # Everything but what is new, and the last token of the answer, which was drawn but not seen, comes from the cache.
    assert found[OURS][0]["computed"] == [60, 1, 9, 9, 9, 9, 9]


def test_parallel(measured: Callable[..., Found]) -> None:
    found = measured("parallel", "--turns=1")["contenders"]
    speeds = {"1 streams", "2 streams"}
    assert {name: {*turn} for name, (turn,) in found.items()} == {
        **dict.fromkeys((OURS, parallel.IN_TURN), speeds | {"gap 100", "newcomer 100", "drop 100", parallel.SHARED}),
        BARE: speeds,
    }


def test_a_contender_that_does_not_start_is_named_by_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    peer = "--peer=other=sh -c 'echo Error: no such luck >&2; exit 3'"
    with pytest.raises(SystemExit, match="2"):
        bench.main(["ttft", peer])
    assert "other did not start: mlx runner failed: Error: no such luck" in capsys.readouterr().err


def test_embeddings(measured: Callable[..., Found], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "TEXTS", 3)
    found = measured("embeddings", "--busy", "--turns=2", "--size=small")
    both = found["texts_per_s"]["small"]
    assert [len(both[way]) for way in (embeddings.AT_ONCE, embeddings.IN_TURN)] == [2, 2]
    assert [target["what"] for target in found["targets"]] == ["small, texts/s at once over in turn"]


def test_families(measured: Callable[..., Found]) -> None:
    found = measured("families", "--turns=1", "--only=qwen3")
    assert {*found["ms"]} == {"llama", "qwen3"}
    assert all(ms > 0 for (turn,) in found["ms"].values() for ms in turn.values())
    llama, qwen = (found["parameters"][family] for family in ("llama", "qwen3"))
    assert qwen["active"] == qwen["total"] == llama["total"] + 2 * 64, "the norms of queries and keys"


def test_trace(measured: Callable[..., Found], tmp_path: Path) -> None:
    words = ("trace", "--kind=hyb", "--percent=50", "--scale=0.005")
    generated = measured(*words, "--only=retries", f"--write={tmp_path}", "--block-size=8")
    read = measured(*words, f"--file={tmp_path / 'retries.jsonl'}", "--block-size=8")
    (row,), (other,) = generated["rows"], read["rows"]
    assert (row["trace"], row["requests"]) == (other["trace"], other["requests"])
    assert row["least"] <= other["least"] < row["least"] + 8 * row["requests"]
    assert len(generated["targets"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kv", "w1024", "hyb"])
def test_a_real_runner_finds_as_much_as_the_simulation(measured: Callable[..., Found], kind: str) -> None:
    found = measured(
        "trace", "--engine=runner", "--compare", "--only=chats", "--scale=0.02", f"--kind={kind}", "--percent=25"
    )
    assert [target["value"] for target in found["targets"]] == [1.0]


@pytest.mark.full
def test_several_sessions_ask_a_real_runner_at_once(measured: Callable[..., Found]) -> None:
    found = measured("trace", "--engine=runner", "--parallel=4", "--only=chats", "--scale=0.002", "--kind=kv")
    (replayed,) = found["traces"]
    assert len(replayed["requests"]) == 80
    assert sorted(answer["turn"] for answer in replayed["answers"][:80]) == sorted([*range(1, 21)] * 4)
    assert [answer["cached"] for answer in replayed["answers"][80:]] == [0] * 8, "nobody has seen the cold ones"
    assert replayed["held_bytes"] > 0 < replayed["held_tokens"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["parallel", "--turns=0"], "there is at least one turn"),
        (["decode", "--peer=other="], "NAME=COMMAND is wanted"),
        (["decode", "--peer=other='"], "No closing quotation"),
        (["trace", "--compare"], "--compare is for --engine runner"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_words_that_cannot_be_run_are_refused_in_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(words)
    assert complaint in capsys.readouterr().err.splitlines()[-1]
