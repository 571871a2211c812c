"""Trains a demo model anew: `scripts/train_demo_model`."""

import argparse
import sys
from pathlib import Path

from runner import cpu

if __name__ == "__main__":  # before MLX; a second thread gains little, and loses much beside other programs
    cpu.preload("auto", 1)

from scripts.tools import ROOT
from scripts.tools.demo import plain
from scripts.tools.demo.training import save, train_seeing, train_text
from scripts.tools.demo.training_hearing import train_hearing

_TRAINING = {
    "demo_model": train_text,
    "demo_draft_model": train_text,
    "demo_seeing_model": train_seeing,
    "demo_hearing_model": train_hearing,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/train_demo_model", description=(__doc__ or "").partition(":")[0])
    names = [*_TRAINING]
    parser.add_argument("model", choices=names, nargs="?", default=names[0], help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="directory (default: that of the model, in scripts/)")
    parser.add_argument("--steps", type=int, default=800, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    source = ROOT / "scripts" / options.model
    out = options.out or source
    save(source, out, _TRAINING[options.model](source, options.steps, seed=1))
    print(f"saved {out}", flush=True)
    sys.exit(not plain.is_good(out))


if __name__ == "__main__":
    main()
