"""Trains the demo model that sees on pictures drawn by the script, and saves it as a Hugging Face style directory.

A Qwen 3.5 of 0.6 million parameters that says which colour the circle in a picture has, and where it is
(scripts/tools/demo/seeing/world.py lists what there is). Its tower is trained first, then the text model on what the
tower sees. Everything follows from one seed: the same kind of machine and the same BLAS give the same file; another
BLAS rounds otherwise and ends at slightly other weights. Exit status 1 if the model is not good enough.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from runner import blas

SEED = 1


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    used = blas.preload("auto", 1)  # a second thread gains little, and loses much where other programs want the cores
    # Not before this line: these import mlx.
    import mlx.core as mx

    from scripts.tools.demo.training.directory import weights_path
    from scripts.tools.demo.training.seeing import directory, evaluation, training
    from scripts.tools.demo.training.seeing.viewer import Viewer

    mx.disable_compile()  # on a CPU its first use costs seconds and gains nothing
    started = time.monotonic()
    print(f"BLAS: {used}", flush=True)
    directory.save(options.out, *training.train(training.Steps(options.tower_steps, options.text_steps), SEED))
    size, minutes = weights_path(options.out).stat().st_size, (time.monotonic() - started) / 60
    print(f"saved {options.out} after {minutes:.1f} minutes, {size:,} bytes of weights", flush=True)
    return 0 if evaluation.report(Viewer(*directory.load(options.out))) else 1


def _options(argv: Sequence[str]) -> argparse.Namespace:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="scripts/train_seeing_model", description=description)
    where = Path("scripts/demo_seeing_model")
    parser.add_argument("--out", type=Path, default=where, help="directory (default: %(default)s)")
    parser.add_argument("--tower-steps", type=int, default=250, help="of the tower's training (default: %(default)s)")
    parser.add_argument("--text-steps", type=int, default=500, help="of the text model's (default: %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
