"""The tape: everything from outside that the slice loop's decisions follow from, and what became of them. A wing.

Recorded, it is a file from which `mlx-runner replay` runs the same slices again (docs/replay.md). The engine reads its
values through a `World` (runner/engine/world.py), which puts the three verbs of a `Tape` before them. Without
`--record` and `--ranks` nothing of this package is imported.

| read in this order | |
| --- | --- |
| `recorder` | the two tapes: one notes what happens, the other gives what was noted |
| `taps`, `grammar` | put the verbs where values come in: forwards, memory, clocks, drafts, states of grammars |
| `requests` | lets requests change only between two slices |
| `file`, `header` | what stands in the file, and how |
| `recording`, `replay`, `command` | the two ways to run an engine with a tape; `mlx-runner replay` |

Owner: the engine thread.
"""
