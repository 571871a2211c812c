"""What MLX holds, as tests may compare it."""

import mlx.core as mx


def held_bytes() -> int:
    """Returns the bytes in use once the CPU stream has let go of what it computed with: on a busy machine that is a
    moment after `mx.eval` returns."""
    mx.synchronize()
    return mx.get_active_memory()
