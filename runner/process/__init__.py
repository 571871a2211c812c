"""The process itself: its parent, its children, its limits, and a start that imports only what serving needs.

The modules know nothing of models or requests, and import little, since some of them run before everything else:

    parent.py         the environment that a host gives its runners, restored; the end of the host
    child.py          a process for what may hang, crash or exhaust memory: its start, its messages and its end
    orders.py         a child that answers one order at a time, within limits of memory and processor time
    limits.py         threads and file descriptors: enough of them, or an error or a log line
    lean_mlx_lm.py    mlx-lm's models without its tools; imported before anything of mlx_lm by the packages that use it
    lean_aiohttp.py   aiohttp's server without its client; call it before anything of aiohttp is imported

`__main__` uses `parent` first, `app` the others in the order of the start. Nothing here has an owner thread of its own.
"""
