"""aiohttp's server without the modules that it imports and a runner does not use."""

import subprocess
import sys

_BEGIN = "import sys; from runner.process.lean_aiohttp import import_server; import_server()\n"


def _run(code: str, before: str = "") -> str:
    words = [sys.executable, "-c", before + _BEGIN + code]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


_MEANWHILE = """
import sys
class Other:
    def find_spec(name, *_):
        if name == "aiohttp.web":
            from email.message import Message
            print(Message.__module__)
sys.meta_path.insert(0, Other)
"""


def test_code_other_than_aiohttps_gets_the_modules_themselves() -> None:
    code = "import attr, tempfile; print(attr.s.__module__, tempfile.mkdtemp.__module__)"
    assert _run(code, _MEANWHILE) == "email.message\nattr._make tempfile\n"


def test_classes_of_attrs_take_their_fields_by_place_and_by_name() -> None:
    code = "from aiohttp import web; it = web.RouteDef('GET', '/x', print, kwargs={}); print(it.path, it.kwargs)"
    assert _run(code) == "/x {}\n"


def test_an_unknown_version_is_imported_whole() -> None:
    before = "import re, runner.process.lean_aiohttp as lean; lean._VERSION = re.compile('never')\n"
    assert _run("import aiohttp; print(aiohttp.ClientSession.__name__)", before) == "ClientSession\n"


def test_refusals_of_the_server_have_a_text() -> None:
    assert _run("from aiohttp import web; print(web.HTTPNotFound().text, web.HTTPNotFound().content_type)") == (
        "404: Not Found text/plain\n"
    )
