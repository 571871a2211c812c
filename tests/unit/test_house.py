"""The import rules and the exclusive knowledge of modules (docs/architecture.md)."""

import ast
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

PACKAGES = ("protocol", "runner")
LAYERS = (
    ("__main__",),
    ("app",),
    ("cli", "ollama"),
    ("commands", "server"),
    ("engine",),
    ("grammar",),
    ("cache", "model", "tokenizer", "sampling", "media", "drafts"),
    ("process", "settings", "blas"),
    ("logs",),
    ("errors", "sizes", "terminal", "__version__"),
)
"""From top to bottom: a part imports only from the rows below its own, and within itself."""


@cache
def import_nodes(source: str) -> Sequence[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


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


def test_only_the_adapters_know_mlx_lms_cache_classes() -> None:
    users = users_of("mlx_lm.models.cache")
    assert users
    assert all(path.startswith(("runner/cache/layers/", "runner/model/")) for path in users)


def test_only_the_model_and_the_adapters_know_mlx_lm() -> None:
    users = users_of("mlx_lm")
    assert users
    assert all(path.startswith(("runner/cache/layers/", "runner/model/")) for path in users)


def test_the_server_and_the_protocol_never_touch_mlx() -> None:
    users = users_of("mlx")
    assert users
    assert all(
        path.startswith(("runner/engine/", "runner/cache/", "runner/model/", "runner/sampling/")) for path in users
    )


def test_pictures_are_prepared_without_mlx() -> None:
    assert all(not path.startswith("runner/media/") for path in users_of("mlx") | users_of("mlx_lm"))


def test_drafts_are_found_without_mlx() -> None:
    assert all(not path.startswith("runner/drafts/") for path in users_of("mlx") | users_of("numpy"))


def test_files_of_the_disk_cache_are_read_without_mlx() -> None:
    assert all(not path.startswith("runner/cache/disk/") for path in users_of("mlx") | users_of("mlx_lm"))


def test_one_module_knows_pillow() -> None:
    assert users_of("PIL") == {"runner/media/picture.py"}


def test_only_the_command_line_reads_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(word in path.read_text() for word in ("os.environ", "os.getenv", "sys.argv"))
    }
    # MLX finds other ranks by its environment; a follower and a watcher are processes of their own.
    ranks = {f"runner/engine/ranks/{name}.py" for name in ("follower", "followers", "group", "guard", "start")}
    assert readers == {
        "runner/__main__.py",
        "runner/app.py",
        "runner/blas/__init__.py",
        "runner/ollama/watcher.py",
        *ranks,
    }


def test_no_script_imports_tests() -> None:
    scripts = sorted((ROOT / "scripts").rglob("*.py"))
    assert len(scripts) > 50
    for path in scripts:
        assert all(name.split(".")[0] != "tests" for name in imports(path)), path


def test_a_file_fits_in_the_head() -> None:
    assert max(len(path.read_text().splitlines()) for path in sources()) <= 600
