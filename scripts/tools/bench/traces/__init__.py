"""The traces of `scripts/bench trace`, and what replays them.

Read in this order: `form.py` (a trace, and its files), `generator.py` (situations of agents and chats), `bounds.py`
(the least that any cache computes, and policies that know the future), `simulated.py` (the product's own cache, without
a model), `served.py` (the runner over HTTP).
"""
