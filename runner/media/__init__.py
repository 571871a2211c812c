"""The media wing: turns the bytes of pictures and sounds into rows of a text model's prompt.

`wing.MediaWing` gives an engine the `Sight` that `open` makes. Its `MediaSupport` prepares requests on any thread; its
`MediaEncoder` makes the `PromptMedia` of each request on the engine thread. A prompt with media is expanded off the
engine thread. Another process makes the rows of the media, and the engine computes features between two slices. A fault
in this wing disables pictures or sound, never text.

| read in this order | |
| --- | --- |
| `wing`, `open`, `facts` | gives an engine its media; opens sight and hearing; writes the media lines of `check` |
| `support`, `prompt` | turn a prompt with markers into ids, keys and positions; name media in caches |
| `header` | reads the format and size of a picture file, before any decoder runs |
| `row_store`, `decode_process`, `picture` | decode media within limits, in another process; only that imports Pillow |
| `sound_header`, `sound` | read the header of a sound; make its rows |
| `families`, `geometry` | prepare media for each family of models: sizes, rows, and the tokens around them |
| `towers` | turn rows into features, a piece at a time |
| `encoder`, `forward` | put features into a prompt, and run a text model's forward over them |

Owners: `towers`, `encoder`, `forward`, `open` and `facts` use MLX and belong to the engine thread. The other modules do
not use MLX, and any thread may call them; `MediaNames` and `RowStore` have locks.
"""
