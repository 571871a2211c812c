"""Who may talk to the runner: programs on this machine, and no web page in its user's browser."""

from urllib.parse import urlsplit

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

TELLING = ("Host", "Origin", "Sec-Fetch-Site")
"""The headers that `is_local` asks for, in its order."""


def is_local(host: str | None, origin: str | None, fetch_site: str | None) -> bool:
    """Whether a request with these `Host`, `Origin` and `Sec-Fetch-Site` headers comes from a local program.

    A browser sends the page's own `Origin`, and after DNS rebinding the attacker's name as `Host`; for what it sends
    without an `Origin` (pictures, scripts, links) it says `cross-site`. Local programs send a loopback `Host` and no
    `Origin`, or a loopback one.
    """
    if fetch_site == "cross-site":
        return False
    return (host is None or _is_loopback(f"//{host}")) and (origin is None or _is_loopback(origin))


def _is_loopback(url: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return name in _LOOPBACK or name.endswith(".localhost")
