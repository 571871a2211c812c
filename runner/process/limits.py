"""File descriptors: every connection takes one, and the usual limit of a shell is 256 or 1024."""

import resource
from pathlib import Path

_MACOS_MOST = 10240  # where the hard limit is "infinity", which cannot be set


def raise_limit() -> None:
    """Raises the limit on open files to what the system allows, as Go programs do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, _MACOS_MOST):
        if wanted != resource.RLIM_INFINITY and wanted <= soft:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            continue
        return


def free_descriptors() -> int:
    """Returns how many more files this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(list(Path("/dev/fd").iterdir()))
