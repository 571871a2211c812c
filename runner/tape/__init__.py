"""The tape: everything from outside that the slice loop's decisions follow from, and what became of them. A wing.

Recorded, it is a file from which `mlx-runner replay` runs the same slices again (docs/replay.md); what is on it stands
in docs/internals/tape.md. `runner/build.py` calls `recording.start_recording`, which gives an engine a `TapedWorld` in
place of the `World` that its values come from (runner/engine/engine.py). Without `--record` and `--ranks` nothing of
this package is imported.

| read in this order | |
| --- | --- |
| `tape` | its entries, and the two tapes: one notes what happens, the other gives what was noted |
| `taped_world` | puts the tape where values come in: forwards, memory, clocks, drafts |
| `taped_grammar` | the states of grammars |
| `recording` | requests, events and turns on a tape; an engine that is recorded |
| `file` | the header and the frames of a file; its `VERSION` rises when an entry changes its meaning |
| `replay`, `command` | runs the slices of a tape again; `mlx-runner replay` |

Owner: the engine thread.
"""
