"""Ranks: processes that compute one model together, each with a part of every layer.

Rank 0 is the leader: it has the HTTP server, the queue and the clock. The others are followers: they run the same
slices from the leader's tape (runner/engine/tape). Tensors go through `mx.distributed`, everything else through a link
between the leader and each follower.

| module | knows |
| --- | --- |
| `messages` | what leader and followers tell each other |
| `link` | a connection that carries messages, and notices when the other side is gone |
| `group` | how `mx.distributed` finds the other ranks |
| `guard` | ends a process that would wait for the others for ever |
| `start` | the leader: checks that all ranks are alike, joins them, ends them all if one fails |
| `followers` | the leader: starts followers on this machine, or reaches them on others |
| `handshake`, `secret`, `addresses` | who may lead, and from where; the service is in runner/commands/follow |
| `process` | starts the process of a follower |
| `watch` | the leader: notices followers that end or stop |
| `tapes` | the tape between ranks |
| `follower` | the process of a follower |
"""
