"""Every published form of every family is written once and stored in every way that it has been stored.

What is loaded from a store computes bit for bit what mlx-lm computes from a directory. Types, writers and producers
take turns over the sources. Experts run in float32: MLX's CPU backend has no other
`gather_mm`. Releases are those of docs/internals/store.md, 1.6; packed imports those of 2.4 and 2.5.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import mlx.core as mx
import pytest

from runner.model.weights.loading import load
from scripts.tools.models.checkpoints import write_directory
from scripts.tools.models.layouts import HEAD, LAYOUTS, Layout, plan
from scripts.tools.models.oracle import load_directory, oracle
from scripts.tools.models.sources import SOURCES, Published
from scripts.tools.models.sources_form import Config, read_config
from scripts.tools.models.store import source_tensors, write_store
from scripts.tools.models.tensors import PACKINGS, Packing, Quantization, Writer, rounded
from tests.lib.kernels import calls, in_front, mlx_own
from tests.lib.packed_sources import Producer, factor_of, write_converted, write_nvidia
from tests.model.architectures.loading import check_nulls
from tests.model.loading.conftest import run, run_path, same
from tests.model.loading.stored import Stored, close, put

TYPES: tuple[Quantization, ...] = get_args(Quantization)
WRITERS: tuple[Writer, ...] = get_args(Writer)
PRODUCERS: tuple[Producer, ...] = ("modelopt", "compressed-tensors")
PLENTY = 1 << 40

PACKED_ALREADY = {"gpt-oss"}
"""Published in mxfp4: `ollama create` would pack the packed bytes again."""
TURNED = {"llama4", "gpt2"}
"""Published with inputs and outputs exchanged."""
FOLDED = {"falcon-h1"}
"""mlx-lm multiplies weights by factors of the config, which no packed tensor follows exactly."""

FLOATING = ("llama", "gemma3", "gemma4", "gemma4-unified", "qwen3.5", "qwen3.5-text", "muse-glimmer", "mamba2", "lfm2")
"""Sources without experts, for bfloat16."""

EARLY = ("llama", "qwen3", "gemma3-text", "glm4-moe-lite", "qwen3-moe")
QWEN = tuple(name for name in SOURCES if name.startswith(("qwen3.5", "qwen3-next")))
GEMMA = tuple(name for name in SOURCES if name.startswith("gemma4"))
LATE = ("laguna", "nemotron-h", "nemotron-omni", "muse-glimmer", "mixtral", "deepseek-v3")
RELEASES: dict[str, tuple[str, ...]] = {
    "0.16": EARLY,
    "0.17.8": ("llama", "glm4-moe-lite"),
    "0.18.2": (*EARLY, *QWEN),
    "0.18.3": (*EARLY, *QWEN),
    "0.20.8": ("glm4-moe-lite", "qwen3-moe", "qwen3.5-moe-separate", "qwen3-next", *GEMMA, *LATE),
    "0.30": (*QWEN, "gemma4-moe", "laguna"),
    "0.31.2": ("llama", "glm4-moe-lite", "qwen3.5-moe", "qwen3-next", "gemma4-moe", "nemotron-omni"),
}
"""What each changed, and the families that it was first to know. Qwen 3.5 was cast to bfloat16 on the way from 0.18.2
to 0.30, so its sources are in bfloat16, and its dense experts run in float32 after loading."""

_TWINS = ("0.18.2", "0.18.3")

CONVERTED = (
    *("llama", "qwen3", "gemma3-text", "gemma3", "gemma4-text", "gemma4-moe", "gemma4_unified", "qwen3.5"),
    *("qwen3.5-moe", "qwen3-next", "glm4-moe-lite", "laguna", "nemotron-h", "muse-glimmer", "deepseek-v3"),
    *("llama4", "qwen3-moe", "mixtral", "gpt-oss", "granite-moe", "falcon-h1", "mamba2", "lfm2", "gpt2", "kolibri1"),
)
"""By mlx-lm's converter."""
NVIDIA = (
    *("llama", "qwen3", "gemma3", "nemotron-h", "qwen3.5-moe-separate", "glm4-moe-lite", "laguna", "mixtral"),
    "kolibri1",
)
"""In nvfp4, with a factor for the whole tensor."""


class Form:
    """One source; `turn` counts them. Every question has an empty folder."""

    def __init__(self, name: str, published: Published, root: Path) -> None:
        self.name, self.published, self.root = name, published, root
        self.turn = list(SOURCES).index(name)
        self._folders = 0

    def folder(self) -> Path:
        self._folders += 1
        return self.root / str(self._folders)

    def store(
        self, quantization: Quantization | None, layout: Layout = HEAD, dtype: str = "float32", more: int = 0
    ) -> Stored:
        """Writers take turns, with `more`."""
        source_dir = self.published(self.name, "bfloat16" if dtype == "bfloat16" else "float32")
        writer = WRITERS[(self.turn + more) % len(WRITERS)]
        return put(self.folder(), self.name, source_dir, quantization, layout, writer=writer)


def check_packed(form: Form, quantization: Quantization) -> Stored:
    stored = form.store(quantization, more=1)
    assert stored.plan.packings
    stored.assert_reads_the_text_model_only()
    if form.name in FOLDED:
        # Multiplied before or after, rounded to bfloat16 in between or not: all of that may be.
        found, wanted = (run(module) for module in stored.modules())
        assert found.dtype == wanted.dtype
        assert mx.abs(found - wanted).max() < 0.02 * mx.abs(wanted).max()
    elif form.name in TURNED:
        stored.assert_holds_what_the_source_does()
    else:
        stored.assert_computes_what_the_source_does()
    return stored


def a_dense_store(form: Form) -> None:
    stored = form.store(None)
    stored.assert_computes_what_the_source_does()
    stored.assert_reads_the_text_model_only()


def a_packed_store(form: Form) -> None:
    """And our kernels compute from it what MLX's own do, but that some round to 16 bits what they multiply."""
    kind = TYPES[form.turn % len(TYPES)]
    opened = (form.store(None) if form.name in PACKED_ALREADY else check_packed(form, kind)).open()
    model, before = load(opened, "float32", PLENTY), calls() if in_front() else -1
    found = run(model)
    assert before < 0 or calls() > before
    with mlx_own():
        wanted = run(model)
    assert found.dtype == wanted.dtype == mx.float32
    assert mx.abs(found - wanted).max() < 1e-3 * mx.abs(wanted).max()  # 5e-4 was seen


def a_store_of_16_bits(form: Form) -> None:
    if form.name in FLOATING:
        kind: Quantization | None = (None, "int4")[FLOATING.index(form.name) % 2]
        form.store(kind, dtype="bfloat16").assert_computes_what_the_source_does()


def stores_of_older_releases(form: Form) -> None:
    """Each dense or in one type; 0.18.2 and 0.18.3, which have the same families, take turns."""
    for release, names in RELEASES.items():
        place = names.index(form.name) if form.name in names else None
        if place is not None and (release not in _TWINS or _TWINS[place % 2] == release):
            types = (None, *LAYOUTS[release].types)
            check_release(form, release, types[place // (1 + (release in _TWINS)) % len(types)])


def check_release(form: Form, release: str, quantization: Quantization | None) -> None:
    cast = form.name in QWEN and LAYOUTS[release].qwen != "verbatim"
    stored = form.store(quantization, LAYOUTS[release], "bfloat16" if cast else "float32")
    stored.assert_computes_what_the_source_does(in_float32=cast and quantization is None)
    stored.assert_reads_the_text_model_only()


def a_conversion_of_mlx_lms(form: Form) -> None:
    """From the store and from the directory itself."""
    if form.name in CONVERTED:
        kind: Quantization = ("int4", "nvfp4")[CONVERTED.index(form.name) % 2]
        source, root = SOURCES[form.name], form.folder()
        config: Config = {**source.module, "architectures": [source.architecture]}
        assert_loads_as_mlx_lm_loads_it(write_converted(root / "mlx", config, PACKINGS[kind]), root)


def assert_loads_as_mlx_lm_loads_it(converted: Path, root: Path) -> None:
    write_store(root / "models", "m", converted)
    wanted = run(load_directory(converted))
    assert same(run_path("m", root / "models"), wanted)
    assert same(run_path(converted), wanted)


@mlx_own()
def an_export_of_nvidias(form: Form) -> None:
    """A model packed a power of two smaller, with that factor, is the one packed as it is, bit for bit; any factor
    multiplies what was packed, which is compared with the unpacked numbers in a dense model.

    Another order of additions leaves the last digits open, and a latent projection is unpacked to bfloat16, so that its
    product with a factor has fewer digits.
    """
    if form.name not in NVIDIA:
        return
    root, plain = form.folder(), form.published(form.name)
    producer, packings = PRODUCERS[NVIDIA.index(form.name) % 2], exported(form.name, plain)
    for powers_of_two in (True, False):
        source_dir = louder(plain, root / "louder") if powers_of_two else plain
        factor = partial(factor_of, powers_of_two=powers_of_two)
        folder = root / str(powers_of_two)
        write_store(folder, "m", write_nvidia(folder / "x", source_dir, producer, packings.__contains__, factor))
        found = run_path("m", folder)
        weights = mx.load(str(source_dir / "model.safetensors"))
        assert isinstance(weights, dict)
        for tensor, packing in packings.items():
            number, whole = factor(tensor), weights[tensor]
            weights[tensor] = rounded(whole / number, packing) * number
            assert not powers_of_two or mx.array_equal(weights[tensor], rounded(whole, packing))
        if powers_of_two:
            assert same(found, run(oracle(folder / "mlx", form.name, source_dir, packings)))
        else:
            dense = write_directory(folder / "dense", read_config(source_dir), weights)
            wanted = run(oracle(folder / "mlx", form.name, dense))
            assert close(found, wanted, 5e-3 if SOURCES[form.name].dense else 2e-5)


def louder(source_dir: Path, directory: Path) -> Path:
    """The model with larger weights: their scales in nvfp4 must not come near the smallest that eight bits can say."""
    weights = mx.load(str(source_dir / "model.safetensors"))
    assert isinstance(weights, dict)
    grown = {name: array * 4 if array.ndim > 1 else array for name, array in weights.items()}
    return write_directory(directory, read_config(source_dir), grown)


def exported(name: str, source_dir: Path) -> dict[str, Packing]:
    """Returns the matrices that NVIDIA's tools pack: those that Ollama would, except the first and the last."""
    found = plan(source_tensors(source_dir), read_config(source_dir), "nvfp4").packings
    ends = ("lm_head.weight", "embed_tokens.weight", "embeddings.weight")
    return {key: PACKINGS["nvfp4"] for key in found if not key.endswith(ends) and key not in SOURCES[name].spare}


def nulls_for_missing_fields(form: Form) -> None:
    directory = shutil.copytree(form.published(form.name), form.folder())
    check_nulls(directory, json.loads((directory / "config.json").read_text()))


QUESTIONS: tuple[Callable[[Form], None], ...] = (
    *(a_dense_store, a_packed_store, a_store_of_16_bits, stores_of_older_releases, a_conversion_of_mlx_lms),
    *(an_export_of_nvidias, nulls_for_missing_fields),
)


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_computes_the_same_from(
    name: str, published: Published, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    form = Form(name, published, tmp_path)
    for question in QUESTIONS:
        with subtests.test(question.__name__):
            question(form)


def test_a_store_in_float16(published: Published, tmp_path: Path) -> None:
    put(tmp_path, "llama", published("llama", "float16"), "int8").assert_computes_what_the_source_does()
