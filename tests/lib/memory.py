"""The bytes that MLX holds, for tests that count them."""

import gc

import mlx.core as mx


def held_bytes() -> int:
    """Returns the bytes in use once nothing else can let go of any: neither the garbage of earlier tests, nor the CPU
    stream, which on a busy machine releases what it computed with a moment after `mx.eval` returns.

    A test that disables the collector shows that something is freed without it: nothing is collected for that one."""
    if gc.isenabled():
        gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
