"""Cases 12.1-32: the store of hosts from 0.40, whose tags lie in a second tree, and may list several manifests."""

import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from scripts.tools.conformance.assertions import ALPHABET, expect
from scripts.tools.conformance.cases import Need, Section, argv
from scripts.tools.conformance.models import MAIN, SMALL
from scripts.tools.conformance.runners import Target
from scripts.tools.conformance.scripted_model import CONTEXT, SMALL_CONTEXT
from scripts.tools.conformance.spawn import answer, exited, failed
from scripts.tools.host.lib import Client, Generation
from scripts.tools.models.store import MANIFEST, Store, manifest_path, write_list, write_tag

NEW_STORE = Section("Store since October 2026")
HAS = Need(lambda generation: generation.new_store, "the host's store has one tree")
GGUF: Mapping[str, object] = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": [{}]}
_CONTEXTS = {CONTEXT: MAIN, SMALL_CONTEXT: SMALL}


def stored(generation: Generation) -> Hashable:
    """Returns the arguments of the process, and the form of the store."""
    return argv(generation), generation.new_store


class Scratch(Store):
    """A store for one case: the old tree has the main model and the small one, as `main` and `small`."""

    def __init__(self, models_dir: Path, origin: Path) -> None:
        super().__init__(models_dir, manifest_path(models_dir, "main"))
        shutil.copytree(origin / "blobs", models_dir / "blobs", copy_function=os.link)
        self.main, self.small = (Store(origin, manifest_path(origin, name)).manifest for name in (MAIN, SMALL))
        self.manifest = self.main
        Store(models_dir, manifest_path(models_dir, "small")).manifest = self.small

    def digest(self, document: Mapping[str, object]) -> str:
        return str(self.add_blob(json.dumps(document, separators=(",", ":")).encode(), MANIFEST)["digest"])


@asynccontextmanager
async def scratch(target: Target) -> AsyncIterator[Scratch]:
    with tempfile.TemporaryDirectory(dir=target.runners.models_dir.parent) as directory:
        yield Scratch(Path(directory) / "models", target.runners.models_dir)


async def opened(target: Target, store: Store, name: str, models_dir: Path | None = None) -> str:
    """Returns which of the two models a name opens, by its context length."""
    environment = {"OLLAMA_MODELS": str(models_dir or store.models_dir)}
    async with target.spawn(name, environment=environment) as process, Client(process.port) as client:
        return _CONTEXTS[(await client.status()).context_length]


async def refused(target: Target, store: Store, name: str) -> str:
    """Returns the line with which a name is refused. It must be one, and the exit status not 0."""
    async with target.spawn(name, environment={"OLLAMA_MODELS": str(store.models_dir)}, ready=False) as process:
        told = await failed(process)
        assert await exited(process, 5.0), f"exit status 0 for {name}"
        errors = [line for line in process.output.lines if line.startswith("Error:")]
        expect(f"error lines for {name}", len(errors), 1)
        return told


async def refuses(target: Target, store: Store, name: str, *words: str) -> None:
    """The name is refused, in one line with these words."""
    told = (await refused(target, store, name)).lower()
    for word in words:
        assert word.lower() in told, f"{name} is refused with {told!r}, which lacks {word!r}"


@NEW_STORE.case("12.1-3", "forms", stored, HAS)
async def a_tag_is_a_link_or_a_copy(target: Target) -> None:
    """A tag of the new tree is a symbolic link, a copy or a hard link of its blob."""
    async with scratch(target) as store:
        for form in ("copy", "hard link", "link"):
            write_tag(store.models_dir, "new", store.main, form)
            expect(f"model of a {form}", await opened(target, store, "new"), MAIN)
        async with target.spawn("new", environment={"OLLAMA_MODELS": str(store.models_dir)}) as process:
            expect("answer", await answer(target, process), ALPHABET)


@NEW_STORE.case("12.4", "new-first", stored, HAS)
async def the_new_tree_comes_first(target: Target) -> None:
    """If both trees have the tag, the new tree counts."""
    async with scratch(target) as store:
        write_tag(store.models_dir, "main", store.small)
        expect("model", await opened(target, store, "main"), SMALL)


@NEW_STORE.case("12.5-6", "dangling", stored, HAS)
async def a_dangling_link_is_no_tag(target: Target) -> None:
    """If the blob of a tag is gone, the old tree's tag counts; without one there is no such model."""
    async with scratch(target) as store:
        for name in ("main", "alone"):
            write_tag(store.models_dir, name, {**store.small, "gone": name}).resolve().unlink()
        expect("model", await opened(target, store, "main"), MAIN)
        await refuses(target, store, "alone", "read manifest")


@NEW_STORE.case("12.7", "bad-tag", stored, HAS)
async def a_bad_tag_is_an_error(target: Target) -> None:
    """A tag of the new tree that is a directory, empty, or not JSON is an error, whatever the old tree has."""
    async with scratch(target) as store:
        changes: tuple[Callable[[Path], object], ...] = (
            lambda tag: tag.write_bytes(b""),
            lambda tag: tag.write_bytes(b"{"),
            _as_directory,
        )
        for change in changes:
            change(write_tag(store.models_dir, "main", store.small, "copy"))
            await refused(target, store, "main")


def _as_directory(tag: Path) -> None:
    tag.unlink()
    tag.mkdir()


@NEW_STORE.case("12.8-9", "bad-link", stored, HAS)
async def links_are_checked(target: Target) -> None:
    """A link must lead to a blob of the store, and the blob's content must have the digest in its name."""
    async with scratch(target) as store:
        tag = write_tag(store.models_dir, "changed", {**store.main, "changed": 1})
        tag.resolve().write_text("{}")
        await refuses(target, store, "changed", "digest mismatch")
        for name, place in (("blobs/other", "other"), ("away", "sha256-" + "1" * 64)):
            path = store.models_dir.parent / name if name == "away" else store.models_dir / "blobs"
            path.mkdir(exist_ok=True)
            (path / place).write_text(json.dumps(store.main))
            tag.unlink()
            tag.symlink_to(path / place)
            await refuses(target, store, "changed", "read manifest")


@NEW_STORE.case("12.10", "linked-folders", stored, HAS)
async def folders_may_be_links(target: Target) -> None:
    """The store, or its folder of blobs, may be a link itself."""
    async with scratch(target) as store:
        write_tag(store.models_dir, "new", store.small)
        link = store.models_dir.parent / "link"
        link.symlink_to(store.models_dir)
        expect("model below a link", await opened(target, store, "new", link), SMALL)
        blobs = (store.models_dir / "blobs").rename(store.models_dir.parent / "blobs")
        (store.models_dir / "blobs").symlink_to(blobs)
        expect("model with linked blobs", await opened(target, store, "new"), SMALL)


@NEW_STORE.case("12.11-13", "hosts", stored, HAS)
async def names_of_registries_are_found(target: Target) -> None:
    """Both names of the public registry are one, in either tree; a port is escaped in the new one."""
    async with scratch(target) as store:
        write_tag(store.models_dir, "new", store.small)
        for name in ("library/new", "registry.ollama.ai/library/new", "OLLAMA.COM/library/new:latest"):
            expect(f"model of {name}", await opened(target, store, name), SMALL)
        old = store.models_dir / "manifests"
        shutil.copytree(old / "registry.ollama.ai", old / "ollama.com")
        shutil.rmtree(old / "registry.ollama.ai")
        expect("model below ollama.com", await opened(target, store, "main"), MAIN)
        write_tag(store.models_dir, "localhost:5000/a/b", store.small)
        expect("model with a port", await opened(target, store, "localhost:5000/a/b"), SMALL)


@NEW_STORE.case("12.14", "case", stored, HAS)
async def case_counts_last(target: Target) -> None:
    """A name that differs only in case is found, unless the exact name exists."""
    async with scratch(target) as store:
        write_tag(store.models_dir, "New", store.small)
        expect("model of new", await opened(target, store, "new"), SMALL)
        write_tag(store.models_dir, "MAIN", store.small)
        expect("model of main", await opened(target, store, "main"), MAIN)


@NEW_STORE.case("12.15-16", "lists", stored, HAS)
async def the_child_for_mlx_is_taken(target: Target) -> None:
    """In a list the child for MLX counts, at any place."""
    async with scratch(target) as store:
        children = (("llamacpp", GGUF), ("mlx", store.small))
        for order in (1, -1):
            write_list(store.models_dir, "both", children[::order])
            expect("model", await opened(target, store, "both"), SMALL)


@NEW_STORE.case("12.17-18", "child-gone", stored, HAS)
async def a_child_must_be_there(target: Target) -> None:
    """A list whose child for MLX is not in the store, or damaged, is refused."""
    async with scratch(target) as store:
        child = {**store.small, "child": 1}
        write_list(store.models_dir, "both", (("llamacpp", GGUF), ("mlx", child)))
        blob = store.blob(store.digest(child))
        blob.unlink()
        await refuses(target, store, "both", "no compatible manifest found for runners: mlx")
        blob.write_text("{}")
        await refuses(target, store, "both", "digest mismatch")


@NEW_STORE.case("12.19-21", "child-forms", stored, HAS)
async def children_have_several_forms(target: Target) -> None:
    """A child may stand in the list itself, with its runner's name in capitals; a child without a runner is skipped."""
    async with scratch(target) as store:
        write_list(store.models_dir, "inline", [("mlx", store.small)], inline=True)
        expect("model of a child that is written out", await opened(target, store, "inline"), SMALL)
        write_list(store.models_dir, "capitals", [("", store.main), (" MLX ", store.small)])
        expect("model of a child for ' MLX '", await opened(target, store, "capitals"), SMALL)


@NEW_STORE.case("12.22-26", "bad-lists", stored, HAS)
async def bad_lists_are_refused(target: Target) -> None:
    """A list in a list, an empty one, one without MLX, and children that are no models are refused in one line."""
    async with scratch(target) as store:
        inner = json.loads(write_list(store.models_dir, "inner", [("mlx", store.main)]).read_text())
        lists: dict[str, list[dict[str, object]]] = {
            "nested": [{"mediaType": inner["mediaType"], "digest": store.digest(inner), "runner": "mlx"}],
            "empty": [],
            "other": [{"mediaType": MANIFEST, "digest": store.digest(GGUF), "runner": "ggml"}],
            "bare": [{**store.main, "layers": [], "runner": "mlx"}],
            "malformed": [{"mediaType": MANIFEST, "digest": "sha256:zz", "runner": "mlx"}],
        }
        for name, manifests in lists.items():
            write_tag(store.models_dir, name, {**inner, "manifests": manifests})
            await refuses(target, store, name, "invalid digest format" if name == "malformed" else "")


@NEW_STORE.case("12.27-29", "digests", stored, HAS)
async def a_digest_is_a_name(target: Target) -> None:
    """A model is found by the digest of its manifest or list; other digests are refused."""
    async with scratch(target) as store:
        listed = write_list(store.models_dir, "both", [("llamacpp", GGUF), ("mlx", store.small)])
        for digest in (store.digest(store.small), listed.resolve().name):
            expect("model", await opened(target, store, digest.replace(":", "-")), SMALL)
        await refuses(target, store, "sha256-" + "0" * 64, "read manifest")
        tensor = next(layer for layer in store.layers if str(layer["mediaType"]).endswith("tensor"))
        await refused(target, store, str(tensor["digest"]).replace(":", "-"))


@NEW_STORE.case("12.30", "prefixes", stored, HAS)
async def the_beginning_of_a_digest_is_a_name(target: Target) -> None:
    """Twelve digits name the one blob that begins with them; several are an error; without a blob they are a name."""
    async with scratch(target) as store:
        digits = store.digest(store.small).removeprefix("sha256:")[:12]
        expect("model", await opened(target, store, digits), SMALL)
        (store.models_dir / "blobs" / f"sha256-{digits}{'0' * 52}").write_text("{}")
        await refuses(target, store, digits, "ambiguous digest prefix")
        write_tag(store.models_dir, "0123456789ab", store.small)
        expect("model with the name of a digest", await opened(target, store, "0123456789ab"), SMALL)


@NEW_STORE.case("12.31-32", "leftovers", stored, HAS)
async def leftovers_are_passed_by(target: Target) -> None:
    """Layers that name manifests, and files of the system or of writers, have no effect."""
    async with scratch(target) as store:
        extra = [store.add_blob(json.dumps(store.small).encode() + b" " * each, MANIFEST) for each in range(2)]
        store.manifest = {**store.manifest, "layers": [*store.layers, *extra]}
        tag = write_tag(store.models_dir, "new", store.main)
        for name in (".manifest-123", ".DS_Store"):
            (tag.parent / name).write_bytes(b"\0")
        expect("model with more layers", await opened(target, store, "main"), MAIN)
        await refuses(target, store, "nothing", "read manifest")
