"""Checks on a device what tests without one cannot: `python -m scripts.tools.device`.

Recurrent scans are compared with a loop in float64, wherever a prompt is cut, and every architecture with a scan with
mlx-lm's own loops. The graphs of all architectures must not grow with their prompts. The speed of hybrids stands beside
a llama's, and compiled decode steps beside plain ones. On a GPU it should take a few minutes. `--tiny` does the same in
seconds, also on a CPU, with small shapes and few architectures.

Exit status: 0, or 1 after a mismatch or if the device lacks a kernel.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import chain

from runner import cpu

cpu.preload()

from scripts.tools.device import checks, compiled  # noqa: E402 - the kernels must be loaded before MLX


def main(argv: Sequence[str]) -> int:
    """Prints a line for each check. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.tools.device", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small shapes and few architectures")
    begin, bad = time.monotonic(), 0
    tiny = parser.parse_args(argv).tiny
    for row in chain(checks.rows(tiny=tiny), compiled.rows(tiny=tiny)):
        bad += not row.good
        print(f"{time.monotonic() - begin:5.0f} s  {'' if row.good else 'WRONG  '}{row.name}: {row.found}", flush=True)
    print(f"{bad} wrong")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
