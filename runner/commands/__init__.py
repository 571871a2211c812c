"""The commands of the core that do not serve a model.

    check/__init__.py   `mlx-runner check`: examination.py finds every fault in the headers of a model; inspection.py
                        adds facts of the parts that would serve it; report_text.py prints the report;
                        with `--verify`, digests.py hashes the model's blobs, and trial.py loads and tries the model

A command takes its settings, prints, and ends the process. It imports heavy packages (MLX, rich) only when it runs.
`mlx-runner top` is runner/numbers/top.py, `replay` runner/tape/command.py, `follow` runner/ranks/service.py,
`ollama serve` runner/ollama; `completion` and `version` are in runner/cli.
"""
