"""Structured output: compiles the `Format` of a request and follows it token by token. A wing.

`wing.GrammarWing` gives an engine its `WorkerPool`, the port `Formats`. A compiled format is a `Grammar`, whose `Guide`
leads an answer (`runner/engine/answer_grammar.py`). `worker_pool` and `messages` have the limits of a worker, which
docs/operating.md repeats.

llguidance does the work, in processes of its own: a hostile format may hang, exhaust memory or overflow a stack, and a
process can be limited and killed. One process, the fork server, holds the vocabulary and is forked for each worker. A
worker compiles one format, then follows one answer at a time.

Owners: `WorkerPool` and `ForkServer` belong to the event loop; a `Worker` belongs to the event loop until its grammar
is compiled, then to the engine thread, together with its `Guide`, until the answer ends. `worker_process` and what it
imports run in the forked processes.

Read in this order: `wing`, `messages`, `worker_pool`, `worker`, `guide`; then the forked side: `worker_process`,
`compiler`, `closed_objects`, `rewriter`, the folder `patterns`, `format_to_lark`, `number_bounds`, `vocabulary`,
`matcher`, `explain_error`.
"""
