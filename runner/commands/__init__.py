"""The commands that do something other than serve a model.

Each is a package with one entry point that takes its settings, prints, and ends the process; `runner/app.py` calls it.
They run in one thread, and import heavy packages (MLX, rich) only when they run.
Read the entry point first:

    check/__init__.py   `mlx-runner check`: examination.py finds every fault in the headers of a model; inspection.py
                        adds what would serve it, and asks the wings; report_text.py prints all of it;
                        with `--verify`, digests.py hashes the model's blobs, and
                        trial.py loads the model and tries what the table of abilities says
    top/__init__.py     `mlx-runner top`: view.py reads the numbers of a runner, and shows them as a table

`mlx-runner replay` is runner/tape/command.py, `follow` runner/ranks/service.py, `ollama serve` runner/ollama;
`completion` and `version` are in runner/cli.
"""
