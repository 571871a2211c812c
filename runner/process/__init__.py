"""The runner's process: its parent, its children, its limits, and a start with fewer imports.

The modules know nothing of models or requests. They import little, since some of them run before all other code:

    parent.py         restores the environment that a host changes for its runners; ends the process with its host
    child.py          a child process for code that may hang, crash or exhaust memory: start, messages, end
    orders.py         a child process that answers one order at a time, with limits of memory and processor time
    limits.py         checks that there are enough threads and file descriptors; else an error or a log line
    lean_mlx_lm.py    mlx-lm's models without mlx-lm's tools; must be imported before any module of mlx_lm
    lean_aiohttp.py   aiohttp's server without modules that it imports and a runner does not use

`__main__` uses `parent` first. `app` uses the other modules, in the order of the start. No module belongs to a thread.
"""
