"""The demo model that sees: its little world, how its pictures are drawn, and the talks that the demo holds with it.

`world.py` and `talks.py` say what is asked and answered; `drawing.py` makes the pictures, `held_out.py` those that
training never shows.
"""
