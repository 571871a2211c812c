"""Pictures and sounds: from the bytes of a file to rows of a text model's prompt. A wing: text needs none of it.

`wing.MediaWing` gives an engine the `Sight` that `open` makes: a `MediaSupport`, the `Vision` of requests on any
thread, and a `MediaEncoder`, which makes the `PromptMedia` of the engine thread. A request with media is expanded off
the engine thread, another process makes its rows, and its features are computed between two slices. A fault here costs
pictures or sound, never text.

| read in this order | |
| --- | --- |
| `wing`, `open`, `facts` | gives an engine its media; opens the sight and the hearing of a model; lines of `check` |
| `support`, `prompt` | a prompt with markers and media to ids, keys and positions; the names of media in caches |
| `header` | the format and size of a file, by a bounded walk before any decoder |
| `row_store`, `decode_process`, `picture` | decodes media within limits; only that process imports Pillow |
| `sound_header`, `sound` | the header of a sound; its rows |
| `families`, `geometry` | the preparation of media in each family of models: sizes, rows, the tokens around them |
| `towers` | the encoders: rows to features, a piece at a time |
| `encoder`, `forward` | features into a prompt, and a text model's forward over them |

Owners: `towers`, `encoder`, `forward`, `open` and `facts` belong to the engine thread and know MLX. Any thread may call
the rest, which knows no MLX; `MediaNames` and `RowStore` have locks.
"""
