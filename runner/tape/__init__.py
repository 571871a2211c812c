"""The tape: everything from outside that the slice loop's decisions follow from, and what became of them. A wing.

Recorded, it is a file from which `mlx-runner replay` runs the same slices again (docs/replay.md). The engine reads its
values through a `World` (runner/engine/world.py), before which a `TapedWorld` puts the verbs of a `Tape`. Without
`--record` and `--ranks` nothing of this package is imported.

| read in this order | |
| --- | --- |
| `tape` | its entries, and the two tapes: one notes what happens, the other gives what was noted |
| `world` | puts the tape where values come in: forwards, memory, clocks, drafts, states of grammars |
| `recording` | the requests on a tape, which change between two slices only; an engine that is recorded |
| `file` | the header and the frames of a file |
| `replay`, `command` | runs the slices of a tape again; `mlx-runner replay` |

Owner: the engine thread.
"""
