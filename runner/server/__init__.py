"""The HTTP server: receives requests and sends streams of lines. It never calls MLX.

The server runs on the event loop, in the process's first thread. Slow work runs on other threads: the checks in
`prepare.py` and tokenizing (except for small bodies) on `Intake`'s threads, requests on the engine's thread, other slow
work on a helper thread. Read in this order:

    routes.py         the routes, and the rules for all routes: access, refusals, the access log
    connections.py    the connections: the limit of their number, time limits, closing
    intake.py         an incoming request: reading its body, the threads for its checks, decoding its media
    completion.py     POST /completion; prepare.py makes the engine's request, remarks.py logs keys without effect
    scoring.py        POST /v1/score: makes a request to the engine for each row
    tokenize.py       POST /v1/tokenize and /v1/detokenize
"""
