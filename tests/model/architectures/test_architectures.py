"""Every architecture of the installed mlx-lm is built once and asked everything: loading, caches, rounds, disk, ranks.

A question is a function over a `Subject`; those that do not concern an architecture return at once.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.nn.layers.linear import Linear
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

import runner.process.lean_mlx_lm  # noqa: F401

import mlx_lm.models  # isort: skip

from runner.errors import ModelError
from runner.model import open_model
from runner.model.architectures import ENCODERS, TRIED, UNBATCHABLE, UNDRAFTABLE
from runner.model.weights.loading import load
from scripts.tools.models.architectures import BOUNDARY_DEPENDENT, architectures, build, unserved
from scripts.tools.models.checkpoints import TOKENIZER, write_weights
from scripts.tools.models.store import write_store
from scripts.tools.models.tiny import Tiny, words
from tests.lib.driver import ask_uncached, forwards_at_once, largest
from tests.lib.kernels import in_front
from tests.model.architectures import caching, loading, splitting
from tests.model.architectures.subject import SERVED, Subject

QUESTIONS: tuple[Callable[[Subject], None], ...] = (
    loading.loads_from_a_directory,
    loading.loads_from_a_store_of_16_bits,
    loading.reads_no_head_of_a_tied_model,
    loading.refuses_a_layer_after_the_last_by_its_name,
    loading.reads_a_null_as_a_missing_field,
    *caching.QUESTIONS,
    caching.goes_on_from_the_disk_with_quantized_keys_and_values,
    splitting.can_be_split_over_two_ranks_or_says_why_not,
)


@pytest.mark.parametrize("name", SERVED)
def test_an_architecture(name: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    subject = Subject(name, tmp_path)
    for question in QUESTIONS:
        with subtests.test(question.__name__):
            question(subject)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*SERVED} - {*UNBATCHABLE, *UNDRAFTABLE, "kimi_k3"}))
def test_an_architecture_with_packed_weights(name: str) -> None:
    """Kimi K3 packs its own layers."""
    caching.changes_no_answer_by_leaving_out_padding(name)
    caching.answers_together_as_alone_to_the_bit(name)


PACKED = partial(caching.packed, kinds={Linear, MultiLinear, SwitchLinear})
FORMS: Mapping[str, Callable[[str], Tiny]] = {
    "float32": build,
    "4 bits": partial(PACKED, bits=4),
    "8 bits": PACKED,
    "mxfp4": partial(PACKED, bits=4, mode="mxfp4"),
}
EXPERTS = ("gpt_oss", "qwen3_moe", "qwen3_next", "kimi_linear", "deepseek_v3", "mixtral", "phimoe", "phixtral")
"""Of those with experts: one of each way to choose them, beside layers of all kinds. mlx-lm sorts 64 rows and more."""


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in SERVED for form in FORMS if name in EXPERTS or form == "float32"],
)
def test_a_text_may_be_cut_anywhere(name: str, form: str) -> None:
    if not in_front():
        pytest.skip("MLX's own products depend on the number of rows")
    assert caching.computes_the_same_bits_wherever_a_text_is_cut(FORMS[form](name)) == (name != "phi3small")


def test_no_architecture_is_left_out() -> None:
    """Every source file of mlx-lm's models that begins a class of the name is in the list."""
    sources = [path for folder in mlx_lm.models.__path__ for path in Path(folder).glob("*.py")]
    models = {path.stem for path in sources if re.search(r"^class Model\(", path.read_text(), re.MULTILINE)}
    assert models
    assert models <= {*architectures(), *ENCODERS}
    assert {*UNBATCHABLE, *UNDRAFTABLE} <= TRIED == {*architectures()} - {"olmo"}, "it ends the process"


@pytest.mark.parametrize("name", sorted(unserved()))
def test_what_cannot_run_is_known_and_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    """Once one of these runs, it has to leave the table."""
    with pytest.raises(Exception, match=re.escape(unserved()[name])):
        ask_uncached(build(name), words(41), say=0)
    write_weights(tmp_path, {"model.norm.weight": mx.zeros((64,))})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "architectures": [f"{name}X"]}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    with pytest.raises(ModelError, match=f"^unsupported architecture: {name}X"):
        load(open_model(str(tmp_path), tmp_path))


@pytest.mark.parametrize("name", sorted(BOUNDARY_DEPENDENT))
def test_the_answers_of_some_depend_on_the_boundaries_of_the_forwards(name: str) -> None:
    """Without any cache. They are served token by token above; once this fails, they need not be."""
    tiny, tokens = build(name), [*words(41, seed=1), *words(12, seed=3)]
    at_once, in_chunks = forwards_at_once(tiny, tokens, [53])[-1], forwards_at_once(tiny, tokens, [45, 8])[-1]
    assert largest(at_once - in_chunks) > 10 * tiny.tolerance


@pytest.mark.parametrize(("name", "axis", "fields"), [("baichuan_m1", 1, {}), ("bailing_moe", 0, {"norm_head": True})])
def test_a_packed_head_that_its_module_normalizes_has_the_length_1(
    name: str, axis: int, fields: Mapping[str, object], tmp_path: Path
) -> None:
    """Their sanitize divides and casts back: of packed words, zeros would be left."""
    directory = Subject(name, tmp_path).directory
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    store = write_store(tmp_path, "m", directory, "mxfp8")
    assert "lm_head.weight.scale" in store.tensors("lm_head.weight")
    head = load(open_model("m", tmp_path)).module.lm_head.weight.astype(mx.float32)
    assert mx.allclose(mx.linalg.norm(head, axis=axis), mx.ones(head.shape[1 - axis]), atol=0.01)
