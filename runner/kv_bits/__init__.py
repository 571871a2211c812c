"""Keys and values in a few bits a number (`--kv-bits`). A wing.

`wing.KvBitsWing` tries which layers of the model accept quantized keys and values, replaces the function that makes
layers, and salts the cache. `hadamard.py` has the layer, its adapter, and the attention that reads it. Wings that read
the salt or the layers come after this one. Owner: the engine thread.
"""
