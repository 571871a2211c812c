"""Towers: the encoders that turn patches of a picture, or rows of a sound, into rows of a text model's prompt. Owner:
the engine thread.

Read in this order: `tower` (the interface, and computing in pieces), `block` (layers of a transformer, positions of
patches, estimates of memory), the module of any family, `tower_plan` (finds, checks and loads a model's towers).
"""

from runner.media.towers.tower import Grid, SoundTower, Tower
from runner.media.towers.tower_plan import TowerPlan, load_tower, plan_sound_tower, plan_tower

__all__ = ["Grid", "SoundTower", "Tower", "TowerPlan", "load_tower", "plan_sound_tower", "plan_tower"]
