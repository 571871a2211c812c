"""The import rules and the exclusive knowledge of modules (docs/architecture.md)."""

import ast
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from scripts.tools.docs import imports as drawn
from tests import ROOT
from tests.lib.programs import python
from tests.sizes import CEILINGS, CORE, sizes

PACKAGES = ("protocol", "runner")
LAYERS = (
    ("__main__",),
    ("app",),
    ("cli", "ollama"),
    ("commands", "server"),
    ("build",),
    ("ranks",),
    ("tape",),
    ("assemble",),
    ("wings",),
    ("vlm",),
    ("disk", "drafts", "embeddings", "grammar", "kv_bits", "media", "numbers"),
    ("engine",),
    ("cache", "model", "tokenizer", "sampling"),
    ("process", "settings", "cpu", "device", "scan_calls", "trace"),
    ("logs",),
    ("addresses", "errors", "json_files", "sizes", "terminal"),
    ("versions", "__version__"),
)
"""From top to bottom: a part imports only from the rows below its own, and within itself."""
WINGS = ("disk", "drafts", "embeddings", "grammar", "kv_bits", "media", "numbers", "ranks", "tape", "vlm")


@cache
def import_nodes(source: str) -> Sequence[ast.Import | ast.ImportFrom]:
    return [*drawn.import_nodes(source)]


@cache
def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    for node in import_nodes(path.read_text()):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def row(part: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


def imports_that_point_up(path: Path) -> Iterator[str]:
    package, *rest = path.relative_to(ROOT).with_suffix("").parts
    for name in imports(path):
        at, *below = name.split(".")
        if package == "protocol":
            up = at == "runner"
        else:
            up = at == "runner" and below != [] and below[0] != rest[0] and row(below[0]) <= row(rest[0])
        if up:
            yield f"{path} imports {name}"


def test_imports_point_down() -> None:
    assert len(sources()) > 100
    assert [line for path in sources() for line in imports_that_point_up(path)] == []


def test_a_wing_imports_no_other_wing_but_ranks_the_tape_and_vlm_media() -> None:
    found = set[tuple[str, str]]()
    for path in sources():
        package, part, *_ = path.relative_to(ROOT).with_suffix("").parts
        if package == "runner" and part in WINGS:
            found |= {(part, name.split(".")[1]) for name in imports(path) if name.startswith("runner.")}
    assert {(wing, other) for wing, other in found if other in WINGS and other != wing} == {
        ("ranks", "tape"),
        ("vlm", "media"),
    }


def test_setuptools_builds_the_kernels_without_the_repository() -> None:
    names = [*imports(ROOT / "runner/cpu/extensions.py")]
    assert "setuptools" in names
    assert [name for name in names if name.startswith(PACKAGES)] == []


@pytest.mark.parametrize("part", ["cli", "server"])
def test_flags_are_read_and_requests_are_served_without_a_wing(part: str) -> None:
    readers = (path for path in sources() if path.is_relative_to(ROOT / "runner" / part))
    assert not {name.split(".")[1] for path in readers for name in imports(path) if "runner." in name} & {*WINGS}


def test_an_import_that_points_up_is_found() -> None:
    cache, protocol = ROOT / "runner/cache/trie.py", ROOT / "protocol/reader.py"
    assert list(imports_that_point_up(cache)) == list(imports_that_point_up(protocol)) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_: "import runner.engine.queue\nfrom runner.cache import node")
        assert list(imports_that_point_up(cache)) == [f"{cache} imports runner.engine.queue"]
        assert len(list(imports_that_point_up(protocol))) == 3


Graph = dict[str, set[str]]


def graph(package: str) -> Graph:
    """The modules of a package, each with those that it imports itself, if only for type checking."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / package).rglob("*.py")
    }
    return {module: set(_imported(path, paths.keys())) - {module} for module, path in paths.items()}


def _imported(path: Path, modules: Collection[str]) -> Iterator[str]:
    """The modules that a file imports: of `from a import b` the module a.b, or a where b is a name in it."""
    for node in import_nodes(path.read_text()):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        else:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from (each for each in (name if name in modules else node.module or "",) if each in modules)


def circles(edges: Graph) -> list[set[str]]:
    """The groups of modules that import each other, by however many steps."""
    reached = {module: _reachable(module, edges) for module in edges}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in edges}
    return [set(group) for group in groups if group]


def _reachable(module: str, edges: Graph) -> set[str]:
    reached, waiting = set[str](), [module]
    while waiting:
        new = edges[waiting.pop()] - reached
        reached |= new
        waiting.extend(new)
    return reached


@pytest.mark.parametrize("package", [*PACKAGES, "scripts"])
def test_no_modules_import_each_other(package: str) -> None:
    edges = graph(package)
    assert len(edges) > 3
    assert circles(edges) == []


def test_a_circle_is_found_however_long_it_is() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"a"}}
    assert circles(edges) == [{"a", "b", "c"}]


@pytest.mark.parametrize("child", ["runner.grammar.worker_process", "runner.media.decode_process"])
def test_a_process_that_parses_what_strangers_send_knows_nothing_of_the_engine(child: str) -> None:
    reached = _reachable(child, graph("runner"))
    assert "runner.process.child" in reached
    assert [module for module in reached if module.startswith("runner.engine")] == []


def test_an_import_for_type_checking_counts(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("if TYPE_CHECKING:\n    from p import a, B\n\ndef late():\n    import p.c\n")
    assert set(_imported(source, {"p", "p.a", "p.c", "p.d"})) == {"p", "p.a", "p.c"}


def users_of(module: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(name == module or name.startswith(f"{module}.") for name in imports(path))
    }


ADAPTERS = (
    "runner/cache/layers/",
    "runner/model/",
    "runner/drafts/heads/",
    "runner/drafts/assistant.py",
    "runner/drafts/dflash/",
    "runner/embeddings/modules/",
    "runner/kv_bits/",
    "runner/vlm/module.py",
)
"""The folders that know mlx-lm: its layer caches, its models, and models of ours that are built of its parts."""
KNOW_MLX = {
    "drafts": ("heads/", "assistant.py", "dflash/", "hidden_states", "kinds", "own_model", "rounds", "target", "wing"),
    "embeddings": ("embedder", "wing", "decisions/", "modules/"),
    "kv_bits": ("hadamard", "wing"),
    "media": ("towers/", "encoder", "forward"),
    "vlm": ("module", "sight"),
    "disk": ("namespace", "restores", "serialize"),
    "tape": ("taped_world",),
    "ranks": ("follower", "group", "rank_world", "share", "split", "start"),
}
"""The parts of each wing that import MLX, as the engine thread alone may. Everything else runs on any thread, or in
processes that must stay small."""


@pytest.mark.parametrize("module", ["mlx_lm", "mlx_lm.models.cache"])
def test_only_the_model_and_the_adapters_know_mlx_lm(module: str) -> None:
    users = users_of(module)
    assert users
    assert all(path.startswith(ADAPTERS) for path in users)


def test_the_server_the_protocol_and_the_rest_of_the_wings_never_touch_mlx() -> None:
    check = ("runner/commands/check/examination.py", "runner/commands/check/trial.py")
    core = (*(f"runner/{part}/" for part in CORE), "runner/assemble.py", "runner/device.py", *check)
    wings = tuple(f"runner/{wing}/{part}" for wing, parts in KNOW_MLX.items() for part in parts)
    users = users_of("mlx")
    assert users
    assert [path for path in users if not path.startswith((*core, *wings))] == []
    assert [path for path in users_of("numpy") if path.startswith("runner/drafts/")] == []


def test_the_event_loop_imports_no_mlx() -> None:
    """The routes of the server and of wings: the main thread imports them while the engine thread loads."""
    code = "import runner.server.routes, runner.numbers.endpoints, sys; print('mlx.core' in sys.modules)"
    assert python("-c", code, cwd=ROOT).stdout == "False\n"


def test_only_processes_of_their_own_know_pillow() -> None:
    assert users_of("PIL") == {"runner/media/picture.py", "runner/vlm/process.py"}


def test_only_the_modules_that_serve_its_models_know_mlx_vlm() -> None:
    assert users_of("mlx_vlm") == {"runner/vlm/process.py"}
    named = {str(path.relative_to(ROOT)) for path in sources() if "{LIBRARY}.models" in path.read_text()}
    assert named == {"runner/vlm/module.py", "runner/vlm/source.py"}


def test_only_the_command_line_reads_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(word in path.read_text() for word in ("os.environ", "os.getenv", "sys.argv"))
    }
    # MLX finds other ranks by its environment; a follower and a watcher are processes of their own.
    ranks = {f"runner/ranks/{name}.py" for name in ("follower", "group", "join_watchdog", "start")}
    assert readers == {
        "runner/__main__.py",
        "runner/app.py",
        "runner/cpu/__init__.py",
        "runner/ollama/watcher.py",
        "runner/vlm/process.py",  # for transformers
        *ranks,
    }


def test_no_script_imports_tests() -> None:
    scripts = sorted((ROOT / "scripts").rglob("*.py"))
    assert len(scripts) > 50
    for path in scripts:
        assert all(name.split(".")[0] != "tests" for name in imports(path)), path


def test_no_folder_outgrows_its_ceiling() -> None:
    """Raising one takes a sentence that says what a reader gets for the lines."""
    found = sizes()
    assert found.keys() == CEILINGS.keys()
    assert {name: count for name, count in found.items() if count > CEILINGS[name]} == {}


def test_a_public_name_stands_once() -> None:
    """Classes and functions; mlx-lm, `ChildProcess` and entries ask for a few by name."""
    names = Counter(
        node.name
        for path in sources()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} <= {"Model", "ModelArgs", "main", "serve"}


def test_a_folder_is_read_in_an_hour() -> None:
    folders = Counter(path.parent for path in sources())
    assert [folder for folder, count in folders.items() if count > 25] == []


def test_a_file_fits_in_the_head() -> None:
    assert max(len(path.read_text().splitlines()) for path in sources()) <= 600
