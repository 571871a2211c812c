"""The bytes that MLX holds, for tests that count them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


def held_bytes() -> int:
    """Returns the bytes in use once nothing else can let go of any: neither the garbage of earlier tests, nor the CPU
    stream, which on a busy machine releases what it computed with a moment after `mx.eval` returns.

    A test that disables the collector shows that something is freed without it: nothing is collected for that one."""
    if gc.isenabled():
        gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


@contextmanager
def exact_memory() -> Iterator[None]:
    """Only the bytes of arrays count: MLX reuses no freed buffer, which may be larger than the array in it, and nothing
    waits for Python's collector of cycles."""
    gc.collect()
    gc.disable()
    limit = mx.set_cache_limit(0)
    mx.clear_cache()
    try:
        yield
    finally:
        mx.set_cache_limit(limit)
        gc.enable()
