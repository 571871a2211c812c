"""Trains a demo model anew: `scripts/train_demo_model`."""

import argparse
import sys
from pathlib import Path

from runner import cpu
from scripts.tools import ROOT

MODELS = ("demo_model", "demo_draft_model", "demo_seeing_model", "demo_hearing_model")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/train_demo_model", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("model", choices=MODELS, nargs="?", default=MODELS[0], help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="directory (default: that of the model, in scripts/)")
    parser.add_argument("--steps", type=int, default=800, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    cpu.preload("auto", 1)  # before MLX; a second thread gains little, and loses much beside other programs
    from scripts.tools.demo import plain
    from scripts.tools.demo.training import save, train_seeing, train_text
    from scripts.tools.demo.training_hearing import train_hearing

    train = {"demo_seeing_model": train_seeing, "demo_hearing_model": train_hearing}.get(options.model, train_text)
    source = ROOT / "scripts" / options.model
    out = options.out or source
    save(source, out, train(source, options.steps, seed=1))
    print(f"saved {out}", flush=True)
    sys.exit(not plain.is_good(out))


if __name__ == "__main__":
    main()
