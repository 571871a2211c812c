"""The benchmark of one stream: its arithmetic, what it reads from a trace, and a miniature run."""

import json
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench import decode
from scripts.tools.bench.common import exits
from scripts.tools.bench.common.contenders import BARE, BARE_ONE_CORE, MLX_LM, OURS, SIZES
from scripts.tools.bench.decode import Decoded, DecodeReport
from scripts.tools.bench.decode_profile import PARTS, Profile, read
from scripts.tools.bench.llamas import Size

SPEEDS = {OURS: [90.0, 190.0, 300.0], MLX_LM: [60.0, 100.0, 250.0], BARE: [100.0, 200.0, 300.0]}


def test_ratios_are_taken_turn_by_turn() -> None:
    model = Decoded("10M", SPEEDS, read(trace(20)))
    assert model.ratio(OURS, BARE) == pytest.approx(0.95)
    report = DecodeReport(3, [model])
    loop, server = report.targets
    assert (loop.what, loop.met) == ("10M, ours over the bare loop", True)
    assert (server.what, server.met) == ("10M, ours over mlx_lm.server", True)
    assert [loop.value, server.value] == pytest.approx([0.95, 1.5])
    assert "190.0" in report.table()
    assert "0.950" in report.table()


def test_the_faster_of_two_loops_counts() -> None:
    model = Decoded("60M", SPEEDS | {BARE_ONE_CORE: [180.0, 200.0, 300.0]}, read(trace(20)))
    assert model.of_bare == pytest.approx(0.95)
    faster = Decoded("60M", SPEEDS | {BARE_ONE_CORE: [180.0, 400.0, 600.0]}, read(trace(20)))
    assert faster.of_bare == pytest.approx(0.5)
    assert not DecodeReport(3, [faster]).targets[0].met


def test_sizes_without_an_aim_have_no_target_against_the_loop() -> None:
    report = DecodeReport(3, [Decoded("3B", SPEEDS, read(trace(20)))])
    assert [target.what for target in report.targets] == ["3B, ours over mlx_lm.server"]


def trace(steps: int) -> str:
    """As the engine writes it: a prefill, then steps of 100 us, 120 apart, that wait for 60 and hand over for 30."""
    events: list[dict[str, object]] = [{"name": "prefill", "ts": 0.0, "dur": 50.0}]
    for step in range(steps):
        at = 1000.0 + 120.0 * step
        events += [
            {"name": "forward", "ts": at, "dur": 10.0},
            {"name": "wait", "ts": at + 10.0, "dur": 40.0},
            {"name": "wait", "ts": at + 50.0, "dur": 20.0},
            {"name": "hand over", "ts": at + 70.0, "dur": 30.0},
            {"name": "decode", "ts": at, "dur": 100.0},
        ]
    return "[\n" + "".join(json.dumps(event) + ",\n" for event in events) + '{"name": "cut o'


def test_a_trace_says_where_a_step_went() -> None:
    profile = read(trace(20))
    assert profile.steps == 11
    assert profile.step_us == pytest.approx(120.0)
    assert profile.parts_us == pytest.approx(
        dict.fromkeys(PARTS, 0.0) | {"forward": 10.0, "wait": 60.0, "hand over": 30.0, "between": 20.0}
    )
    assert "50.0" in "\n".join(profile.table("ours").lines())


def test_a_trace_of_too_few_steps_says_nothing() -> None:
    with pytest.raises(ValueError, match="too few decode steps"):
        read(trace(9))


def test_a_miniature_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decode, "TOKENS", {"1M": 20})
    monkeypatch.setitem(SIZES, "1M", Size(64, 1))
    file = tmp_path / "found.json"
    words = ["decode", "--size=1M", "--turns=1", f"--json={file}", f"--profile={tmp_path / 'traces'}"]
    assert bench.main(words) in exits.MEASURED
    (model,) = json.loads(file.read_text())["models"].values()
    assert {OURS, BARE} <= set(model["tokens_per_s"])
    assert all(len(speeds) == 1 and speeds[0] > 0 for speeds in model["tokens_per_s"].values())
    assert model["of_bare"][BARE] == 1.0
    assert Profile(**model["profile"]).step_us > 0
    assert (tmp_path / "traces" / "decode-1M.json").read_text().startswith("[\n")


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    file = tmp_path / "found.png"
    DecodeReport(3, [Decoded("1M", SPEEDS, read(trace(20))), Decoded("10M", SPEEDS, read(trace(20)))]).plot(file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_at_least_one_turn_is_wanted() -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["decode", "--turns=0"])
