"""The checks for a lent device, on a CPU."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from runner.model.scans import functions
from runner.model.scans.kernel import Rule
from scripts.tools.device import checks, scans
from tests import ROOT
from tests.lib.kernels import in_front
from tests.lib.programs import python

pytestmark = pytest.mark.skipif(not in_front(), reason="the kernels are not in front of MLX")
Scan = Callable[..., tuple[mx.array, mx.array]]
CASE = scans.Case(Rule.DELTA, 5, 32, rows=4, texts=2, heads=2, keys=2)


def test_nothing_is_wrong_here() -> None:
    done = python("-m", "scripts.tools.device", "--tiny", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rwkv7: " in done.stdout
    assert "llama, " in done.stdout


def _rough(scan: Scan, *inputs: object) -> tuple[mx.array, mx.array]:
    y, state = scan(*inputs)
    return y * (1 + 1e-5), state


def _cut(scan: Scan, rule: Rule, arrays: list[mx.array], *rest: object) -> tuple[mx.array, mx.array]:
    y, state = scan(rule, arrays, *rest)
    return y, mx.where(arrays[2].shape[1] < CASE.tokens, state * (1 + 2e-7), state)


def _beside(scan: Scan, rule: Rule, arrays: list[mx.array], *rest: object) -> tuple[mx.array, mx.array]:
    y, state = scan(rule, arrays, *rest)
    return mx.where(len(y) < CASE.texts, y * (1 + 2e-7), y), state


@pytest.mark.parametrize("wrong", [_rough, _cut, _beside])
def test_a_wrong_scan_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., object]) -> None:
    assert checks.scan_row(CASE).good
    scan = vars(scans)["scan"]
    monkeypatch.setattr(scans, "scan", lambda *inputs: wrong(scan, *inputs))
    assert not checks.scan_row(CASE).good


def test_a_wrong_architecture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.good for row in checks.architecture_rows("mamba2")] == [True]
    with monkeypatch.context() as patch:
        patch.setattr(functions, "available", lambda *_, **__: False)
        ((name, found, good),) = checks.architecture_rows("mamba")
        assert (name, good) == ("mamba", False)
        assert "nodes" in found
    scan = vars(functions)["scan"]
    monkeypatch.setattr(
        functions, "scan", lambda rule, arrays, *rest: scan(rule, [arrays[0] * 1.1, *arrays[1:]], *rest)
    )
    assert [row.good for row in checks.architecture_rows("mamba2")] == [False]


def test_a_device_without_kernels_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available", lambda rule: rule is not Rule.WKV)
    *_, last = checks.rows(tiny=True)
    assert last == checks.Row("kernels", "none for WKV", good=False)
