"""The HTTP server: requests in, streams of lines out. It never touches MLX.

Everything here runs on the event loop, in the process's first thread. Slow work runs elsewhere: `prepare.py` and all
tokenizing, except for small bodies, on the threads of `Intake`, requests on the engine's thread, the rest on a helper.
Read in this order:

    routes.py         the routes, and the rules for all of them: access, refusals, the access log
    connections.py    the connections: their number, their time limits, the order in which they are closed
    intake.py         an incoming request: its body, the threads that check it, its media
    completion.py     POST /completion; prepare.py makes a request to the engine, remarks.py logs keys without effect
    scoring.py        POST /v1/score: a request to the engine for each row
    tokenize.py       POST /v1/tokenize and /v1/detokenize
"""
