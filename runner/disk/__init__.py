"""The disk tier of the prefix cache: conversations that survive the process (`--disk-cache`, docs/disk.md). A wing.

`tier.DiskWing` gives an engine its `DiskTier`, which restores before a request begins, writes between slices, and
checks when idle. Imported only with the flag.

| read in this order | |
| --- | --- |
| `tier` | what the engine sees, and how it is made; `namespace` is the name of the model's folder |
| `segment` | one immutable file, named by digests of the prefixes at its two ends; compared with the model's layers |
| `files`, `store`, `sweep` | calls to the operating system; the directory of one model; the bound of all of them |
| `reader`, `thread` | what there is of a prompt; the thread that waits for the disk |
| `serialize` | bytes of layers to and from memory, a piece at a time |
| `writer`, `restores` | out of the trie to the disk, and back into the trie |
| `check` | computes some of what came back again |

Owners: `files` to `thread` belong to the disk thread and know no MLX (any thread may read the index); the rest belongs
to the engine thread. The two exchange functions: `thread.DiskThread` has the engine's, the engine's mailbox its own.

The bounds of age and of bytes a day are in `tier`, those of one segment in `segment`; docs/disk.md repeats them.

Always true: a file is complete or it is refused; no file is trusted before its sums, its tokens and its layers agree;
nothing is evaluated from a file but JSON; nothing that a file can hold ends the disk thread.
"""
