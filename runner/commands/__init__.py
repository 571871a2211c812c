"""The commands that do something other than serve a model.

Each is a package with one entry point that takes its settings, prints, and ends the process; `runner/app.py` calls it.
They run in one thread, `follow` in one for each connection, and import heavy packages (MLX, rich) only when they run.
Read the entry point first:

    check/__init__.py   `mlx-runner check`: facts.py inspects the headers of a model, text.py prints what it found
    top/__init__.py     `mlx-runner top`: feed.py reads the numbers of a runner, view.py makes them a table, screen.py
                        shows it
    follow/__init__.py  `mlx-runner follow`: service.py lets leaders in, one at a time, and starts what follows each

`mlx-runner ollama serve` is runner/ollama; `completion` and `version` are in runner/cli.
"""
