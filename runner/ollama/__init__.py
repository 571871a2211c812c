"""Runs this runner inside Ollama: a launcher puts it in place of Ollama's own runner; a hand-over undoes that.

`mlx-runner ollama serve` runs the launcher. Its process becomes Ollama, and leaves another one that cleans up at the
end. Read in this order:

    launcher.py     starts Ollama by the settings, in one of two ways, so that Ollama finds the shim
    plan.py         finds and checks the programs to start
    directory.py    makes the private directory from which Ollama is started
    shim.py         makes the script that Ollama takes for its own executable; it picks the runner for a model
    mlx_library.py  makes an empty MLX library, for hosts that refuse MLX models without one
    hand_over.py    in the runner: replaces this runner by Ollama's own, for a model that is not served here
    watcher.py      a separate program: ends Ollama's own runner after the end of its host
"""
