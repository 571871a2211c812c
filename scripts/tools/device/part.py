"""One part in a process of its own, `python -m scripts.tools.device.part MODULE:FUNCTION [--tiny]`: a row a line."""

import signal
import sys
from importlib import import_module

import msgspec

from runner import cpu


def main(rows: str, *words: str) -> None:
    module, _, function = rows.partition(":")
    for row in getattr(import_module(module), function)(tiny="--tiny" in words):
        print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part ends the runners that it has started
    cpu.preload()
    main(*sys.argv[1:])
