"""The HTTP server: requests in, streams of lines, numbers and a page out. It never touches MLX.

Everything here runs on the event loop, in the process's first thread. Slow work runs elsewhere: tokenizing on
`TokenizeThreads`, requests on the engine's thread, the rest on a helper. Read in this order:

    app.py            the routes, and what holds for all of them: guards, refusals, the access log
    connections.py    how many connections there may be, and which is closed first; guards.py: who may ask
    completion.py     POST /completion: request_body.py reads it, tokenize_threads.py tokenizes, in_hand.py has its
                      pictures decoded, response.py answers
    score.py          POST /v1/score: a request for each row
    tokenize.py       POST /v1/tokenize
    stats.py          GET /v1/stats, /v1/cache, /v1/events (sse.py) and /metrics (metrics.py), all from stats_cache.py
    page.py, page/    GET /: the page, which draws /v1/events in the browser
"""
