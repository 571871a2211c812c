"""The benchmark of structured output: its arithmetic, and a miniature run."""

import json
from itertools import count
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.common import exits
from scripts.tools.bench.format import benchmark, compiling, models
from scripts.tools.bench.format.answers import FREE, GRAMMARS, JUMPS, NO_JUMPS, RECORD, Answered, Answers
from scripts.tools.bench.format.benchmark import AIMED_VOCABULARY, MOST_PERCENT, FormatReport
from scripts.tools.bench.format.compiling import VIEW
from scripts.tools.bench.llamas import Size
from tests.unit.grammar.walks import accepts

VOCABULARY = 400


REPORT = FormatReport(
    3,
    {
        vocabulary: Answers(
            {
                FREE: [Answered(100, speed, speed) for speed in (100.0, 200.0, 110.0)],
                "cheap": [Answered(100, speed, speed) for speed in (100.0, 100.0, 100.0)],
                "dear": [Answered(100, speed, speed) for speed in (80.0, 100.0, 55.0)],
            },
            {
                JUMPS: [Answered(300, 900.0, speed) for speed in (400.0, 600.0, 800.0)],
                NO_JUMPS: [Answered(300, 100.0, speed) for speed in (100.0, 100.0, 100.0)],
            },
        )
        for vocabulary in (4096, AIMED_VOCABULARY)
    },
    {4096: {VIEW: [500.0, 400.0, 900.0], "small": [1.0, 2.0, 9.0]}},
)


def test_targets_are_those_of_one_vocabulary_turn_by_turn() -> None:
    cheap, dear = REPORT.targets
    assert [cheap.value, dear.value] == pytest.approx([10.0, 100.0])
    assert (cheap.bound, cheap.met, dear.met) == (MOST_PERCENT, True, False)


def test_the_tables_hold_medians_of_turns() -> None:
    rows = [line.split() for line in REPORT.table().splitlines()]
    assert ["4,096", "dear", "80.0", "100.0"] in rows
    assert ["4,096", *JUMPS.split(), "300", "600.0", "6.00"] in rows
    assert ["4,096", *VIEW.split(), "500.0", "900.0"] in rows
    assert ["4,096", "small", "2.0", "9.0"] in rows


def test_a_miniature_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, "SIZE", Size(64, 1))
    monkeypatch.setattr(compiling, "SCHEMAS", {"small": {"type": "object"}})
    file = tmp_path / "found.json"
    words = [f"--vocabularies={VOCABULARY}", "--turns=1", "--tokens=6"]
    assert bench.main(["format", *words, f"--json={file}"]) == exits.MET
    found = json.loads(file.read_text())
    assert found["targets"] == [], "they are for another vocabulary"
    assert {name: len(turns) for name, turns in found["compile_ms"]["400"].items()} == {VIEW: 1, "small": 1}
    told = found["answers"]["400"]
    assert {name: turns[0]["tokens"] for name, turns in told["grammars"].items()} == dict.fromkeys(GRAMMARS, 6)
    jumped, drawn = (told["jumps"][name][0]["tokens"] for name in (JUMPS, NO_JUMPS))
    assert jumped == drawn > 100


def test_a_vocabulary_is_as_large_as_wanted_and_the_same_for_a_seed() -> None:
    first, again, other = (models.words(VOCABULARY, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == len(first) == VOCABULARY - 1
    tokenizer = models.tokenizer_of(VOCABULARY, 1)
    assert tokenizer.vocab_size == VOCABULARY
    assert [tokenizer.token_bytes(token) for token in range(1, VOCABULARY - 1)] == first[1:]
    assert tokenizer.eos == {VOCABULARY - 1}
    with pytest.raises(ValueError, match="257"):
        models.words(257, 1)


def test_the_record_is_a_schema_with_answers() -> None:
    numbers = count(1000)
    properties = RECORD["properties"]
    assert isinstance(properties, dict)
    record = {name: each["enum"][0] if "enum" in each else next(numbers) for name, each in properties.items()}
    assert accepts(RECORD, json.dumps(record))
    assert not accepts(RECORD, "{}")


@pytest.mark.parametrize("word", ["--turns=0", "--tokens=0", "--vocabularies=x", "--vocabularies=100"])
def test_what_makes_no_sense_is_refused(word: str) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["format", word])
    assert ended.value.code == exits.USAGE


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    REPORT.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
