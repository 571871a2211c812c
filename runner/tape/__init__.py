"""The tape: all outside values on which the decisions of the slice loop depend, and the results. A wing.

A recording is a tape in a file, from which `mlx-runner replay` runs the same slices again (docs/replay.md). The entries
are described in docs/internals/tape.md. `runner/build.py` calls `recording.start_recording`, which gives an engine a
`TapedWorld` in place of the `World` (runner/engine/engine.py). Without `--record` and `--ranks`, no module of
this package is imported.

| read in this order | |
| --- | --- |
| `tape` | the entries of a tape; the tape that notes values, and the tape that plays them back |
| `taped_world` | sends outside values through a tape: forwards, memory, clocks |
| `taped_grammar` | sends the states of grammars through a tape |
| `recording` | requests, events and turns on a tape; the recording of an engine |
| `file` | the header and frames of a file; `VERSION` rises when an entry changes its meaning |
| `replay`, `command` | runs the slices of a tape again; the command `mlx-runner replay` |

Owner: the engine thread.
"""
