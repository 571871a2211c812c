"""Keys and values in a few bits a number (`--kv-bits`). A wing.

`wing.KvBitsWing` finds the layers of the model that accept quantized keys and values, replaces the function that makes
layers, and sets the salt of the cache. `hadamard.py` has the quantized layer and the attention that reads it. Wings
that read the salt or the layers must come after this wing. Owner: the engine thread.
"""
