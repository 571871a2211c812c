"""Makes the shim: the script that a host runs in place of its own executable (docs/internals/wire.md, 1.2, 1.3, 11)."""

import os
import shlex
from collections.abc import Mapping

from runner.ollama.plan import Plan, own_command
from runner.process.parent import CHANGED, FORCED, OLLAMA

_SHIM = """\
#!/bin/sh
# Ollama finds this in place of its own executable. MLX models run on this runner, everything else runs on Ollama.

# The runner may hand over to Ollama's own (runner/ollama/hand_over.py), which gets the environment of this script.
mlx_runner() {{
{tell}
{restore}
  exec {runner} "$@"
}}

# True for `--mlx-engine`, and for no engine and a model with a tag. GGUF runners get another engine, or a file.
is_mlx() (
  engine= model= expected=
  for word do
    case $expected in
      model) model=$word expected= ; continue ;;
      port) expected= ; continue ;;
    esac
    case $word in
      --model=* | -model=*) model=${{word#*=}} ;;
      --model | -model) expected=model ;;
      --port | -port) expected=port ;;
      --mlx-engine) engine=mlx ;;
      --*-engine) exit 1 ;;
    esac
  done
  [ "$engine" = mlx ] && exit 0
  case $model in /*) exit 1 ;; esac
  case ${{model##*/}} in *:*) exit 0 ;; esac
  exit 1
)

case ${{1-}} in
  runner) if is_mlx "$@"; then mlx_runner "$@"; fi ;;
  serve | start) exec {launcher} "$@" ;; # clients of some releases start a server if there is none
esac
exec {ollama} "$@"
"""


def shim(plan: Plan, environ: Mapping[str, str]) -> bytes:
    """Returns the script. `environ` is the environment from which the script restores variables for runners."""
    told = {"": str(plan.ollama), "_LIBRARIES": str(plan.libraries or ""), "_MEDIA": " ".join(plan.media)}
    tell = [f"  export {OLLAMA}{name}={shlex.quote(value)}" for name, value in told.items()]
    tell += [
        f'  unset {OLLAMA}_{name}; [ -z "${{{name}+set}}" ] || export {OLLAMA}_{name}="${name}"' for name in CHANGED
    ]
    restore = [
        f"  export {name}={shlex.quote(environ[name])}" if name in environ else f"  unset {name}" for name in FORCED
    ]
    runner = shlex.join(plan.runner)
    launcher = [*own_command(), "ollama", "serve", "--start", plan.start, "--runner", runner, str(plan.ollama)]
    text = _SHIM.format(
        tell="\n".join(tell),
        restore="\n".join(restore),
        runner=runner,
        launcher=shlex.join(launcher),
        ollama=shlex.quote(str(plan.ollama)),
    )
    return os.fsencode(text)
