"""Pictures on their way from bytes to the rows of a tower. Knows no MLX, and no engine.

| module | what it is |
| --- | --- |
| `kind` | sound or picture, by the first bytes |
| `formats` | the format of a picture, by the first bytes; what is not served, with advice |
| `header` | what is known of a picture before any pixel, by a bounded walk over its file |
| `avif` | the same of an AVIF, whose walk is another |
| `orientation` | the orientation that a camera wrote into EXIF |
| `picture` | bytes to pixels: the only module that imports Pillow |
| `decode_process` | the process that does so, and the runner's end of it |
| `alpha` | what becomes of transparency |
| `geometry` | size after resizing, patches, soft tokens |
| `families` | what each family of models makes of a picture |
| `digest` | the digest that tells prepared pictures apart |
| `prompt` | a prompt with pictures: ids, keys, positions; the names of pictures in caches |
| `pixels` | has pictures decoded, and keeps the latest rows |

Only the process that decodes imports `runner.media.picture`, which costs 0.16 s of processor time.
Any thread may call anything here. State is kept by `PictureNames` and `PixelStore` alone, which have locks.
"""
