"""The preparation of pictures in each family of models: their size, their rows, and the tokens around them.

`family` is what they have in common: the interface, reading numbers from config.json, cutting pixels into rows. Each
other module is one family (`gemma4` two). None imports numpy: they call methods of the arrays that they are given.
"""
