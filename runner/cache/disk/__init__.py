"""The disk tier of the prefix cache: conversations that survive the process (`--disk-cache`). See docs/disk.md.

Nothing here knows MLX; it is imported only with the flag. Read in this order:

* `name.py` and `segment.py`: a segment is one immutable file, named by the points at its two ends;
* `layers.py`: what the layers of the model hold, with which every segment is compared;
* `point.py`: digests of prefixes of a prompt;
* `index.py` and `plan.py`: which segments hold the beginning of a prompt, from names alone;
* `files.py`: the calls to the operating system, and the one place where tests put faults;
* `shelf.py`: the directory of one model: list, read, publish; `sweep.py` keeps all of them within the bound.

Owner of the shelf, of the sweep and of everything that waits for the disk: the disk thread. The index is written by the
disk thread alone, and may be read by any.

Always true: a file is complete or it is refused; no file is trusted before its sums, its tokens and its layers agree;
nothing is evaluated from a file but JSON; nothing that a file can hold ends the disk thread.
"""
