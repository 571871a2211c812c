"""The disk tier of the prefix cache: conversations that survive the process (`--disk-cache`, docs/disk.md). A wing.

`wing.DiskWing` gives an engine its `DiskTier`, which restores before a request begins and writes between slices.
Imported only with the flag.

| read in this order | |
| --- | --- |
| `wing`, `tier` | makes the tier; the engine's view of it |
| `namespace` | the name of the model's folder |
| `points`, `segment` | digests of prefixes; one immutable file, named by the digests at its two ends |
| `files`, `store`, `sweep` | calls to the operating system; the directory of one model; the bound of all directories |
| `segment_reader`, `thread` | the segments of a prompt; the thread that waits for the disk |
| `serialize` | bytes of layers to and from memory, a piece at a time |
| `unsaved`, `writer` | from the trie to the disk: the next segment; when to copy it |
| `restores` | from the disk into the trie, before a request begins |

Owners: `files` to `thread` belong to the disk thread and know no MLX (any thread may read the index); the rest belongs
to the engine thread. The two threads exchange functions, through `thread.DiskThread` and the engine's mailbox.

The bounds of age and of bytes a day are in `wing`, those of one segment in `segment`; docs/disk.md repeats them.

Always true: a file is complete or it is refused; no file is trusted before its sums, its tokens and its layers agree;
nothing is evaluated from a file but JSON; nothing that a file can hold ends the disk thread.
"""
