"""Turns the tokens of an answer into what its client receives: text, and log-probabilities if it asked for them.

`detokenizer.py` delivers whole characters, and holds text back as long as it may become a stop string;
`stop_strings.py` finds those; `logprobs.py` names the likeliest tokens by their text.

One `Detokenizer` belongs to one `Generation`, so to the engine thread. `StopStrings` are made on the event loop, when
the request is validated, and only read afterwards. No part calls MLX. Read `detokenizer.py` first.
"""
