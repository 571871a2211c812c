"""Assistants are loaded from directories and from beside their targets, packed or not. One that is broken, or made for
another model, costs its drafts and a line."""

import json
import logging
from pathlib import Path

import mlx.core as mx
import pytest

from runner.drafts.assistant import Assistant, AssistantDrafter, load_assistant, read_shared
from runner.drafts.drafting import DraftModel
from runner.drafts.kinds import open_draft, open_own_draft
from runner.drafts.wing import DraftModelOpener
from runner.errors import DraftError
from runner.model import open_model
from runner.model.weights.loading import LoadedModel, load
from runner.tokenizer import open_tokenizer
from scripts.tools.models.assistants import Config, config_of
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.layouts import plan
from scripts.tools.models.sources import Published
from scripts.tools.models.store import Store, add_draft, source_tensors, write_store
from scripts.tools.models.tensors import Quantization, rounded
from tests.lib.kernels import mlx_own
from tests.model.drafts.assistant.made import Arrays, Change, pair_of, write
from tests.model.drafts.test_wing import LARGE, checked, settings
from tests.model.loading.conftest import layers_apart

PACKED = "groups of another table"


@pytest.fixture
def store(published: Published, tmp_path: Path) -> Store:
    """A Gemma 4."""
    return write_store(tmp_path / "models", "tiny", published("gemma4-unified"))


def opened(store: Store, wish: str, budget_bytes: int = LARGE) -> DraftModel | None:
    """Goes the way of a start."""
    model = open_model("tiny", store.models_dir)
    opener = DraftModelOpener(settings(store, wish), model)
    return opener.load(load(model), open_tokenizer(model.file), mx.get_active_memory() + budget_bytes)


def assert_the_same(found: Assistant, wanted: Assistant, loaded: LoadedModel) -> None:
    layers, prompt = loaded.make_layers(), [*range(40)]
    loaded.logits(mx.array([prompt]), layers)
    shared = read_shared(found.places, found.kinds, layers)
    hidden = mx.random.normal((1, 1, 64), key=mx.random.key(1))
    both = (each.step(mx.array([[3]]), hidden, shared, mx.array([39])) for each in (found, wanted))
    for one, other in zip(*both, strict=True):
        assert mx.array_equal(mx.isfinite(one), mx.isfinite(other))
        left, right = (mx.where(mx.isfinite(each), each, 0) for each in (one, other))
        assert mx.abs(left - right).max() <= 1e-4 * mx.abs(right).max()


@pytest.mark.parametrize(
    ("kind", "quantization"), [(PACKED, None), ("every token", "int4"), (PACKED, "nvfp4"), ("every token", "mxfp8")]
)
@mlx_own()
def test_one_beside_its_target_computes_what_its_tensors_say(
    kind: str, quantization: Quantization | None, store: Store, tmp_path: Path
) -> None:
    """What is packed is rounded."""
    config = config_of(kind)
    source = write(tmp_path / "assistant", config)
    packings = plan(source_tensors(source), config, quantization).packings
    add_draft(store, source, quantization)
    assert bool(packings) == (quantization is not None)

    def rounding(weights: Arrays) -> None:
        weights.update({name: rounded(weights[name], packing) for name, packing in packings.items()})

    target = open_model("tiny", store.models_dir)
    found = load_assistant(open_own_draft(target, store.models_dir).model, loaded := load(target)).assistant
    assert_the_same(found, pair_of(target, write(tmp_path / "rounded", config, rounding)).assistant, loaded)


@pytest.mark.parametrize("architecture", ["Gemma4UnifiedAssistantForCausalLM", "gemma4_assistant"])
def test_a_start_loads_it(architecture: str, store: Store, tmp_path: Path) -> None:
    """Named or beside the model, by any of its architectures."""
    config = config_of() | {"architectures": [architecture]}
    directory = write(tmp_path / "assistant", config)
    named = opened(store, str(directory))
    add_draft(store, directory)
    for layer in ("draft/tokenizer.json", "draft/tokenizer_config.json"):
        store.drop(layer)
    beside = opened(store, "auto")
    for found, name in ((named, str(directory)), (beside, "the draft of tiny")):
        assert isinstance(found, AssistantDrafter)
        assert found.name == name
        assert found.nbytes == 0
        assert found.most_bytes(8) == 8 * 2 * 80 * 64 * 4
    assert opened(store, "off") is None
    report = " ".join(checked(store, "auto").split())
    assert f"and by the draft of tiny ({architecture}, float32, " in report


def test_a_directory_without_architectures_or_a_tokenizer_is_an_assistant_too(store: Store, tmp_path: Path) -> None:
    config = {key: value for key, value in config_of().items() if key != "architectures"}
    directory = write(tmp_path / "assistant", config)
    (directory / "tokenizer.json").unlink()
    assert isinstance(opened(store, str(directory)), AssistantDrafter)
    assert f"by {directory} (gemma4_assistant, " in " ".join(checked(store, str(directory)).split())


def test_one_whose_full_layers_have_fields_of_their_own_is_the_same(store: Store, tmp_path: Path) -> None:
    config = config_of()
    target, directory = open_model("tiny", store.models_dir), write(tmp_path / "flat", config)
    apart = write(tmp_path / "apart", config)
    (apart / "config.json").write_text(json.dumps(layers_apart(config)))
    flat = pair_of(target, directory)
    assert_the_same(pair_of(target, apart).assistant, flat.assistant, flat.loaded)


def test_leftovers_are_not_read(tmp_path: Path) -> None:
    """Keys and values, and a second table of tokens."""

    def more(weights: Arrays) -> None:
        for part, shape in (("k_proj.weight", (32, 128)), ("v_proj.weight", (32, 128)), ("k_norm.weight", (16,))):
            weights[f"model.layers.0.self_attn.{part}"] = mx.zeros(shape)
        weights.setdefault("lm_head.weight", mx.zeros((274, 128)))

    for kind in ("every token", "a table for scores"):
        plain, full = (
            open_draft(str(write(tmp_path / f"{kind} {number}", config_of(kind), change)), tmp_path).model
            for number, change in enumerate((lambda _: None, more))
        )
        assert plain.tensors.keys() == full.tensors.keys()
        assert ("lm_head.weight" in full.tensors) != ("model.embed_tokens.weight" in full.tensors)


def without(*endings: str) -> Change:
    def change(weights: Arrays) -> None:
        for name in [name for name in weights if name.endswith(endings)]:
            del weights[name]

    return change


def put(name: str, array: mx.array) -> Change:
    return lambda weights: weights.update({name: array})


ORDER = "masked_embedding.token_ordering"
GROUPS = config_of("groups")
FAULTS: dict[str, tuple[Config, Change, str]] = {
    "another width": (config_of() | {"backbone_hidden_size": 32}, put("pre_projection.weight", mx.zeros((128, 64))),
        "want shape [32, 128], found [64, 128]"),
    "a narrower target": (config_of() | {"backbone_hidden_size": 32},
        lambda weights: weights.update({"pre_projection.weight": mx.zeros((128, 64)),
        "post_projection.weight": mx.zeros((32, 128))}), "it drafts for a model that is 32 wide, and this one is 64"),
    "no width": ({key: value for key, value in config_of().items() if key != "backbone_hidden_size"}, without(),
        "config.json: backbone_hidden_size: want a positive integer, found None"),
    "fewer tokens": (config_of(vocab_size=200), put("model.embed_tokens.weight", mx.zeros((200, 128))),
        "its vocabulary differs from the model's: 200 tokens instead of 274"),
    "layers of another kind": (config_of(layer_types=["sliding_attention"] * 2 + ["chunked_attention"],
        global_head_dim=16), lambda weights: weights.update({"model.layers.2.self_attn.q_proj.weight":
        mx.zeros((64, 128)), "model.layers.2.self_attn.o_proj.weight": mx.zeros((128, 64)),
        "model.layers.2.self_attn.q_norm.weight": mx.zeros(16)}),
        "it reads layers of chunked_attention, and the model has none"),
    "no kinds of layers": (config_of(layer_types=None), without(), "layer_types must name the kind of each of the 3"),
    "heads of another width": (config_of(head_dim=8), lambda weights: [weights.update({
        f"model.layers.{layer}.self_attn.q_proj.weight": mx.zeros((32, 128)),
        f"model.layers.{layer}.self_attn.o_proj.weight": mx.zeros((128, 32)),
        f"model.layers.{layer}.self_attn.q_norm.weight": mx.zeros(8)}) for layer in range(2)],
        "its 4 heads of 8 numbers cannot attend to the model's 2 heads of 16 (sliding_attention)"),
    "a projection less": (config_of(), without("post_projection.weight"), "lacks 1 tensors: post_projection.weight"),
    "no centroids": (GROUPS, without("centroids.weight"), "lacks 1 tensors: masked_embedding.centroids.weight"),
    "groups of odd sizes": (GROUPS | {"num_centroids": 100}, without(), "274 tokens cannot be in 100 groups"),
    "more groups than there are": (GROUPS | {"centroid_intermediate_top_k": 138}, without(), "138 of them chosen"),
    "a place beyond the table": (GROUPS, put(ORDER, mx.arange(274) + 1), "must list each token once"),
    "a token twice": (GROUPS, put(ORDER, mx.array([0, 0, *range(2, 274)])), "must list each token once"),
    "an order of numbers that are not whole": (GROUPS, put(ORDER, mx.zeros(274)), "want int"),
    "a rotation that nobody knows": (config_of(rope_parameters={"full_attention": {"rope_type": "of mine"}}),
        without(), "config.json does not fit an assistant: ValueError"),
    "no text model": ({key: value for key, value in config_of().items() if key != "text_config"}, without(),
        "config.json: text_config must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_assistant_costs_a_line_or_the_start(
    fault: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start, if it is asked for."""
    config, change, why = FAULTS[fault]
    directory = write(tmp_path / "assistant", GROUPS if config.get("use_ordered_embeddings") else config_of(), change)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").unlink()
    wish = str(directory)
    with pytest.raises(DraftError) as refused:
        opened(store, wish)
    assert str(refused.value).startswith(f"--draft {wish}: ")
    assert why in str(refused.value)
    add_draft(store, directory)
    caplog.set_level(logging.INFO)
    assert opened(store, "auto") is None
    lines = [record for record in caplog.records if "draft" in record.message]
    assert [record.message for record in lines] == ["the draft model beside this one is not used"]
    if not why.endswith("once"):  # `check` reads no numbers
        assert why in " ".join(checked(store, "auto").split())


def test_it_drafts_for_gemma_4_alone(tmp_path: Path) -> None:
    store = write_store(tmp_path / "models", "tiny", write_checkpoint(tmp_path / "source", "llama"))
    directory = write(tmp_path / "assistant")
    with pytest.raises(DraftError, match="it drafts for Gemma 4, not for llama"):
        opened(store, str(directory))


def test_it_computes_in_its_own_type(published: Published, tmp_path: Path) -> None:
    write_store(tmp_path / "models", "tiny", published("gemma4-text", "bfloat16"))

    def halve(weights: Arrays) -> None:
        weights.update({name: array.astype(mx.bfloat16) for name, array in weights.items() if name != ORDER})

    pair = pair_of(open_model("tiny", tmp_path / "models"), write(tmp_path / "assistant", config_of("groups"), halve))
    layers = pair.loaded.make_layers()
    pair.loaded.logits(mx.array([[*range(40)]]), layers)
    shared = read_shared(pair.assistant.places, pair.assistant.kinds, layers)
    found = pair.assistant.step(mx.array([[3]]), mx.zeros((1, 1, 64), mx.bfloat16), shared, mx.array([39]))
    assert [array.dtype for array in found] == [mx.bfloat16] * 2
    assert not any(mx.any(mx.isnan(array)).item() for array in found)
