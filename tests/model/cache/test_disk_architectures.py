"""Every architecture of the installed mlx-lm through the disk cache: what one process wrote, another answers from."""

from pathlib import Path

import pytest

from runner.cache.layers.quantized_trial import find_format
from scripts.tools.models import architectures as made
from scripts.tools.models.architectures import BOUNDARY_DEPENDENT, architectures, build, unserved
from scripts.tools.models.tiny import VOCAB, Tiny, words
from scripts.tools.models.tiny_values import Values, values
from tests.lib.driver import ask_uncached, check_equal
from tests.model.cache.test_disk import Process, following, same

SERVED = tuple(name for name in architectures() if name not in unserved())
QUANTIZED = (
    *("llama", "gpt2", "gemma3_text", "gemma3n", "cohere2", "qwen3_next", "jamba", "lfm2_moe"),
    *("falcon_h1", "baichuan_m1", "llama4", "afm7", "step3p5"),
)
"""Of each mixture of layers that can be quantized, a few."""
WIDTHS = ("hidden_size", "hidden_dim", "d_model", "n_embd")
HEAD_WIDTHS = ("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim")


@pytest.mark.parametrize("name", SERVED)
def test_an_architecture_goes_on_in_another_process(name: str, tmp_path: Path) -> None:
    check_goes_on(build(name), tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_keys_and_values_go_on_in_another_process(
    name: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "values", widened)
    model = build(name)
    chosen = find_format(model.make_layers, lambda tokens, layers: model.model(tokens, cache=layers), VOCAB, bits)
    assert chosen.name == f"kv{bits}"
    check_goes_on(model._replace(make_layers=chosen.make_layers, tolerance=0.1), tmp_path)


def widened(name: str) -> Values:
    """Values of a configuration with heads as wide as a group of quantized numbers."""
    wide = {**dict.fromkeys(WIDTHS, 128), **dict.fromkeys(HEAD_WIDTHS, 32)}
    return {field: wide.get(field, value) for field, value in values(name).items()}


def check_goes_on(model: Tiny, directory: Path) -> None:
    """A turn of 300 tokens, paged out by a foreign one; then the next turn, from disk, from memory, and computed."""
    first = words(300, seed=1)
    writer = Process(model, directory)
    prompt = following(writer.ask(first), first)
    writer.ask(words(40, seed=2))
    assert writer.save() >= 1
    reader = Process(model, directory)
    assert reader.restore(prompt) >= 300
    ours, theirs = reader.ask(prompt), writer.ask(prompt)
    assert ours.session.cached >= 300
    same(ours, theirs)
    if model.name not in BOUNDARY_DEPENDENT:
        check_equal(model, ours, ask_uncached(model, prompt, chunk=32))
