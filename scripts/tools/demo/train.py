"""Trains the weights of a demo model anew, from text and pictures made by the script.

The one in scripts/demo_model looks facts up in its own prompt; the one in scripts/demo_draft_model (--draft) does so
with a fifth of the weights, to draft for it; the one in scripts/demo_seeing_model (--seeing) says which colour the
circle in a picture has, and where it is. Shapes and tokenizers stay those of these directories. Everything follows
from one seed: the same kind of machine and the same BLAS give the same file. Exit status 1 if the model is not good
enough.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from runner import blas
from scripts.tools import ROOT

SEED = 1


def main(argv: Sequence[str]) -> int:
    """Trains, saves and evaluates a model; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/train_demo_model", description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--draft", action="store_true", help="train the small model that drafts for the demo model")
    which.add_argument("--seeing", action="store_true", help="train the model that sees")
    parser.add_argument("--out", type=Path, help="directory (default: that of the model, in scripts/)")
    parser.add_argument("--steps", type=int, default=800, help="training steps (default: %(default)s)")
    parser.add_argument("--tower-steps", type=int, default=250, help="of the tower (default: %(default)s)")
    options = parser.parse_args(argv)
    used = blas.preload("auto", 1)  # a second thread gains little, and loses much where other programs want the cores
    # Not before this line: it imports mlx.
    from scripts.tools.demo import plain, training

    name = "demo_seeing_model" if options.seeing else "demo_draft_model" if options.draft else "demo_model"
    source, started = ROOT / "scripts" / name, time.monotonic()
    print(f"{name}, BLAS: {used}", flush=True)
    if options.seeing:
        weights = training.train_seeing(source, options.tower_steps, options.steps, SEED)
    else:
        weights = training.train_text(source, options.steps, SEED)
    out = options.out or source
    training.save(source, out, weights)
    print(f"saved {out} after {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    return 0 if plain.is_good(out) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
