"""The engine: one thread that owns MLX, and computes all requests, one slice at a time.

A slice is the beginning of a request, a part of a prompt, or one decode step of a batch. Between two slices the engine
takes in messages, so no request waits for longer than a slice.

Threads: the event loop calls `Engine.start` and `submit`, and reads events from a request's `EventStream`. Everything
else belongs to the engine thread, except `request.py` and a part of `ports.py`. Events cross over in `events.py`
(Outbox), requests in the mailbox of `engine.py`. Only the engine thread imports MLX. `runner/assemble.py` builds the
parts, connects them and warms them up.

| read in this order | |
| --- | --- |
| `request`, `events` | what goes in and comes out, and how the event loop is woken |
| `engine` | the world that values come from; the loop: receive, compute, deliver |
| `scheduler`, `queue`, `policy` | the stations of a request; lines that wait; which slice is next, from numbers alone |
| `generation`, `lifecycle` | one request: prompt and answer; its times and counts |
| `answer_grammar`, `batch`, `batches`, `round` | its grammar; answers in one forward; rounds that check drafts |
| `memory`, `recovery` | which requests fit into `--memory`; the case that MLX finds none |
| `core`, `ports` | what all requests are computed with, and who counts them; what the engine asks of wings |
| `parts` | how it is built, and how wings join it |
"""
