"""Towers: the encoders that turn a picture's patches into rows of a text model's prompt. One module per family.

`plan_tower` finds and checks a model's tower from headers alone; `load_tower` reads it. A broken or missing tower costs
pictures, never text.

Owner: the engine thread. Read in this order: `tower` (the interface, and computing in pieces), `block`, `positions` and
`fields` (what families share), any family's module, `registry` (one row per family), `load`.
"""

from runner.model.towers.load import TowerPlan, load_tower, plan_tower
from runner.model.towers.tower import Grid, Tower

__all__ = ["Grid", "Tower", "TowerPlan", "load_tower", "plan_tower"]
