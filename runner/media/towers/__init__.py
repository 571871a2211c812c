"""Towers: the encoders that turn a picture's patches into rows of a text model's prompt. One module per family.

`plan_tower` finds and checks a model's tower from headers alone; `load_tower` reads it. A broken or missing tower costs
pictures, never text.

Owner: the engine thread. Read in this order: `tower` (the interface, and computing in pieces), `block` (layers of a
transformer, positions of patches, estimates of memory), any family's module, `load` (one row per family, then plan and
load).
"""

from runner.media.towers.load import TowerPlan, load_tower, plan_tower
from runner.media.towers.tower import Grid, Tower

__all__ = ["Grid", "Tower", "TowerPlan", "load_tower", "plan_tower"]
