"""The benchmark of the first token: its arithmetic, and a miniature run."""

import json
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench import ttft
from scripts.tools.bench.common import exits
from scripts.tools.bench.common.contenders import BARE, MLX_LM, OURS, SIZES
from scripts.tools.bench.llamas import Size
from scripts.tools.bench.ttft import CASES, Times, TtftReport


def times(cold: float, reused: float) -> Times:
    return Times({"cold": cold, "again": reused, "append": reused, "switch": reused}, [2000, 1])


def report() -> TtftReport:
    found = {
        OURS: [times(1010.0, 15.0), times(2060.0, 17.0), times(3120.0, 19.0)],
        MLX_LM: [times(2000.0, 40.0)] * 3,
        BARE: [times(1000.0, 8.0), times(2000.0, 8.0), times(3000.0, 8.0)],
    }
    return TtftReport("10M", 3, found)


def test_the_cold_prompt_is_held_against_the_loop_and_the_others_against_what_they_must_compute() -> None:
    found = {target.what: target for target in report().targets}
    assert found["cold, ours over the bare loop"].value == pytest.approx(1.03)
    assert found["cold, ours over the bare loop"].met
    for case in CASES[1:]:
        assert (found[f"{case}, ours"].value, found[f"{case}, ours"].bound) == (17.0, 17.0)
    assert found["again, ours over mlx_lm.server"].value == pytest.approx(17.0 / 40.0)
    assert len(found) == 8
    assert "2000 1" in report().table()


def test_a_miniature_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, tokens in (("COLD_TOKENS", 60), ("PREFIX_TOKENS", 50), ("OWN_TOKENS", 20), ("APPENDED_TOKENS", 8)):
        monkeypatch.setattr(ttft, name, tokens)
    monkeypatch.setitem(SIZES, "1M", Size(64, 1))
    file = tmp_path / "found.json"
    assert bench.main(["ttft", "--size=1M", "--turns=1", f"--json={file}"]) in exits.MEASURED
    found = json.loads(file.read_text())["ms"]
    assert {OURS, BARE} <= set(found)
    for turns in found.values():
        assert set(turns[0]["ms"]) == set(CASES)
        assert all(took > 0 for took in turns[0]["ms"].values())
    # Everything but what is new, and the last token of the answer, which was drawn but not seen, comes from the cache.
    assert found[OURS][0]["computed"] == [60, 1, 9, 9, 9, 9, 9]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    file = tmp_path / "found.png"
    report().plot(file)
    assert file.read_bytes().startswith(b"\x89PNG")
