"""Completion for shells, made from the table of flags: scripts that ask nobody and need nothing installed."""

from collections.abc import Sequence

from runner.cli.flags import CHECK_FLAGS, COMMANDS, FLAGS, TOP_FLAGS, Flag
from runner.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
_OF_COMMANDS = {"check": CHECK_FLAGS, "top": TOP_FLAGS}
_ABOUT = ("help", "version")


def completion(words: Sequence[str]) -> str:
    """The script for the shell that `words` name. UsageError for another one, or none."""
    match words:
        case ["bash"]:
            return _bash()
        case ["zsh"]:
            return _zsh(_bash())
        case ["fish"]:
            return _fish()
    raise UsageError(
        f"say for which shell: mlx-runner completion {'|'.join(SHELLS)}; for bash, put this into your ~/.bashrc:"
        " source <(mlx-runner completion bash)"
    )


def _bash() -> str:
    every = {flag.name: flag for flags in (FLAGS, *_OF_COMMANDS.values()) for flag in flags}.values()
    chosen = "\n".join(f'        --{flag.name}) words="{" ".join(flag.choices)}" ;;' for flag in every if flag.choices)
    paths = {kind: "|".join(f"--{flag.name}" for flag in every if _kind(flag) == kind) for kind in ("dir", "file")}
    others = "|".join(f"--{flag.name}" for flag in every if not flag.choices and _kind(flag) == "")
    of_commands = "\n".join(
        f'            {command}) words="{_names(flags)}" ;;' for command, flags in _OF_COMMANDS.items()
    )
    commands = " ".join(command.name for command in COMMANDS)
    return f"""# mlx-runner completion for bash: source <(mlx-runner completion bash)
_mlx_runner() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words="" begin="" entry
    if [[ $current == "=" ]]; then current=""; fi
    if [[ $previous == "=" ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    COMPREPLY=()
    case $previous in
{chosen}
        {paths["dir"]}) COMPREPLY=($(compgen -d -- "$current")); return ;;
        {paths["file"]}) COMPREPLY=($(compgen -f -- "$current")); return ;;
        {others}) return ;;
    esac
    if [[ -z $words ]]; then
        case ${{COMP_WORDS[1]}} in
{of_commands}
            completion) words="{" ".join(SHELLS)}" ;;
            version) words="" ;;
            *) words="{_names(FLAGS)}"; ((COMP_CWORD == 1)) && words="{commands} $words" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ ${{COMP_WORDS[1]}} == check && $current != -* && ${{#COMPREPLY[@]}} -eq 0 ]]; then
        COMPREPLY=($(compgen -d -- "$current"))
    fi
}}
complete -F _mlx_runner mlx-runner
"""


def _zsh(bash: str) -> str:
    lines = bash.splitlines()[1:]
    return "\n".join(
        (
            "# mlx-runner completion for zsh: source <(mlx-runner completion zsh)",
            "autoload -U +X compinit && compinit",
            "autoload -U +X bashcompinit && bashcompinit",
            *lines,
            "",
        )
    )


def _fish() -> str:
    lines = [
        "# mlx-runner completion for fish: mlx-runner completion fish > ~/.config/fish/completions/mlx-runner.fish",
        "complete -c mlx-runner -f",
    ]
    lines += [
        f"complete -c mlx-runner -n __fish_use_subcommand -a {command.name} -d {_quoted(command.short)}"
        for command in COMMANDS
    ]
    lines.append(f"complete -c mlx-runner -n '__fish_seen_subcommand_from completion' -a '{' '.join(SHELLS)}'")
    lines.append("complete -c mlx-runner -n '__fish_seen_subcommand_from check' -a '(__fish_complete_directories)'")
    for command, flags in (("", FLAGS), *_OF_COMMANDS.items()):
        seen = f"__fish_seen_subcommand_from {command}" if command else "__fish_use_subcommand"
        lines += [f"complete -c mlx-runner -n '{seen}' {_fish_flag(flag)}" for flag in flags]
    lines += [f"complete -c mlx-runner -l {name}" for name in _ABOUT]
    return "\n".join([*lines, ""])


def _fish_flag(flag: Flag) -> str:
    words = [f"-l {flag.name}", f"-d {_quoted(flag.short)}"]
    if not flag.is_switch:
        words.append("-r")
    if flag.choices:
        words.append(f"-a '{' '.join(flag.choices)}'")
    elif _kind(flag) == "dir":
        words.append("-a '(__fish_complete_directories)'")
    elif _kind(flag) == "file":
        words.append("-F")
    return " ".join(words)


def _names(flags: Sequence[Flag]) -> str:
    return " ".join(f"--{name}" for name in (*(flag.name for flag in flags), *_ABOUT))


def _kind(flag: Flag) -> str:
    """Of what stands behind it: a directory, a file, or neither."""
    last = flag.metavar.rpartition("|")[2]
    return {"DIR": "dir", "FILE": "file", "PATH": "file"}.get(last, "")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
