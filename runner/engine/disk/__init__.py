"""The engine's part of the disk cache (docs/disk.md): what it reads and writes, and when. Imported only with the flag.

`tier.py` is what the engine sees; `restores.py` lets requests wait for what is read, `writes.py` copies what is to be
written; `check.py` computes some of it again; `open.py` builds all of it. Owner: the engine thread.
"""
