"""The making of the demo model that sees.

`training.py` is the whole of it: `gallery.py` draws pictures, `tower.py` trains the tower on them, `text.py` the text
model on what the tower sees, in the talks of `dialogues.py`. `viewer.py` asks the result, `evaluation.py` counts.
"""
