"""Fixtures that the tests of layers share."""

import gc
from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture
def exact_bytes() -> Iterator[None]:
    """Nothing else is freed meanwhile, and no freed buffer is used again, which may be larger than the array in it."""
    gc.collect()
    limit = mx.set_cache_limit(0)
    mx.clear_cache()
    yield
    mx.set_cache_limit(limit)
