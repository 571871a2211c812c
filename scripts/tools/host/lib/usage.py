"""The resources of a process, as the system reports them."""

import os
import subprocess
import sys
from pathlib import Path


def rss_bytes(pid: int) -> int:
    if sys.platform == "linux":
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True).stdout) * 1024


def descriptors(pid: int) -> int | None:
    """Returns the number of open file descriptors; None where the system does not tell."""
    directory = Path(f"/proc/{pid}/fd")
    return len(list(directory.iterdir())) if directory.is_dir() else None
