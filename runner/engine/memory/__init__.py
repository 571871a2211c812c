"""Memory: how much of it a request will take, and which requests fit.

`budget.py` decides. It divides `--memory` between the weights, the cache and what a slice takes meanwhile: it bounds
the cache, shortens slices, holds requests back, and names those that must end. It computes nothing on the device; the
scheduler asks it before each slice, and tells it afterwards.

`estimate.py` learns from the slices so far how much the next one will take.

Both belong to the engine thread. `runner/engine/recovery.py` is for the case that all of this was wrong, and MLX found
no memory. Read `budget.py` first; its module docstring has the sum.
"""
