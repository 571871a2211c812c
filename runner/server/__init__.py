"""The HTTP server: requests in, streams of lines out. It never touches MLX.

Everything here runs on the event loop, in the process's first thread. Slow work runs elsewhere: `prepare.py` and all
tokenizing, except for small bodies, on the threads of `Intake`, requests on the engine's thread, the rest on a helper.
Read in this order:

    routes.py         the routes, those of wings too, and the rules for all of them: who may ask, refusals, the
                      access log
    connections.py    the number of connections, and which is closed first
    intake.py         a request that comes in: its body, the threads that check it, its media
    completion.py     POST /completion: prepare.py makes a request to the engine of it; events become lines; remarks.py
                      logs keys without effect
    scoring.py        POST /v1/score: a request for each row
    tokenize.py       POST /v1/tokenize and /v1/detokenize
"""
