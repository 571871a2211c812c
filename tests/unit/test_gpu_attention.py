"""The attention of compiled steps on NVIDIA GPUs, compiled as C++ and run here, against MLX's own."""

from pathlib import Path

import mlx.core as mx
import pytest

from runner.cache.layers import attention
from tests.unit.test_gpu_scans import Kernels

# Columns, heads, heads of keys, widths of keys and values, sinks or not, and the type.
CASES = (
    (70, 4, 2, 40, 72, False, mx.float32),
    (96, 3, 3, 64, 64, True, mx.bfloat16),
    (2_050, 2, 1, 8, 8, True, mx.float32),
)


def test_the_kernel_attends_as_mlx_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(metal=False)
    monkeypatch.setattr(mx.fast, "cuda_kernel", kernels.make)
    attention._kernels.cache_clear()
    for _ in range(2):  # to collect the sources, and to compute
        for columns, heads, groups, width, out, has_sinks, dtype in CASES:
            mx.random.seed(columns)
            shapes = ((2, heads, 1, width), (3, groups, columns, width), (3, groups, columns, out), (heads,))
            q, k, v, sinks = (mx.random.normal(shape).astype(dtype) for shape in shapes)
            k, v = k[:2], v[:2]
            first, seen = mx.array([columns - 7, 3]), mx.array([columns - 20, 1])
            mask = (mx.arange(columns) - first[:, None]) % columns < seen[:, None]
            rest = {"sinks": sinks if has_sinks else None, "scale": 0.3}
            right = mx.fast.scaled_dot_product_attention(q, k, v, mask=mask[:, None, None], **rest)  # type: ignore[arg-type]
            found = attention.attend_columns(q, k, v, first, seen, **rest)  # type: ignore[arg-type]
            away = mx.abs(found.astype(mx.float32) - right.astype(mx.float32)).max()
            assert kernels._library is None or away < (2e-2 if dtype == mx.bfloat16 else 1e-5)
        if kernels._library is None:
            kernels.compile(tmp_path)
    attention._kernels.cache_clear()
