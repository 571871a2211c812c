"""The tape: everything from outside that the slice loop's decisions follow from, and what became of them.

Recorded, it is a file from which `mlx-runner replay` runs the same slices again (docs/replay.md). Without `--record`
nothing of this package but `interface.py` is imported, and the engine runs as if it did not exist.

Read `interface.py` first: three verbs. `recorder.py` writes and `player.py` reads; `values.py` says what stands on a
tape, `file.py` how. `taps.py`, `generation.py` and `grammar.py` put the verbs where values come in; `requests.py` lets
requests change only between two slices. `recording.py` and `replay.py` are the two ways to run an engine with a tape.
"""
