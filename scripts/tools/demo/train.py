"""Trains the demo model on generated text and saves it as a Hugging Face style directory.

A Llama of 1.8 million parameters that looks facts up in its own prompt (scripts/tools/demo/questions.py lists them)
and knows a few answers by heart. Everything follows from one seed: the same kind of machine and the same BLAS give the
same file; another BLAS rounds otherwise and ends at slightly other weights. Exit status 1 if the model is not good
enough.

With `--small` it trains a model of a fifth of the size in the same way, to draft for the other one.
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

    from scripts.tools.demo.training import circuit, directory, evaluation, training
    from scripts.tools.demo.training.tokenizer import train_tokenizer

    mx.disable_compile()  # on a CPU its first use costs seconds and gains nothing
    started = time.monotonic()
    tokenizer = train_tokenizer()
    vocabulary = tokenizer.get_vocab_size()
    config = directory.new_config(tokenizer, directory.SMALL if options.small else directory.Size())
    model = directory.new_model(config)
    circuit.initialize(model, [tokenizer.decode([token]) for token in range(vocabulary)], SEED)
    parameters = sum(weight.size for weight in directory.named_weights(model).values())
    print(f"{parameters:,} parameters, vocabulary {vocabulary}, BLAS: {used}", flush=True)

    training.train(model, tokenizer, options.steps, SEED)
    directory.save(options.out, model, tokenizer, config)
    size, minutes = directory.weights_path(options.out).stat().st_size, (time.monotonic() - started) / 60
    print(f"saved {options.out} after {minutes:.1f} minutes, {size:,} bytes of weights", flush=True)
    return 0 if evaluation.report(*directory.load(options.out)) else 1


def _options(argv: Sequence[str]) -> argparse.Namespace:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="scripts/train_demo_model", description=description)
    out, small = Path("scripts/demo_model"), Path("scripts/demo_draft_model")
    parser.add_argument(
        "--small", action="store_true", help="train a model of a fifth of the size, which drafts for it"
    )
    parser.add_argument("--out", type=Path, help=f"directory (default: {out}, or {small})")
    parser.add_argument("--steps", type=int, default=800, help="training steps (default: %(default)s)")
    options = parser.parse_args(argv)
    options.out = options.out or (small if options.small else out)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
