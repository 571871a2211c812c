"""The HTTP server: requests in, streams of lines out. It never touches MLX.

Everything here runs on the event loop, in the process's first thread. Slow work runs elsewhere: tokenizing, but for
small bodies, on `TokenizeThreads`, requests on the engine's thread, the rest on a helper. Read in this order:

    app.py            the routes, those of wings too, and the rules for all of them: who may ask, refusals, the
                      access log
    connections.py    the number of connections, and which is closed first
    completion.py     POST /completion: request_body.py reads it, tokenize.py tokenizes; events become lines;
                      remarks.py logs what has no effect
    score.py          POST /v1/score: a request for each row
    tokenize.py       POST /v1/tokenize, and the threads that tokenize
"""
