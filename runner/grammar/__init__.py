"""Structured output: compiles the `Format` of a request and follows it token by token. A wing, with the port `Formats`.

llguidance does the work, in processes of its own: a hostile format may hang, exhaust memory or overflow a stack, and a
process can be limited and killed. One process, the fork server, holds the vocabulary and is forked for each worker. A
worker compiles one format, then follows one answer at a time.

Owners: `WorkerPool` and `fork_server` belong to the event loop; a `Worker` belongs to the event loop until its grammar
is compiled, then to the engine thread, together with its `Guide`, until the answer ends. `worker_process` and
`compiler` run in the forked processes.

Read in this order: `messages`, `worker_pool`, `fork_server`; then the forked side: `worker_process`, `compiler`,
`rewriter`, `format_to_lark`, `explain_error`.
"""
