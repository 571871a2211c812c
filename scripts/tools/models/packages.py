"""The packages of mlx-vlm that are asked to serve, by name alone: this needs no mlx-vlm."""

from scripts.tools.models import data

TEXTS, SEEING = (tuple(str(data.read("vlm")["packages"][kind]).split()) for kind in ("texts", "seeing"))
"""Those that answer in text and that mlx-lm lacks; those that see as well."""
