"""Ranks: processes that compute one model together, each with a part of every layer (`--ranks`, docs/ranks.md). A wing.

Rank 0 is the leader: it has the HTTP server, the queue and the clock. All other ranks are followers: they run the same
slices from the leader's tape (runner/tape). Tensors go through `mx.distributed`, all other data through a link between
the leader and each follower. `runner/build.py` calls `start.lead`, which gives the leader's engine a world whose values
go to the followers, and the port `Ranks` (runner/engine/ports.py).

| read in this order | |
| --- | --- |
| `frames`, `link` | the messages between leader and followers; a follower's process, and the connection to it |
| `start` | the leader: starts its followers or connects to them, compares all ranks, ends all if one fails |
| `split`, `share` | a trial on placeholders, whether a model can be split; the loading of a rank's part |
| `rank_world` | the tape from the leader to its followers |
| `follower` | the process of a follower |
| `group`, `join_watchdog` | the group of `mx.distributed`; a watchdog that ends a process which waits in vain |
| `handshake`, `service` | the proof that leader and service know one secret; the command `mlx-runner follow` |

Owner: the engine thread, except for `Watch` (a thread of its own), the watchdog and the service (processes).
"""
