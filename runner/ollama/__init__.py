"""Ollama around this runner: the launcher that puts it in place of Ollama's own, and the hand-over back to that.

`mlx-runner ollama serve` runs the launcher in a process that then becomes Ollama, and leaves only a process that cleans
up. `HandOver` belongs to the serving process. Read in this order:

    launcher.py     from the settings to a running Ollama, and the two ways to start it so that it finds the shim
    plan.py         the programs to start, found and checked
    directory.py    the private directory that Ollama is started from
    shim.py         a script in it that Ollama takes for its own executable, and that picks the runner for each model
    mlx_library.py  an empty MLX library in it, for hosts that refuse MLX models without one
    hand_over.py    in the runner: Ollama's own runner takes over a model that is not served here
    watcher.py      a program of its own: ends that runner after its host
"""
