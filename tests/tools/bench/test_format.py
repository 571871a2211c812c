"""The benchmark of structured output: its arithmetic, and a miniature run."""

import json
from itertools import count
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.common import exits
from scripts.tools.bench.format import benchmark, compiling, models
from scripts.tools.bench.format.answers import FREE, GRAMMARS, JUMPS, NO_JUMPS, RECORD, Answered, Answers
from scripts.tools.bench.format.compiling import SCHEMAS, Compiled
from scripts.tools.bench.format.masks import PLACES, Masked, measure_masks
from scripts.tools.bench.format.report import AIMED_VOCABULARY, MOST_PERCENT, FormatReport
from scripts.tools.bench.llamas import Size
from tests.unit.grammar.walks import accepts

VOCABULARY = 400


def answers(vocabulary: int) -> Answers:
    return Answers(
        vocabulary,
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


def report(*vocabularies: int) -> FormatReport:
    return FormatReport(
        3,
        {vocabulary: [2000.0, 4000.0, 9000.0] for vocabulary in vocabularies},
        [
            Masked(
                vocabulary,
                {key: [30.0, 10.0, 50.0] for key in PLACES},
                {1: [70.0, 50.0, 60.0], 8: [200.0, 300.0, 100.0]},
            )
            for vocabulary in vocabularies
        ],
        [Compiled(vocabulary, [500.0, 400.0, 900.0], {"small": [1.0, 2.0, 9.0]}) for vocabulary in vocabularies],
        [answers(vocabulary) for vocabulary in vocabularies],
    )


def test_targets_are_those_of_one_vocabulary_turn_by_turn() -> None:
    assert report(4096).targets == []
    cheap, dear = report(4096, AIMED_VOCABULARY).targets
    assert [cheap.value, dear.value] == pytest.approx([10.0, 100.0])
    assert (cheap.bound, cheap.met, dear.met) == (MOST_PERCENT, True, False)


def test_the_table_holds_medians_and_shares_of_a_step() -> None:
    lines = report(4096).table().splitlines()
    assert all(len(line) <= 132 for line in lines)
    rows = [line.split() for line in lines]
    assert ["4,096", "in", "a", "string", "30", "60", "4000", "2.2"] in rows
    assert ["4,096", "60", "200"] in rows
    assert ["4,096", "dear", "80.0", "100.0"] in rows
    assert ["4,096", *JUMPS.split(), "300", "600.0", "6.00"] in rows
    assert ["4,096", "view", "of", "the", "vocabulary,", "once", "500.0", "900.0"] in rows
    assert ["4,096", "small", "2.0", "9.0"] in rows


def test_a_miniature_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, "SIZE", Size(64, 1))
    monkeypatch.setattr(compiling, "SCHEMAS", {"small": {"type": "object"}})
    monkeypatch.setattr(benchmark, "ROWS", (1, 2))
    file = tmp_path / "found.json"
    words = [f"--vocabularies={VOCABULARY}", f"--answers={VOCABULARY}", "--turns=1", "--tokens=6"]
    assert bench.main(["format", *words, f"--json={file}"]) == exits.MET
    found = json.loads(file.read_text())
    assert found["targets"] == [], "they are for another vocabulary"
    (masks,), (compiled,), (told,) = found["masks"], found["compiling"], found["answers"]
    assert {name: len(turns) for name, turns in masks["host_us"].items()} == dict.fromkeys(PLACES, 1)
    assert list(masks["device_us"]) == ["1", "2"]
    assert list(compiled["compile_ms"]) == ["small"]
    assert {name: turns[0]["tokens"] for name, turns in told["grammars"].items()} == dict.fromkeys(GRAMMARS, 6)
    jumped, drawn = (told["jumps"][name][0]["tokens"] for name in (JUMPS, NO_JUMPS))
    assert jumped == drawn > 100


def test_masks_are_measured_in_every_place() -> None:
    found = measure_masks(models.tokenizer_of(VOCABULARY, 1), 2, (1,), 1)
    assert found.vocabulary == VOCABULARY
    assert {place: len(turns) for place, turns in found.host.items()} == dict.fromkeys(PLACES, 2)
    assert all(min(turns) > 0 for turns in found.host.values())


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


def test_large_schemas_are_among_those_that_are_compiled() -> None:
    sizes = [len(properties) for each in SCHEMAS.values() if isinstance(properties := each.get("properties"), dict)]
    assert {5, 50, 500} <= set(sizes)


@pytest.mark.parametrize("word", ["--turns=0", "--tokens=0", "--vocabularies=x", "--vocabularies=100"])
def test_what_makes_no_sense_is_refused(word: str) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["format", word])
    assert ended.value.code == exits.USAGE


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    report(4096, AIMED_VOCABULARY).plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
