"""Ranks: processes that compute one model together, each with a part of every layer (`--ranks`, docs/ranks.md). A wing.

Rank 0 is the leader: it has the HTTP server, the queue and the clock. The others are followers: they run the same
slices from the leader's tape (runner/tape). Tensors go through `mx.distributed`, everything else through a link between
the leader and each follower. `runner/build.py` calls `start.lead`, which gives an engine a world on a tape, and the
port `Ranks` (runner/engine/ports.py).

| read in this order | |
| --- | --- |
| `frames`, `link` | the messages of both sides; the process of a follower, and the connection to it |
| `start` | the leader: starts or reaches its followers, checks that all ranks are alike, ends them all if one fails |
| `split`, `share` | the part of a model that each rank computes, tried on placeholders; its loading |
| `rank_world` | the tape between ranks |
| `follower` | what the process of a follower does |
| `group`, `join_watchdog` | how `mx.distributed` finds the others; what ends a process that would wait for ever |
| `handshake`, `service` | who may lead, and from where; `mlx-runner follow` lets leaders in |

Owner: the engine thread, except for `Watch`, which has a thread, and the watchdog and the service, which are processes.
"""
