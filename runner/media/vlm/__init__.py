"""Pictures for models of mlx-vlm: their own processors and towers, in the place of a family and a tower of ours.

| read in this order | |
| --- | --- |
| `process` | a process with mlx-vlm's processor, which makes the arrays of one picture at a time, within limits |
| `family` | a picture's tokens, by its size, and its arrays; what differs from `runner.media.families` |
| `sight` | features of mlx-vlm's tower, the forward over them, and what opens both |

A picture stands in a prompt as what the processor makes of a prompt with that picture alone, so its features, keys and
tokens do not depend on other pictures. `process` and `family` know no MLX, and any thread may call `family`; `sight`
belongs to the engine thread.
"""
