"""Every broken store is refused before weights are read, in one line that names the fault.

See docs/internals/store.md, 6.
"""

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.model.weights.loading import load
from runner.tokenizer import open_tokenizer
from scripts.tools.models.store import Store
from tests.model.loading.conftest import bytes_read, checked, open_stored
from tests.model.loading.malformed import (
    CASES,
    HARMLESS,
    RENAMED_MODULES,
    TOKENIZERS,
    WEIGHT,
    Break,
    cut,
    entry,
    with_header,
    zeros,
)


def serve(store: Store) -> None:
    """Takes the steps of serving until a model is ready, in order."""
    opened = open_stored(store)
    open_tokenizer(opened.file)
    load(opened)


@pytest.mark.parametrize("name", CASES)
def test_a_broken_store_is_refused_with_one_line_before_anything_is_read(
    name: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By opening alone if it needs no module: MLX need not be imported, and no thread has been started.

    `check` says the same and nothing else: what follows from a fault is no further one.
    """
    case = CASES[name]
    case.spoil(store)
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("weights were read"))
    before = bytes_read()
    with pytest.raises(ModelError) as refused:
        (serve if name in RENAMED_MODULES | TOKENIZERS else open_stored)(store)
    assert bytes_read() - before < 1 << 30, "a blob of gigabytes was read"
    assert case.matches(str(refused.value)), str(refused.value)
    found = checked("tiny", store.models_dir)
    assert not found.loads
    if name == "manifest missing":
        assert [problem.partition(" tiny")[0] for problem in found.problems] == ["there is no model"]
    else:
        assert [case.matches(problem) for problem in found.problems] == [True], found.problems


@pytest.mark.parametrize("spoil", HARMLESS.values(), ids=HARMLESS)
def test_what_only_looks_odd_is_served(spoil: Break, store: Store) -> None:
    spoil(store)
    serve(store)
    found = checked("tiny", store.models_dir)
    assert (found.loads, found.problems) == (True, [])


def test_the_advice_for_a_missing_model_is_for_what_is_there(store: Store) -> None:
    """Another tag of it, other models, or no store at all."""
    with pytest.raises(ModelError, match=r"/Tiny/q9: no such file or directory \(its tags are latest\)$"):
        open_stored(store, "Tiny:q9")
    with pytest.raises(ModelError, match=r"/other/latest: no such file or directory \(`ollama list` names the models"):
        open_stored(store, "other")
    (store.models_dir / "manifests").rename(store.models_dir / "elsewhere")
    with pytest.raises(ModelError, match=rf"\({store.models_dir} holds no models: --models-dir names the store\)$"):
        open_stored(store)


def test_a_file_cut_between_opening_and_loading_is_named(store: Store) -> None:
    opened = open_stored(store)
    cut(WEIGHT)(store)
    with pytest.raises(ModelError, match=rf"{store.blob_of(WEIGHT).name}: tensor {WEIGHT}: .*truncated"):
        load(opened)


def test_a_parameter_called_scale_is_no_companion(store: Store) -> None:
    """gemma4's `router.scale` scales no packed tensor: there is no `router`."""
    store.put_tensors("router", {"model.layers.0.router.scale": zeros("F32", 4)})
    assert "model.layers.0.router.scale" in open_stored(store).tensors


def test_an_empty_tensor_overlaps_nothing(store: Store) -> None:
    with_header({WEIGHT: entry(), "nothing": entry(shape=(0, 64), offsets=(64, 64))})(store)
    assert open_stored(store).tensors["nothing"].nbytes == 0
