"""The flags of each command but the server."""

from runner.cli.flag import Flag, switch
from runner.cli.flags import COMPUTE, FLAGS

_CHECKED = ("models-dir", "context", "verify", "log-level", "draft", "dtype", "memory", "blas", "blas-threads")

CHECK_FLAGS = (
    *(flag for flag in FLAGS if flag.name in (*_CHECKED, "disk-cache")),
    switch(
        "output",
        "json",
        "print JSON instead of a table",
        "print one JSON object instead of the table; sizes are in bytes",
    ),
)
"""The flags of `mlx-runner check`."""

FOLLOW_FLAGS = (
    Flag(
        group=COMPUTE,
        name="listen",
        metavar="ADDRESS:PORT",
        short="address at which leaders reach this machine",
        help="the IPv4 address of this machine on one private network, and a port; 0 picks a free one, which the log"
        " shows",
    ),
    *(flag for flag in FLAGS if flag.name in ("secret-file", "models-dir", "log-level")),
)
"""The flags of `mlx-runner follow`."""

REPLAY_FLAGS = (
    Flag(
        group="model",
        name="model",
        metavar="NAME|DIR",
        short="the model, if it is elsewhere now",
        help="the name or the directory of the model, if it is not the recorded one",
    ),
    *(flag for flag in FLAGS if flag.name in ("models-dir", "log-level")),
)
"""The flags of `mlx-runner replay`."""

TOP_FLAGS = (
    Flag(
        group="on this machine",
        name="port",
        metavar="N",
        short="the runner's port on 127.0.0.1, instead of URL",
        help="the runner's port on 127.0.0.1, instead of URL; its log (`listening url=...`) and `ps` show it",
    ),
    switch(
        "output",
        "once",
        "print the current numbers and exit",
        "print the current numbers and exit, as happens without a terminal",
    ),
)
"""The flags of `mlx-runner top`."""
