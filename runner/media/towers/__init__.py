"""Towers: the encoders that turn patches of a picture, or spectra of a sound, into rows of a text model's prompt. One
module per family and kind.

`plan_tower` and `plan_sound_tower` find and check a model's towers from headers alone; `load_tower` reads one. A broken
or missing tower costs pictures, or sound, never text.

Owner: the engine thread. Read in this order: `tower` (the interface, and computing in pieces), `block` (layers of a
transformer, positions of patches, estimates of memory), any family's module, `load` (one row per family, then plan and
load).
"""

from runner.media.towers.plan import TowerPlan, load_tower, plan_sound_tower, plan_tower
from runner.media.towers.tower import Grid, SoundTower, Tower

__all__ = ["Grid", "SoundTower", "Tower", "TowerPlan", "load_tower", "plan_sound_tower", "plan_tower"]
