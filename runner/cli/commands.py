"""The table of commands, from which their parsers, `--help` and the completion of shells are made."""

import msgspec

from runner.settings import CheckSettings, FollowSettings, ReplaySettings, Settings, TopSettings


class Argument(msgspec.Struct, frozen=True):
    """A word after the command that belongs to no flag."""

    group: str
    name: str
    metavar: str
    help: str
    is_needed: bool = False


class Command(msgspec.Struct, frozen=True):
    """A command of the program; without one it serves a model."""

    name: str
    words: str = ""
    """The words that may follow it, for `--help`."""
    short: str = ""
    program: str = ""
    """The words that lead to it, for its own help; empty: it has none."""
    usage: str = ""
    """The words that may follow there."""
    description: str = ""
    epilog: str = ""
    argument: Argument | None = None
    settings: type[msgspec.Struct] | None = None
    """The struct whose flags it takes; None: it takes none."""
    below: tuple["Command", ...] = ()
    """The commands that may follow it."""


OLLAMA_SERVE = Command(
    "serve",
    "[OLLAMA ...]",
    "start an installed Ollama with this runner",
    "mlx-runner ollama serve",
    "[--runner COMMAND] [OLLAMA [ARGUMENT ...]]",
    "Starts an installed Ollama whose MLX models run on this runner. The installation is not changed.",
    "Ollama and its runners inherit your environment: OLLAMA_HOST, OLLAMA_MODELS and the like work as usual, and so do"
    " the runner's own variables, which `mlx-runner --help` lists:\n"
    "MLX_RUNNER_KV_BITS=8 mlx-runner ollama serve\n"
    "\n"
    "Only MLX models (model_format safetensors) run on this runner; GGUF models stay with Ollama. Ollama's own runner"
    " also takes over MLX models that this runner refuses to load, and models whose pictures only it can read."
    " MLX_RUNNER_HAND_OVER changes that: `sound` also leaves it the models that take sound, `refused` only those that"
    " are refused here, `off` none.",
    Argument("what to start", "ollama", "OLLAMA", "Ollama's executable [ollama, from PATH]"),
)
OLLAMA = Command(
    "ollama",
    "serve",
    "start your Ollama with this runner for MLX models",
    "mlx-runner ollama",
    "COMMAND ...",
    "Commands for an installed Ollama. They do not change the installation.",
    "More: mlx-runner ollama serve --help.",
    below=(OLLAMA_SERVE,),
)
CHECK = Command(
    "check",
    "NAME|DIR",
    "report what a model is and every problem with it",
    "mlx-runner check",
    "NAME|DIR [flags]",
    "Reads the headers of a model, not its weights, and reports what it is and every problem that would keep it from"
    " loading. With --verify, also reads and tries all of it. Exit status 0: it would load; 1: it would not; 2: the"
    " command line is wrong.",
    "The flags mean the same as for `mlx-runner`, and have the same environment variables.",
    Argument("what to check", "model", "NAME|DIR", "a model in the Ollama store, or a Hugging Face style directory"),
    CheckSettings,
)
TOP = Command(
    "top",
    "[--port N | URL]",
    "watch a runner from another terminal",
    "mlx-runner top",
    "[--port N | URL] [--once]",
    "Shows the requests, tokens, memory and prefix cache of a runner until Ctrl-C. If the output is not a terminal,"
    " prints them once. The page at the runner's address shows more.",
    "Every flag can also be set by an environment variable: --port by MLX_RUNNER_PORT.",
    Argument("what to watch", "url", "URL", "the runner's address, such as http://127.0.0.1:11500, or its port"),
    TopSettings,
)
REPLAY = Command(
    "replay",
    "FILE",
    "compute a recording again (--record), and compare",
    "mlx-runner replay",
    "FILE [--model NAME|DIR] [flags]",
    "Computes again what `mlx-runner --record FILE` recorded, and compares every token and every event. Exit status 0:"
    " everything was equal; 1: something differed, or the recording cannot be replayed here; 2: the command line is"
    " wrong.",
    "All other settings are those of the recording.",
    Argument("what to replay", "file", "FILE", "the recording", is_needed=True),
    ReplaySettings,
)
FOLLOW = Command(
    "follow",
    "",
    "compute a part of a model for other machines",
    "mlx-runner follow",
    "--listen ADDRESS:PORT --secret-file FILE [flags]",
    "Waits for leaders (`mlx-runner --followers`) on other machines, and computes a part of a model for one of them at"
    " a time. Holds no model while it waits. Runs until Ctrl-C.",
    "Every flag can also be set by an environment variable: --listen by MLX_RUNNER_LISTEN. More: docs/ranks.md.",
    settings=FollowSettings,
)
COMPLETION = Command("completion", "SHELL", "tab completion: source <(mlx-runner completion bash)")
VERSION = Command("version", "", "show the versions of the runner, MLX and Python")
SERVER = Command(
    "",
    program="mlx-runner",
    usage="--model NAME|DIR [--port N] [flags]\n       mlx-runner COMMAND ...",
    description="Serves one MLX model on 127.0.0.1, to an Ollama host or to any HTTP client.",
    epilog="Defaults are shown in brackets. Every flag can also be set by an environment variable: --kv-bits by"
    " MLX_RUNNER_KV_BITS. More: docs/flags.md, docs/operating.md.",
    settings=Settings,
    below=(OLLAMA, CHECK, TOP, REPLAY, FOLLOW, COMPLETION, VERSION),
)
