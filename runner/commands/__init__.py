"""The commands of the core that do not serve a model.

    check/__init__.py   `mlx-runner check`: examination.py finds every fault in the headers of a model; inspection.py
                        adds facts from the code that would serve the model; report_text.py formats the report;
                        with `--verify`, digests.py hashes the model's blobs, and trial.py loads and tries the model

A command gets its settings, prints, and ends the process. Heavy packages (MLX, rich) are imported only when a command
runs. Other commands: `top` is runner/numbers/top.py, `replay` is runner/tape/command.py, `follow` is
runner/ranks/service.py, `ollama serve` is runner/ollama, `completion` and `version` are in runner/cli.
"""
