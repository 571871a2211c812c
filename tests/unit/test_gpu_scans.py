"""The scans for GPUs, compiled as C++ and run here (tests/lib/gpu.h)."""

from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import pytest

from runner.model.scans import functions, gpu, kernel
from scripts.tools.device.scans import SMALL, Case, cuts_of, distance, in_parts, one_text
from tests.lib.gpu import Kernels

_Results = tuple[mx.array, mx.array]
Runs = dict[Case, tuple[_Results, _Results, list[_Results]]]


@pytest.fixture(scope="module", params=["cuda", "metal"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """For each case: the whole, the same in parts, and each text alone."""
    kernels = Kernels(metal=request.param == "metal")
    with pytest.MonkeyPatch.context() as patch:
        _forget()
        patch.setattr(kernel, "on_cpu", lambda: False)
        patch.setattr(gpu, "_MANY_ROWS", 1)
        patch.setattr(mx.metal, "is_available", lambda: request.param == "metal")
        patch.setattr(mx.fast, f"{request.param}_kernel", kernels.make)
        for case in SMALL:
            _run(case)
        kernels.compile(tmp_path_factory.mktemp("kernels"))
        found = {case: _run(case) for case in SMALL}
    _forget()
    return found


def _forget() -> None:
    gpu.prepared.cache_clear()
    gpu._kernel.cache_clear()


def _run(case: Case) -> tuple[_Results, _Results, list[_Results]]:
    parts = in_parts(case, cuts_of(case.tokens))
    return in_parts(case, [0, case.tokens]), parts, [one_text(case, text) for text in range(case.texts)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_scans_for_gpus_are_exact_whatever_the_cuts_and_rows(runs: Runs, case: Case) -> None:
    whole, parts, alone = runs[case]
    assert distance(case, whole) < 4
    assert all(mx.array_equal(*pair) for pair in zip(whole, parts, strict=True))
    for mine, texts in zip(whole, zip(*alone, strict=True), strict=True):
        assert mx.array_equal(mine, mx.concatenate([*texts]))


@pytest.mark.parametrize(("metal", "width", "theirs"), [(False, 64, False), (True, 64, True), (True, 48, False)])
def test_macs_use_mlx_lms_kernel_where_it_has_one(
    monkeypatch: pytest.MonkeyPatch, *, metal: bool, width: int, theirs: bool
) -> None:
    monkeypatch.setattr(kernel, "on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    ours, mlx_lms = (mx.array(0), mx.array(1)), (mx.array(2), mx.array(3))
    monkeypatch.setattr(functions, "scan", lambda *_: ours)
    q, v, gates = mx.zeros((1, 2, 1, width)), mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1))
    inputs = q, q, v, gates, gates, gates[0, 0], gates[0, 0]
    found = functions.gated_delta_update(lambda *_, **__: mlx_lms, *inputs)
    assert found[1] is (mlx_lms if theirs else ours)[1]


def test_each_source_that_mlx_writes_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX keeps one source for a name and a template: sources that take turns are compiled again and again."""
    monkeypatch.setattr(gpu, "_kernel", lambda *_: print)

    def template(heads: int, kind: mx.Dtype, *, metal: bool) -> object:
        monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
        gpu.prepared.cache_clear()
        shapes = (1, 1, 8), (1, 1, 8), (1, heads)
        kernel = gpu.prepared("LINEAR", ("x", "a", "state"), shapes, (kind, kind, mx.float32), mx.float32)
        return [word for word in kernel.keywords["template"] if word[0] != "Dv"]

    assert template(7, mx.float32, metal=True) != template(8, mx.float32, metal=True)
    assert template(7, mx.float32, metal=False) == template(8, mx.float32, metal=False)
    assert template(8, mx.float16, metal=False) != template(8, mx.float32, metal=False)
    gpu.prepared.cache_clear()


def test_mlx_lm_leaves_gated_delta_nets_to_us_on_nvidia() -> None:
    calls = [path.name for path in Path(*mlx_lm.models.__path__).glob("*.py") if "fast.gated_delta" in path.read_text()]
    assert not calls, (
        f"{calls} call MLX's own kernel for gated delta nets: see if `functions.gated_delta_update` still stands in "
        "its place, and what `scripts.tools.device --only hybrids` finds on NVIDIA, where MLX 0.32.4 has a loop"
    )
