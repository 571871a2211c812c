"""The packages of mlx-vlm that are asked to serve, by name alone: this needs no mlx-vlm."""

from scripts.tools.models import data

TEXTS, SEEING = (tuple(str(data.read("vlm")["packages"][kind]).split()) for kind in ("texts", "seeing"))
"""The packages of text models that mlx-lm lacks, and those of models that see, too."""
