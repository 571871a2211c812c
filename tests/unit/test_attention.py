"""Attention for NVIDIA GPUs equals MLX's own."""

import mlx.core as mx
import pytest

from runner import device
from runner.device import attention

OWN = mx.fast.scaled_dot_product_attention
KEYS = 11


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("mask", ["none", "causal", "hidden", "hidden by row", "added"])
@pytest.mark.parametrize("queries", [1, 2, 7, KEYS])
def test_equals_mlxs(queries: int, mask: str, sinks: bool, dtype: mx.Dtype) -> None:
    mx.random.seed(queries)
    q = mx.random.normal((3, 6, queries, 8)).astype(dtype)
    k, v = (mx.random.normal((3, 2, 16, width)).astype(dtype)[:, :, :KEYS] for width in (8, 4))
    masks = {
        "none": None,
        "causal": "causal",
        "hidden": mx.random.uniform(shape=(queries, KEYS)) < 0.7,
        "hidden by row": mx.random.uniform(shape=(3, 1, queries, KEYS)) < 0.7,
        "added": mx.random.normal((3, 6, queries, KEYS)).astype(dtype),
    }
    scores = mx.random.normal((6,)).astype(dtype) if sinks else None
    found = attention(q, k, v, scale=0.3, mask=masks[mask], sinks=scores)
    wanted = OWN(q, k, v, scale=0.3, mask=masks[mask], sinks=scores)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert mx.allclose(found, wanted, rtol=0, atol=1e-6 if dtype == mx.float32 else 0.02)


@pytest.mark.parametrize(("queries", "own"), [(1, 1), (2, 0), (3, 1)])
def test_plans_for_one_query_and_many_scores_only(monkeypatch: pytest.MonkeyPatch, queries: int, own: int) -> None:
    calls = []

    def counted(q: mx.array, *_: object, **__: object) -> mx.array:
        calls.append(q)
        return q

    monkeypatch.setattr(device, "_attention", counted)
    monkeypatch.setattr(device, "_MOST_SCORES", 2 * 4 * 2 * KEYS)
    k = mx.zeros((2, 1, KEYS, 8))
    attention(mx.zeros((2, 4, queries, 8)), k, k, scale=1.0)
    assert len(calls) == own


def test_replaces_mlxs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", OWN)
    device.use_on_cuda()
    assert mx.fast.scaled_dot_product_attention is attention
