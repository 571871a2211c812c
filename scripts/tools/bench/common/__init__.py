"""Parts that all benchmarks share.

`report.py`: `Report` (targets, tables, charts, data), which every benchmark subclasses. `figure.py`: charts as data.
`interleave.py`: rounds of contenders, A B A B. `contenders.py`: our runner, mlx_lm.server, peers and the bare loop over
one model; `servers.py`: their processes and protocols; `requests.py`: answers and their times; `bare_loop.py`: the loop
without a server. `machine.py`: what it runs on, and whether other programs use it. `options.py`, `exits.py`: command
line.
"""
