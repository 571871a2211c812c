"""The disk tier of the prefix cache: conversations that survive the process (`--disk-cache`, docs/disk.md). A wing.

`wing.DiskWing` gives an engine a `DiskTier`, which restores segments before a request begins and writes segments
between slices. Without the flag, nothing imports this package.

| read in this order | |
| --- | --- |
| `wing`, `tier` | the maker of the tier; the tier, which is all that the engine sees |
| `namespace` | the name of the model's folder |
| `points`, `segment` | digests of prefixes; one immutable file, named by the digests at its two ends |
| `files`, `store`, `sweep` | calls to the operating system; the directory of one model; the bound of all directories |
| `segment_reader`, `thread` | the reader of a prompt's segments; the thread that waits for the disk |
| `serialize` | snapshots of layers to bytes, a piece at a time, and bytes to snapshots |
| `unsaved`, `writer` | from the trie to the disk: the next segment to copy; the time for a copy |
| `restores` | from the disk into the trie, before a request begins |

The disk thread owns `files` to `thread`, which do not use MLX. Any thread may read the store's index. The engine
thread owns the other modules. The threads exchange functions, through `thread.DiskThread` and the engine's mailbox.

`wing` has the bounds of age and of bytes a day, `segment` the bounds of one segment. docs/disk.md repeats both.

Always true: an incomplete file is refused. A file is used only after its sums, tokens and layers are compared. Only
JSON is evaluated from a file. No content of a file can end the disk thread.
"""
