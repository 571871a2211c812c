"""The attention of compiled steps on NVIDIA GPUs, compiled as C++ and run here (tests/lib/gpu.h), beside MLX's."""

from pathlib import Path

import mlx.core as mx
import pytest

from runner.cache.layers import attention
from tests.lib.gpu import Kernels


@pytest.mark.full
def test_the_kernels_attend_as_mlx_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(metal=False)
    monkeypatch.setattr(mx.fast, "cuda_kernel", kernels.make)
    monkeypatch.setattr(attention, "_WARPS", 3)
    monkeypatch.setattr(attention, "_ALONE", 40)
    monkeypatch.setattr(attention, "_SHARE", 20)
    attention._kernels.cache_clear()
    cases = (40, 2, 2, 40, 72), (70, 4, 2, 64, 32)
    for case in cases:
        distance(*case)
    kernels.compile(tmp_path)
    assert all(distance(*case) < 1e-5 for case in cases)
    attention._kernels.cache_clear()


def distance(columns: int, heads: int, groups: int, width: int, out: int) -> float:
    mx.random.seed(columns)
    shapes = ((2, heads, 1, width), (3, groups, columns, width), (3, groups, columns, out))
    q, k, v = map(mx.random.normal, shapes)
    first, seen = mx.array([columns - 7, 3]), mx.array([columns - 20, 2])
    mask = (mx.arange(columns) - first[:, None]) % columns < seen[:, None]
    right = mx.fast.scaled_dot_product_attention(q, k[:2], v[:2], scale=0.3, mask=mask[:, None, None])
    found = attention.attend_columns(q, k[:2], v[:2], first, seen, 0.3)
    return float(mx.abs(found - right).max())
