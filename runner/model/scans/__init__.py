"""The recurrences of models, computed by one kernel over all tokens.

Read `kernel` first, which states the rules and calls the kernel of the device; then `functions`, which models call in
the place of mlx-lm's.

Owner: the engine thread, like every array.
"""
