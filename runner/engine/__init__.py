"""The engine: one thread that owns MLX, and computes all requests, one slice at a time.

A slice is the beginning of a request, a part of a prompt, or one decode step of a batch. The engine handles messages
between two slices, so no message waits for longer than a slice.

Threads: the event loop calls `Engine.start` and `submit`, and reads events from a request's `EventStream`. All other
code belongs to the engine thread, except `request.py` and a part of `ports.py`. Requests reach the engine thread
through the mailbox of `engine.py`; events leave it through the `Outbox` of `events.py`. Only the engine thread
imports MLX. `runner/assemble.py` builds the parts of an engine, connects them, and warms up the model.

| read in this order | |
| --- | --- |
| `request`, `events` | a request; the events for its client; the wake-up of the event loop |
| `engine` | the world from which values come; the loop of the engine thread: receive, compute, deliver |
| `scheduler`, `queue`, `policy` | the stations of a request; the queues; the choice of the next slice |
| `generation`, `lifecycle` | a request that is being computed; the times and counts of a request |
| `answer_grammar` | the grammar that one answer follows |
| `batch`, `batches` | answers that decode in one forward; all batches of an engine |
| `memory`, `recovery` | the requests that fit into `--memory`; the steps after MLX has found no memory |
| `core`, `first_tokens` | the parts with which requests are computed; logits kept after recent prompts |
| `ports`, `parts` | the calls from the engine to wings; the parts of an engine, to which wings add |
"""
