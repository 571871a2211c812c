"""Lets mlx-lm's text models compute over pictures, without touching their classes.

`forward` puts the parts into the module for one forward and takes them out again: `embedding` (rows of features in
place of looked-up rows), `rope` (positions with three channels, and shifted ones), `masks` (tokens of one picture that
see each other). A forward without pictures runs the module as it is. Owner: the engine thread.
"""
