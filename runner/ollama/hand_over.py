"""Hand-over: replaces this process by Ollama's own runner, for a model that Ollama's runner serves better.

This happens only under `mlx-runner ollama serve`. The decision is made before any weight is read: it needs only the
headers of files. The process id stays the same, so that the host still has the child that it started.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from runner import logs
from runner.errors import ModelError, ReadError
from runner.logs import Log
from runner.model.architectures import FAMILIES, UNNEEDED
from runner.model.opened import OpenedModel
from runner.settings import OllamaRunner, Settings

if TYPE_CHECKING:
    from subprocess import Popen

log = Log(__name__)
Kind = Literal["pictures", "sound"]
_PACKAGES = {
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "muse_glimmer": "glimmer",
    "nemotron_h": "nemotron_h",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_next": "qwen3_5",
}
"""Name of an mlx-lm module -> the package of Ollama's sources that runs the same architectures."""
_KINDS: dict[Kind, tuple[str, str, Collection[str]]] = {
    "pictures": ("vision", "vision_config", _PACKAGES.values()),
    "sound": ("audio", "audio_config", ("gemma4",)),
}
"""Kind of media -> its tensors (a key of UNNEEDED), its key in config.json, the packages that serve it."""


def ollama_media(model: OpenedModel, packages: Collection[str]) -> set[Kind]:
    """Returns the kinds of media that Ollama's runner accepts for `model`. `packages` are those that accept any.

    As in that runner, a kind requires both a description in config.json and tensors. The capabilities that hosts list
    are incomplete for some families.
    """
    package = _PACKAGES.get(model.family.module) if model.architecture in FAMILIES else None
    if package not in packages:
        return set()
    return {
        kind
        for kind, (part, description, serving) in _KINDS.items()
        if package in serving
        and isinstance(model.config.get(description), dict)
        and any(map(UNNEEDED[part].match, model.checkpoint.tensors))
    }


def unknown_tower(model: OpenedModel, kind: Kind) -> str:
    """Returns the reason why perhaps only Ollama's runner can load the model's tower for `kind`. Returns "" if this
    runner can load it, or if no runner can, since tensors or fields are missing."""
    try:
        from runner.media.towers import plan_sound_tower, plan_tower  # needs MLX
    except ImportError:
        return ""  # loading the model will fail with the same error
    plan = plan_tower(model) if kind == "pictures" else plan_sound_tower(model)
    if plan is None:
        return "its tower is of an unknown kind"
    return plan.fault if plan.unknown else ""


_DEFAULT, _IGNORED = 0, 1  # SIG_DFL and SIG_IGN, as C has them
_WATCHER = Path(__file__).with_name("watcher.py")
_LOAD_S = 60.0  # time to read several gigabytes of CUDA libraries from the disk


class HandOver:
    """Decides which runner serves the model. Any thread may call `refuse`; a second call waits for the first."""

    def __init__(self, settings: Settings, host: int) -> None:
        """`host` is the id of the process that started this one."""
        self._host = host if settings.watch_parent else None
        self._model = settings.model
        self._ollama = settings.ollama if settings.hand_over != "off" else None
        self._offers_media = settings.hand_over == "auto" and not settings.no_media
        self._lock = threading.Lock()

    def refuse(self, error: ModelError) -> NoReturn:
        """Hands over the model after an error that prevents loading it, or ends the process with the error.

        A model on a failing disk (ReadError) is not handed over: Ollama's runner could not read it either.
        """
        with self._lock:
            if self._ollama is not None and not isinstance(error, ReadError):
                keep = "MLX_RUNNER_HAND_OVER=off ends with this refusal"
                self._hand_over(self._ollama, why=str(error), keep=keep)
            logs.die(error)

    def offer(self, model: OpenedModel) -> None:
        """Hands over the model if it takes pictures or sounds that only Ollama's runner can read."""
        if self._ollama is None or not self._offers_media:
            return
        for kind in sorted(ollama_media(model, self._ollama.media)):
            if fault := unknown_tower(model, kind):
                why = f"it takes {kind}, which this runner cannot read: {fault}"
                self._hand_over(self._ollama, why=why, keep="MLX_RUNNER_HAND_OVER=refused serves its text here")
                return

    def _hand_over(self, ollama: OllamaRunner, *, why: str, keep: str) -> None:
        """Replaces this process by Ollama's runner. Returns only if that is impossible."""
        if not _loads_mlx(ollama):
            log.info(
                "not handed over: Ollama's own MLX library does not load on this machine", model=self._model, why=why
            )
            return
        log.warning("handing over to Ollama's own runner", model=self._model, why=why, to_keep_it=keep)
        watcher = self._start_watcher()
        _set_signals(_DEFAULT)
        try:
            os.execve(ollama.command[0], ollama.command, ollama.environ)
        except OSError as error:
            _set_signals(_IGNORED)
            if watcher is not None:
                watcher.kill()
            log.warning("not handed over", executable=ollama.command[0], why=error.strerror or str(error))

    def _start_watcher(self) -> "Popen[bytes] | None":
        """Starts a process that ends this process after the host has ended, even when this process is Ollama's runner.
        The new process inherits no output streams, since a host waits until all their holders have ended."""
        if self._host is None:
            return None
        import subprocess  # imported here, since hardly any start needs it

        command = [sys.executable, "-I", "-S", str(_WATCHER), str(self._host), str(os.getpid())]
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        started = subprocess.Popen(command, stdin=null, stdout=pipe, stderr=null, start_new_session=True)
        assert started.stdout is not None
        if not started.stdout.readline():
            log.warning("Ollama's own runner will not end with its host", why="this system cannot watch a process")
        if os.getppid() != self._host:
            os._exit(1)
        return started


def _set_signals(handler: int) -> None:
    """Sets handlers of signals that Python ignores: an exec keeps that. `signal.signal` needs the main thread."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        ctypes.CDLL(None).signal(number, ctypes.c_void_p(handler))


def _loads_mlx(ollama: OllamaRunner) -> bool:
    """Returns True if Ollama's runner has an MLX library that can be loaded. Tries this in a process with that runner's
    library path. (On Linux, libraries for GPUs need drivers.)"""
    if sys.platform == "darwin":
        return True
    import subprocess

    null, found = subprocess.DEVNULL, list[Path]()
    if ollama.libraries is not None:
        found = [*sorted(ollama.libraries.glob("mlx_*/libmlxc.*"), reverse=True), *ollama.libraries.glob("libmlxc.*")]
    for library in found:
        command = [sys.executable, "-I", "-S", "-c", f"import ctypes; ctypes.CDLL({str(library)!r})"]
        try:
            # The process inherits no streams: a host would wait until they are closed.
            done = subprocess.run(
                command, env=ollama.environ, timeout=_LOAD_S, check=False, stdin=null, stdout=null, stderr=null
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return True
    return False
