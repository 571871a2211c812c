"""The disk tier of the prefix cache: conversations that survive the process (`--disk-cache`, docs/disk.md). A wing.

`open.DiskWing` gives it to an engine, which sees a `DiskTier`, which restores before a request
begins, writes between slices, and checks when idle. Imported only with the flag.

| read in this order | |
| --- | --- |
| `tier` | what the engine sees |
| `segment` | one immutable file, named by digests of the prefixes at its two ends; compared with the model's layers |
| `index` | which segments hold the beginning of a prompt, from names alone |
| `files`, `shelf`, `sweep` | calls to the operating system; the directory of one model; the bound of all of them |
| `thread`, `reader` | the thread that waits for the disk; reading a plan |
| `serialize` | bytes of layers to and from memory, a piece at a time |
| `writes`, `restores` | out of the trie to the disk, and back into the trie |
| `check`, `open` | computes some of what came back again; builds all of it |

Owners: `files` to `reader` belong to the disk thread and know no MLX (any thread may read the index); the rest belongs
to the engine thread.

Always true: a file is complete or it is refused; no file is trusted before its sums, its tokens and its layers agree;
nothing is evaluated from a file but JSON; nothing that a file can hold ends the disk thread.
"""
