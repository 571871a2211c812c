"""Access to the runner: for programs on this machine, and for no web page in a browser on it."""

from urllib.parse import urlsplit

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

HEADERS = ("Host", "Origin", "Sec-Fetch-Site")
"""The arguments of `is_local`, in order."""


def is_local(host: str | None, origin: str | None, fetch_site: str | None) -> bool:
    """Returns True if a request with these `Host`, `Origin` and `Sec-Fetch-Site` headers comes from a local program.

    A browser sends the page's own `Origin`, and after DNS rebinding the attacker's name as `Host`; for requests
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
