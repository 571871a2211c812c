"""`scripts/device`: tries the runner on a borrowed GPU or somebody's Mac, and writes one file about it.

Read `__main__.py` first: it runs the parts, each in a process of its own (`part.py`), as long as there are minutes.
`parts.py` has the table of parts and `result.py` the file. `installed.py`, `checks.py` (with `scans.py`) and
`served.py` hold the parts: models as they load, as they compute, and as clients see them.
"""
