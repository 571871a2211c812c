"""`GET /`: the page that shows what the runner is doing, drawn in the browser from `/v1/events`."""

from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).parent / "page"
_INDEX = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # The page may load its own files and ask this runner, nothing else; and no text is ever taken for markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",  # the next runner on this port may have another version
}


def add_page(router: web.UrlDispatcher) -> None:
    """Adds `/` and the page's own files below `/page/`. No other file is served."""
    router.add_get("/", _file)
    router.add_get("/page/{name}", _file)


async def _file(http: web.Request) -> web.Response:
    name = http.match_info.get("name", _INDEX)
    body = _read(name)
    if body is None:
        raise web.HTTPNotFound
    return web.Response(body=body, content_type=_TYPES[Path(name).suffix], charset="utf-8", headers=_HEADERS)


def _read(name: str) -> bytes | None:
    """Returns one of the page's files, read anew each time: they are small, and a page is opened seldom."""
    return next((path.read_bytes() for path in _FOLDER.iterdir() if path.name == name and path.suffix in _TYPES), None)
