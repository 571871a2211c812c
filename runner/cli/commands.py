"""The table of commands, for `--help` and the completion of shells."""

from runner.cli.flag import Command

COMMANDS = (
    Command("ollama", "serve", "start your Ollama with this runner for MLX models"),
    Command("check", "NAME|DIR", "report what a model is and every problem with it"),
    Command("top", "[--port N | URL]", "watch a runner from another terminal"),
    Command("replay", "FILE", "compute a recording again (--record), and compare"),
    Command("follow", "", "compute a part of a model for other machines"),
    Command("completion", "SHELL", "tab completion: source <(mlx-runner completion bash)"),
    Command("version", "", "show the versions of the runner, MLX and Python"),
)

OLLAMA_COMMANDS = (Command("serve", "[OLLAMA ...]", "start an installed Ollama with this runner"),)
"""The commands below `mlx-runner ollama`."""
