"""A store of Ollama 0.40: two trees of tags, lists of manifests, names by digest (docs/internals/store.md, 1)."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from runner.commands.check.report_text import as_text
from runner.errors import ModelError
from runner.model import open_model
from runner.model.sources.manifest import stored_tags
from scripts.tools.models.store import JSON, LIST, MANIFEST, Store, write_list, write_store, write_tag
from tests.model.loading.conftest import Checkpoints, checked

GGUF: Mapping[str, object] = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": [{}], "runner": "llamacpp"}
GONE = f"sha256:{'0' * 64}"


@pytest.fixture
def store(checkpoint: Checkpoints, tmp_path: Path) -> Store:
    """One model in the old tree, under `old`."""
    return write_store(tmp_path / "models", "old", checkpoint("llama"))


def copied(store: Store, name: str) -> dict[str, object]:
    """The manifest of `old` with a mark by which it is told from it: another file."""
    return {**store.manifest, "layers": [*store.layers, store.add_blob(name.encode(), JSON, "mark.json")]}


def mark(store: Store, name: str) -> str:
    """The mark of the model that is opened by a name; that of `old` is empty."""
    return (open_model(name, store.models_dir).checkpoint.file("mark.json") or b"").decode()


def refusal(store: Store, name: str) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(name, store.models_dir)
    return str(caught.value)


def digest_of(store: Store, document: Mapping[str, object]) -> str:
    data = json.dumps(document, separators=(",", ":")).encode()
    return str(store.add_blob(data, MANIFEST)["digest"])


def anchor(store: Store, tag: Path) -> None:
    """Leaves `old` to releases before 0.40: the child for MLX, whose layers name the list and its own manifest too."""
    document = tag.resolve().read_bytes()
    extra = [store.add_blob(document, LIST), store.add_blob(json.dumps(store.manifest).encode(), MANIFEST)]
    store.manifest = {**store.manifest, "runner": "mlx", "layers": [*store.layers, *extra]}


def pull(store: Store) -> None:
    tag = write_list(store.models_dir, "old", [("llamacpp", GGUF), ("mlx", copied(store, "new"))])
    store.blob(digest_of(store, GGUF)).unlink()
    anchor(store, tag)


def create(store: Store) -> None:
    write_tag(store.models_dir, "old", copied(store, "new"))
    shutil.rmtree(store.models_dir / "manifests")


def copy(store: Store) -> None:
    """Of a list: it is narrowed to what is there."""
    write_list(store.models_dir, "old", [("mlx", copied(store, "new"))])
    shutil.rmtree(store.models_dir / "manifests")


def remove_child(store: Store) -> None:
    pull(store)
    write_list(store.models_dir, "old", [("mlx", copied(store, "new"))])


def downgrade(store: Store) -> None:
    """A pull by an older release, whose pruning takes what it does not know."""
    write_tag(store.models_dir, "old", store.manifest).resolve().unlink()
    store.manifest = copied(store, "new")


def convert(store: Store) -> None:
    """By llama.cpp's runner, whose models lie in the old tree too, by their digests."""
    anchor(store, write_list(store.models_dir, "old", [("mlx", copied(store, "new")), ("llamacpp", GGUF)]))
    shadow = store.models_dir / "manifests/registry.ollama.ai/library/llamacpp" / digest_of(store, GGUF)[7:]
    shadow.parent.mkdir()
    shadow.write_text(json.dumps(GGUF))


@pytest.mark.parametrize("command", [pull, create, copy, remove_child, downgrade, convert])
def test_what_each_command_leaves_is_opened(command: Callable[[Store], None], store: Store) -> None:
    command(store)
    assert mark(store, "old") == "new"
    assert checked("old", store.models_dir).loads
    assert [name.short for name, _ in stored_tags(store.models_dir) if name.model == "old"] == ["old:latest"]


@pytest.mark.parametrize("form", ["link", "copy", "hard link"])
def test_a_tag_of_the_new_tree_comes_first(form: str, store: Store) -> None:
    for name in ("new", "old"):
        write_tag(store.models_dir, name, copied(store, name), form)  # type: ignore[arg-type]  # a parameter
        assert mark(store, name) == name


def test_a_link_that_leads_nowhere_leaves_the_old_tree(store: Store) -> None:
    for name in ("old", "alone"):
        tag = write_tag(store.models_dir, name, copied(store, name))
        tag.resolve().unlink()
    assert mark(store, "old") == ""
    assert "no such file or directory" in refusal(store, "alone")
    assert {name.short for name, _ in stored_tags(store.models_dir)} == {"old:latest"}


def spoiled(change: Callable[[Path], object]) -> Callable[[Store], object]:
    """Changes the tag of the new tree that stands beside the one of the old tree."""
    return lambda store: change(write_tag(store.models_dir, "old", copied(store, "new"), "copy"))


def linked(target: Callable[[Store], Path]) -> Callable[[Store], object]:
    def change(store: Store) -> None:
        tag = write_tag(store.models_dir, "old", copied(store, "new"))
        path = target(store)
        path.parent.mkdir(parents=True, exist_ok=True)
        tag.resolve().rename(path)
        tag.unlink()
        tag.symlink_to(path)

    return change


def as_directory(tag: Path) -> None:
    tag.unlink()
    tag.mkdir()


def as_circle(tag: Path) -> None:
    tag.unlink()
    tag.symlink_to(tag)


def through_a_linked_folder(store: Store) -> None:
    folder = write_tag(store.models_dir, "old", copied(store, "new"), "copy").parent
    folder.rename(store.models_dir / "elsewhere")
    folder.symlink_to(store.models_dir / "elsewhere")


BAD = {
    "a directory": (spoiled(as_directory), "is a directory"),
    "empty": (spoiled(lambda tag: tag.write_bytes(b"")), "Expecting value"),
    "cut": (spoiled(lambda tag: tag.write_bytes(b"{")), "Expecting property name"),
    "changed": (
        lambda store: write_tag(store.models_dir, "old", copied(store, "new")).resolve().write_bytes(b"{}"),
        "digest mismatch",
    ),
    "a link to another name": (linked(lambda store: store.models_dir / "blobs" / "other"), "is not a sha256 blob"),
    "a link out of the store": (
        linked(lambda store: store.models_dir.parent / "away" / f"sha256-{'1' * 64}"),
        "does not match blob",
    ),
    "below a linked folder": (through_a_linked_folder, "resolves outside manifest directory"),
    "a circle of links": (spoiled(as_circle), "too many levels of symbolic links"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_tag_of_the_new_tree_is_an_error(what: str, store: Store) -> None:
    change, text = BAD[what]
    change(store)
    assert text in refusal(store, "old")


@pytest.mark.parametrize("folder", [".", "blobs"])
def test_a_folder_of_the_store_may_be_a_link(folder: str, store: Store) -> None:
    write_tag(store.models_dir, "new", copied(store, "new"))
    write_tag(store.models_dir, "copy", copied(store, "copy"), "copy")
    path = store.models_dir / folder
    shutil.move(path, store.models_dir.parent / "elsewhere")
    path.symlink_to(store.models_dir.parent / "elsewhere")
    assert (mark(store, "new"), mark(store, "copy"), mark(store, "old")) == ("new", "copy", "")


def test_both_names_of_the_registry_are_one_host_and_ports_are_escaped(store: Store) -> None:
    write_tag(store.models_dir, "new", copied(store, "new"))
    for name in (
        "new",
        "library/new",
        "ollama.com/library/new",
        "registry.ollama.ai/library/new",
        "OLLAMA.COM/library/new",
    ):
        assert mark(store, name) == "new"
    write_tag(store.models_dir, "localhost:5000/a/b", copied(store, "private"))
    assert (store.models_dir / "manifests-v2/localhost%3A5000/a/b/latest").is_symlink()
    assert mark(store, "localhost:5000/a/b") == "private"
    old = store.models_dir / "manifests/ollama.com/library/legacy/latest"
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps(copied(store, "legacy")))
    assert mark(store, "legacy") == mark(store, "registry.ollama.ai/library/legacy") == "legacy"
    names = [name.short for name, _ in stored_tags(store.models_dir)]
    assert sorted(names) == ["legacy:latest", "localhost:5000/a/b:latest", "new:latest", "old:latest"]


def test_a_name_that_differs_in_case_is_found_after_the_exact_ones(store: Store) -> None:
    for name in ("OLD", "Two"):
        write_tag(store.models_dir, name, copied(store, name))
    assert (mark(store, "OLD"), mark(store, "old"), mark(store, "Old"), mark(store, "two")) == ("OLD", "", "OLD", "Two")


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("order", [("llamacpp", "mlx"), ("mlx", "llamacpp"), ("", "ggml", " MLX ", "mlx")])
def test_of_a_list_the_first_child_for_this_runner_is_taken(order: tuple[str, ...], inline: bool, store: Store) -> None:
    children = [(each, copied(store, each) if "mlx" in each.lower() else GGUF) for each in order]
    write_list(store.models_dir, "both", children, inline=inline)
    assert mark(store, "both") == next(each for each in order if "mlx" in each.lower())


def test_a_child_that_was_not_pulled_or_is_damaged_is_an_error(store: Store) -> None:
    child = copied(store, "child")
    write_list(store.models_dir, "both", [("mlx", child), ("mlx", store.manifest), ("llamacpp", GGUF)])
    blob = store.blob(digest_of(store, child))
    blob.write_bytes(b"{}")
    assert "digest mismatch" in refusal(store, "both")
    blob.unlink()
    text = refusal(store, "both")
    assert "no compatible manifest found for runners: mlx" in text
    assert "mlx (safetensors, not pulled), mlx (safetensors), llamacpp (gguf)" in text
    assert '"runner": "mlx"' in text


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([], "no compatible manifest found for runners: mlx (in the list "),
        ([{"mediaType": MANIFEST, "digest": GONE, "runner": "ggml"}], "ggml (no format, not pulled)"),
        ([{"mediaType": MANIFEST, "digest": GONE}], "no runner (no format, not pulled)"),
        ([{"mediaType": "other", "digest": GONE, "runner": "mlx"}], "no compatible manifest"),
        ([{"mediaType": LIST, "digest": GONE, "runner": "mlx"}], "nested manifest lists are not supported"),
        ([{"manifests": []}], "nested manifest lists are not supported"),
        ([{"digest": "sha256:zz", "runner": "ggml"}], "invalid digest format"),
        ([{"runner": "mlx"}], "invalid digest format: None"),
        (["x"], "want a list of manifests, found ['x']"),
        (7, "want a list of manifests, found 7"),
    ],
)  # fmt: skip
def test_a_list_without_a_child_for_this_runner_is_refused(entries: object, text: str, store: Store) -> None:
    write_tag(store.models_dir, "list", {"mediaType": LIST, "manifests": entries})
    assert text in refusal(store, "list")


def test_a_list_behind_a_child_is_refused(store: Store) -> None:
    write_list(store.models_dir, "list", [("mlx", {"mediaType": LIST, "manifests": []})])
    assert "nested manifest lists are not supported" in refusal(store, "list")


def test_a_model_is_named_by_the_digest_of_its_manifest(store: Store) -> None:
    plain, child = digest_of(store, copied(store, "plain")), copied(store, "child")
    whole = hashlib.sha256(write_list(store.models_dir, "both", [("llamacpp", GGUF), ("mlx", child)]).read_bytes())
    hexadecimal = plain.removeprefix("sha256:")
    for name in (f"sha256-{hexadecimal}", f"sha256-{hexadecimal}:latest", hexadecimal[:12], hexadecimal.upper()):
        assert mark(store, name) == "plain"
    assert (
        mark(store, digest_of(store, child).replace(":", "-")) == mark(store, f"sha256-{whole.hexdigest()}") == "child"
    )
    assert "no such file or directory" in refusal(store, f"sha256-{'0' * 64}")
    assert "parse manifest" in refusal(store, str(store.layer("model.norm.weight")["digest"]).replace(":", "-"))
    for digits in ("a" * 12, "a" * 63):
        write_tag(store.models_dir, digits, copied(store, "like a digest"))
        assert mark(store, digits) == "like a digest"
    for end in "12":
        store.blob(f"sha256-{'b' * 63}{end}").write_bytes(b"{}")
    store.blob(f"sha256-{'b' * 20}").write_bytes(b"a temporary file")
    assert f'ambiguous digest prefix "{"b" * 12}"' in refusal(store, "b" * 12)


def test_the_anchor_of_a_list_loads_and_temporary_files_are_not_tags(store: Store) -> None:
    layers = [{"mediaType": kind, "digest": GONE, "size": 10} for kind in (LIST, MANIFEST)]
    store.manifest = {**store.manifest, "layers": [*store.layers, *layers]}
    tag = write_tag(store.models_dir, "new", copied(store, "new"))
    for name in (".manifest-123", ".DS_Store"):
        (tag.parent / name).write_text("{")
    assert mark(store, "old") == ""
    assert {name.short for name, _ in stored_tags(store.models_dir)} == {"old:latest", "new:latest"}


def test_a_tag_that_is_replaced_while_it_is_read_stays_what_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = write_tag(store.models_dir, "new", copied(store, "new"))
    opened = open_model("new", store.models_dir)
    tag.unlink()
    assert opened.checkpoint.manifest == copied(store, "new")
    assert opened.checkpoint.path == tag


def test_check_names_the_file_and_the_children(store: Store) -> None:
    child = copied(store, "child")
    write_list(store.models_dir, "both", [("llamacpp", GGUF), ("mlx", child)])
    found = checked("both", store.models_dir)
    assert found.loads
    assert found.path == str(store.blob(digest_of(store, child)))
    assert found.children == ["llamacpp (gguf)", "mlx (safetensors)"]
    assert "list of       llamacpp (gguf), mlx (safetensors); the first for mlx is taken\n" in as_text(found)
    assert checked("old", store.models_dir).children == []
    (problem,) = checked("absent", store.models_dir).problems
    assert "it holds both:latest, old:latest." in problem
