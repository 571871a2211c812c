"""The parts of the engine that depend on the operating system or on the device, not on requests.

`wakeup.py` wakes the event loop from the engine thread without letting go of the GIL; `Engine.start` makes it, on the
event loop. `warmup.py` computes what a first request would, on the engine thread, before the server says that it is
ready; `assemble.py` chooses how much of it.
"""
