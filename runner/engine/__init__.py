"""The engine: one thread that owns MLX, loads the model, and computes all requests, one slice at a time.

A slice is the beginning of a request, a part of a prompt, or one decode step of a batch. Between two slices the engine
takes in messages, so no request waits for longer than a slice.

Threads: the event loop calls `Engine.start` and `submit`, and reads events from a request's `EventStream`. Everything
else belongs to the engine thread, except `request.py` and `formats.py`, which validate and compile on the event loop.
Events cross over in `events.py` (Outbox), requests in the mailbox of `engine.py`. Only the engine thread imports MLX.

Read in this order: `request.py` and `events.py` (what goes in and comes out), `engine.py` (the loop), `scheduler.py`
(the stations of a request), `policy.py` (which slice is next, from numbers alone), `generation.py` (one request),
`batch.py` and `batches.py` (several in one forward), then `output/`, `memory/`, `observe/`, `recovery.py`, `platform/`.
`assemble.py` connects them all.
"""
