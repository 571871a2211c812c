"""The treatment of transparency: one of three, since Ollama's families differ where a pixel is partly transparent."""

from typing import Literal

Alpha = Literal["drop", "weigh", "black"]
"""drop: ignored before resizing, so that colours under transparent pixels are seen.
weigh: colours count by their opacity when resizing, and are seen in full afterwards.
black: the picture is seen on a black ground.
"""
