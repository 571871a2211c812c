"""Structured output, a wing: compiles the `Format` of a request into a grammar that the answer must follow.

`wing.GrammarWing` gives an engine its `WorkerPool`, which implements the port `Formats`. A compiled format is a
`Grammar`; its `Guide` follows one answer (`runner/engine/answer_grammar.py`). `worker_pool` and `messages` define the
limits of workers (docs/operating.md).

The library llguidance compiles and follows grammars. It runs in processes of its own, the workers: a hostile format may
hang it, exhaust memory or overflow a stack, and a process can be limited and killed. One process, the fork server,
holds the vocabulary and forks the workers. A worker compiles one format, then follows one answer at a time.

Owners: `WorkerPool` and `ForkServer` belong to the event loop; a `Worker` belongs to the event loop until its grammar
is compiled, then to the engine thread, together with its `Guide`, until the answer ends. `worker_process` and what it
imports run in the forked processes.

Read in this order: `wing`, `messages`, `worker_pool`, `worker`, `guide`; then the forked side: `worker_process`,
`compiler`, `closed_objects`, `rewriter`, the folder `patterns`, `format_to_lark`, `number_bounds`, `vocabulary`,
`matcher`, `explain_error`.
"""
