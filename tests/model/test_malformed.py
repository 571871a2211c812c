"""Every broken store and directory is refused before weights are read, in words that name the thing (store.md, 6)."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.errors import ModelError
from runner.model import open_model
from runner.model.load import load
from tests.model.conftest import Checkpoints, open_stored
from tests.models.checkpoints import write_checkpoint
from tests.models.store import CONFIG, PACKINGS, TENSOR, Store, Tensor, quantize, read_tensors, safetensors_bytes

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
Break = Callable[[Store], object]


def entry(dtype: str = "F32", shape: object = (64, 64), offsets: object = (0, 16384)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def with_header(header: object, data_bytes: int = 16384) -> Break:
    """Puts a file with this header (bytes: as they are) and zeros as data in the place of one weight."""

    def apply(store: Store) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        store.put(WEIGHT, struct.pack("<Q", len(text)) + text + bytes(data_bytes), TENSOR)

    return apply


def with_manifest(**changes: object) -> Break:
    def apply(store: Store) -> None:
        store.manifest = {**store.manifest, **changes}

    return apply


def with_layer(**changes: object) -> Break:
    """Changes the manifest's entry of one weight."""

    def apply(store: Store) -> None:
        layers = [{**layer, **changes} if layer.get("name") == WEIGHT else layer for layer in store.layers]
        store.manifest = {**store.manifest, "layers": layers}

    return apply


def with_format(model_format: str) -> Break:
    def apply(store: Store) -> None:
        config = store.add_blob(json.dumps({"model_format": model_format}).encode(), CONFIG)
        store.manifest = {**store.manifest, "config": config}

    return apply


def cut(store: Store) -> None:
    path = store.blob_of(WEIGHT)
    path.write_bytes(path.read_bytes()[:-100])


def packed(store: Store) -> dict[str, Tensor]:
    return quantize(store.tensors(WEIGHT)[WEIGHT], WEIGHT, PACKINGS["int4"])


def with_packed(**changes: Tensor | None) -> Break:
    """Puts a packed weight whose parts (`words`, `scale`, `bias`) are changed, or left out where None."""

    def apply(store: Store) -> None:
        parts = packed(store)
        for part, tensor in changes.items():
            key = WEIGHT if part == "words" else f"{WEIGHT}.{part}"
            parts.pop(key)
            if tensor is not None:
                parts[key] = tensor
        store.put_tensors(WEIGHT, parts)

    return apply


def zeros(dtype: str, *shape: int) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return Tensor(dtype, shape, bytes(count * {"F32": 4, "U32": 4, "U8": 1, "F16": 2, "I32": 4}[dtype]))


def twice(store: Store) -> None:
    store.put_tensors("another layer", {WEIGHT: zeros("F32", 64, 64)})


MANIFEST: dict[str, tuple[Break, str]] = {
    "not json": (lambda store: store.manifest_path.write_text('{"layers": ['), r"parse manifest: .*/tiny/latest: "),
    "empty": (lambda store: store.manifest_path.write_text(""), r"parse manifest: .*/tiny/latest: "),
    "a list": (lambda store: store.manifest_path.write_text("[]"), r"parse manifest: .*want a JSON object, found list"),
    "deep": (lambda store: store.manifest_path.write_text("[" * 100_000), r"parse manifest: .*/tiny/latest: "),
    "no layers": (with_manifest(layers=None), r"parse manifest: .*want a list of layers"),
    "layer no object": (with_manifest(layers=["x"]), r"parse manifest: .*a layer is not an object: 'x'"),
    "no tensor layers": (with_manifest(layers=[]), r"model tiny has no tensor layers \(a GGUF model\?\): .*latest"),
    "hostile digest": (with_layer(digest="sha256:../../../etc/passwd"), rf"invalid digest '.*' of layer '{WEIGHT}'"),
    "long digest": (with_layer(digest="sha256:" + "0" * 65), rf"invalid digest '.*' of layer '{WEIGHT}'"),
    "digest with newline": (with_layer(digest="sha256:" + "0" * 64 + "\n"), r"invalid digest"),
    "no digest": (with_layer(digest=None), rf"invalid digest None of layer '{WEIGHT}'"),
    "size no number": (with_layer(size="12"), rf"invalid size '12' of layer '{WEIGHT}'"),
    "size negative": (with_layer(size=-1), rf"invalid size -1 of layer '{WEIGHT}'"),
    "gguf": (with_format("gguf"), r"model tiny has the format 'gguf', want 'safetensors': .*blobs/sha256-"),
    "config digest": (with_manifest(config={"digest": "sha256:..", "size": 1}), r"invalid digest 'sha256:..'"),
    "config missing": (
        with_manifest(config={"digest": f"sha256:{'0' * 64}", "size": 1}),
        r"open .*/sha256-0{64}: no such file or directory",
    ),
}

BLOB: dict[str, tuple[Break, str]] = {
    "missing": (
        lambda store: store.blob_of(WEIGHT).unlink(),
        rf"layer {WEIGHT}: open .*blobs/sha256-\w+: no such file or directory",
    ),
    "truncated": (cut, rf"layer {WEIGHT}: .*: size mismatch: want \d+ bytes, found \d+; pull it again"),
    "truncated as announced": (with_header({WEIGHT: entry()}, 16000), r"data ends at byte 16384, the file holds 16000"),
    "empty": (lambda store: store.put(WEIGHT, b"", TENSOR), r"0 bytes are too few for a header"),
    "seven bytes": (lambda store: store.put(WEIGHT, b"1234567", TENSOR), r"7 bytes are too few for a header"),
    "huge header": (
        lambda store: store.put(WEIGHT, struct.pack("<Q", 2**63) + b"{}", TENSOR),
        rf"header of {2**63} bytes does not fit a file of 10 bytes",
    ),
    "header not json": (with_header(b"{nonsense"), rf"layer {WEIGHT}: .*: the header is not JSON"),
    "header not utf-8": (with_header(b'{"\xff\xfe": 1}'), r"the header is not JSON"),
    "header deep": (with_header(b"[" * 100_000), r"the header is not JSON"),
    "header a list": (with_header([]), r"the header is not a JSON object"),
    "same key twice": (with_header(b'{"a": 1, "a": 2}'), r"the header names a tensor twice"),
    "entry no object": (with_header({WEIGHT: 1}), rf"tensor {WEIGHT}: the header entry is not an object"),
    "dtype unknown": (with_header({WEIGHT: entry("F64", (32, 64))}), rf"tensor {WEIGHT}: dtype 'F64' is not supported"),
    "shape no list": (with_header({WEIGHT: entry(shape=4096)}), r"shape 4096 is not a list of sizes"),
    "shape negative": (with_header({WEIGHT: entry(shape=(-64, -64))}), r"shape \[-64, -64\] is not a list of sizes"),
    "shape of floats": (with_header({WEIGHT: entry(shape=(64.0, 64))}), r"shape .* is not a list of sizes"),
    "offsets three": (with_header({WEIGHT: entry(offsets=(0, 1, 2))}), r"data_offsets .* are not two positions"),
    "offsets disagree": (
        with_header({WEIGHT: entry(offsets=(0, 16380))}),
        r"needs 16384 bytes, the header gives 16380",
    ),
    "offsets backwards": (with_header({WEIGHT: entry(offsets=(16384, 0))}), r"the header gives -16384"),
    "overlap": (
        with_header({WEIGHT: entry(), "other": entry(shape=(16, 64), offsets=(4096, 8192))}),
        rf"tensors {WEIGHT} and other overlap",
    ),
    "old layout": (with_header({"data": entry()}), r"before Ollama 0\.16; create or pull it again"),
    "in two blobs": (twice, rf"tensor {WEIGHT} is in two files: .*sha256-\w+ and .*sha256-\w+"),
}

PARTS: dict[str, tuple[Break, str]] = {
    "words no U32": (with_packed(words=zeros("I32", 64, 8)), rf"tensor {WEIGHT}: .*want packed U32 words, found I32"),
    "scales of int": (with_packed(scale=zeros("I32", 64, 1)), r"scales of dtype I32, want U8, F16, BF16 or F32"),
    "scale rows": (with_packed(scale=zeros("F32", 32, 1)), r"want scales \[64, 'groups'\], found \[32, 1\]"),
    "scale columns": (with_packed(scale=zeros("F32", 64, 3)), r"8 words and 3 F32 scales a row fit no quantization"),
    "no bias": (with_packed(bias=None), r"want quantization biases F32 \[64, 1\], found none"),
    "bias shape": (with_packed(bias=zeros("F32", 64, 2)), r"biases F32 \[64, 1\], found F32 \[64, 2\]"),
    "bias dtype": (with_packed(bias=zeros("F16", 64, 1)), r"biases F32 \[64, 1\], found F16 \[64, 1\]"),
    "byte scales with bias": (
        with_packed(scale=zeros("U8", 64, 4)),
        r"byte scales .* go without biases, found .*q_proj\.weight\.bias",
    ),
}

TEXT: dict[str, tuple[Break, str]] = {
    "no config.json": (
        lambda store: store.drop("config.json"),
        r'failed to read config.json: config "config.json" not found in manifest',
    ),
    "config.json broken": (
        lambda store: store.put("config.json", b'{"a":'),
        r"failed to read config.json: .*blobs/sha256-\w+: Expecting value: line 1",
    ),
    "config.json a list": (
        lambda store: store.put("config.json", b"[1]"),
        r"failed to read config.json: want an object, found list",
    ),
    "config.json blob missing": (
        lambda store: store.blob_of("config.json").unlink(),
        r"failed to read config.json: open .*blobs/sha256-\w+: no such file or directory",
    ),
    "config.json cut": (
        lambda store: store.blob_of("config.json").write_bytes(b"{}"),
        r"failed to read config.json: .*: size mismatch: want \d+ bytes, found 2",
    ),
    "no architecture": (
        lambda store: store.put_json("config.json", {"model_type": "llama"}),
        r"no architectures found in config\.json",
    ),
    "empty architectures": (
        lambda store: store.put_json("config.json", {"architectures": []}),
        r"no architectures found in config\.json",
    ),
    "unknown architecture": (
        lambda store: store.put_json("config.json", {"architectures": ["FooForCausalLM"], "model_type": "foo"}),
        r"unsupported architecture: FooForCausalLM",
    ),
    "architecture by path": (
        lambda store: store.put_json("config.json", {"architectures": ["Foo"], "model_type": "..utils"}),
        r"unsupported architecture: Foo",
    ),
    "no tokenizer": (
        lambda store: store.drop("tokenizer.json"),
        r'load tokenizer config: config "tokenizer.json" not found in manifest',
    ),
}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        pytest.param(*case, id=f"{group}: {name}")
        for group, cases in {"manifest": MANIFEST, "blob": BLOB, "parts": PARTS, "text": TEXT}.items()
        for name, case in cases.items()
    ],
)
def test_a_broken_store_is_refused_when_it_is_opened(spoil: Break, text: str, store: Store) -> None:
    spoil(store)
    with pytest.raises(ModelError, match=text):
        open_stored(store)


@pytest.mark.parametrize("name", ["no config.json", "no architecture", "unknown architecture", "no tokenizer"])
def test_what_users_know_from_ollama_stands_word_for_word(name: str, store: Store) -> None:
    spoil, text = TEXT[name]
    spoil(store)
    with pytest.raises(ModelError, match=f"^{text}$"):
        open_stored(store)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        pytest.param(lambda store: store.drop(WEIGHT), rf"^tiny lacks 1 tensors: {WEIGHT}$", id="missing"),
        pytest.param(
            lambda store: store.put_tensors("x", {"model.layers.0.surprise.weight": zeros("F32", 2)}),
            r"^tiny holds 1 tensors that mlx_lm\.models\.llama does not know: model\.layers\.0\.surprise\.weight$",
            id="extra",
        ),
        pytest.param(
            lambda store: store.put_tensors(WEIGHT, {WEIGHT: zeros("F32", 32, 64)}),
            rf"sha256-\w+: tensor {WEIGHT}: want shape \[64, 64\], found \[32, 64\]",
            id="shape",
        ),
        pytest.param(
            lambda store: store.put_tensors(WEIGHT, {WEIGHT: zeros("U32", 64, 64)}),
            rf"sha256-\w+: tensor {WEIGHT}: want a floating-point type, found uint32",
            id="integers without scales",
        ),
        pytest.param(
            lambda store: store.put_tensors(WEIGHT, packed(store) | {WEIGHT: zeros("U32", 64, 5)}),
            rf"sha256-\w+: tensor {WEIGHT}: 5 packed words and 1 scales a row fit no quantization of 64 inputs",
            id="words of another width",
        ),
        pytest.param(
            lambda store: store.put_tensors(
                WEIGHT,
                {
                    WEIGHT: zeros("U32", 32, 8),
                    f"{WEIGHT}.scale": zeros("F32", 32, 1),
                    f"{WEIGHT}.bias": zeros("F32", 32, 1),
                },
            ),
            rf"sha256-\w+: tensor {WEIGHT}: want shape \[64, 8\], found \[32, 8\]",
            id="packed rows",
        ),
    ],
)
def test_what_does_not_fit_the_module_is_refused_before_anything_is_read(
    spoil: Break, text: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(store)
    opened = open_stored(store)
    monkeypatch.setattr("runner.model.load._read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=text):
        load(opened)


def test_a_foreign_packing_is_called_by_its_name(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "d", "llama", overrides={"quantization_config": {"quant_method": "hqq"}})
    tensors = {
        name + ".W_q" if "q_proj" in name else name: tensor
        for name, tensor in read_tensors(directory / "model.safetensors").items()
    }
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(
        ModelError, match=r"lacks 2 tensors: .* \(its packing is 'hqq': convert it with mlx_lm\.convert\)"
    ):
        load(open_model(str(directory), tmp_path))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"qweight": zeros("I32", 64, 8)}, "no 4-bit AWQ layer"),
        (
            {"qweight": zeros("I32", 64, 8), "scales": zeros("F16", 2, 64), "g_idx": zeros("I32", 64)},
            "no 4-bit AWQ layer",
        ),
        ({"qweight": zeros("I32", 8, 64), "scales": zeros("F16", 2, 64)}, r"\[8, 64\] does not fit scales \[2, 64\]"),
    ],
)
def test_what_only_looks_like_awq_is_refused(tensors: dict[str, Tensor], text: str, tmp_path: Path) -> None:
    """GPTQ's files have the same keys and another layout."""
    directory = write_checkpoint(tmp_path / "d", "llama")
    kept = read_tensors(directory / "model.safetensors")
    del kept[WEIGHT]
    stem = WEIGHT.removesuffix(".weight")
    changed = kept | {f"{stem}.{part}": tensor for part, tensor in tensors.items()}
    (directory / "model.safetensors").write_bytes(safetensors_bytes(changed))
    with pytest.raises(ModelError, match=rf"tensor {stem}\.qweight:? .*{text}|tensor {stem}\.qweight {text}"):
        load(open_model(str(directory), tmp_path))


def test_a_long_list_of_missing_tensors_is_counted(store: Store) -> None:
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
        for layer in (0, 1):
            store.drop(f"model.layers.{layer}.{part}.weight")
    with pytest.raises(ModelError, match=r"lacks 8 tensors: (\S+, ){5}\S+ and 2 more$"):
        load(open_stored(store))


def test_a_file_cut_between_opening_and_loading_is_named(store: Store) -> None:
    opened = open_stored(store)
    cut(store)
    with pytest.raises(ModelError, match=rf"{store.blob_of(WEIGHT).name}: tensor {WEIGHT}: .*truncated"):
        load(opened)


def test_a_file_gone_between_opening_and_loading_is_named(store: Store) -> None:
    opened = open_stored(store)
    store.blob_of(WEIGHT).unlink()
    with pytest.raises(ModelError, match=rf"open .*{store.blob_of(WEIGHT).name}: no such file or directory"):
        load(opened)


def test_a_draft_model_may_be_incomplete(store: Store) -> None:
    """Nothing here runs drafts, so nothing of them is opened."""
    store.put("draft.model.norm.weight", b"junk", TENSOR)
    store.blob_of("draft.model.norm.weight").unlink()
    store.put_json("draft/config.json", {"architectures": ["Unknown"]})
    assert open_stored(store).architecture == "LlamaForCausalLM"


def test_a_parameter_called_scale_is_no_companion(store: Store) -> None:
    """gemma4's `router.scale` scales no packed tensor: there is no `router`."""
    store.put_tensors("router", {"model.layers.0.router.scale": zeros("F32", 4)})
    assert "model.layers.0.router.scale" in open_stored(store).tensors


def test_the_first_json_layer_of_a_name_wins(store: Store) -> None:
    extra = store.add_blob(b"{}", "application/vnd.ollama.image.json", "config.json")
    store.manifest = {**store.manifest, "layers": [*store.layers, extra]}
    assert open_stored(store).architecture == "LlamaForCausalLM"


def test_a_store_without_a_config_blob_opens(store: Store) -> None:
    with_manifest(config=None)(store)
    assert open_stored(store).vocab_size == 274


def test_a_broken_directory_names_the_file(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "d", "llama", shards=2)

    def refused(text: str) -> None:
        with pytest.raises(ModelError, match=text):
            open_model(str(directory), tmp_path)

    shard = directory / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    refused(rf"{shard}: tensor .*: data ends at byte \d+, the file holds \d+: it is truncated")
    shard.unlink()
    refused(rf"open {shard}: no such file or directory \(named by model\.safetensors\.index\.json\)")
    shard.write_bytes(content)
    (directory / "model.safetensors").write_bytes(content)
    refused(r"tensor \S+ is in two files: .*model-00002-of-00002\.safetensors and .*model\.safetensors")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text("[]")
    refused(r"model\.safetensors\.index\.json: want a weight_map")
    (directory / "model.safetensors.index.json").unlink()
    (directory / "tokenizer.json").unlink()
    refused(rf"^load tokenizer config: open {directory}/tokenizer.json: no such file or directory$")
    (directory / "config.json").unlink()
    refused(rf"^failed to read config.json: open {directory}/config.json: no such file or directory$")


def test_a_directory_without_weights_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint("llama") / "config.json").read_bytes())
    with pytest.raises(ModelError, match=rf"no model\*\.safetensors in {tmp_path}"):
        open_model(str(tmp_path), tmp_path)


def test_a_stale_index_is_no_obstacle(tmp_path: Path) -> None:
    """mlx-lm ignores the index; conversions have been published with that of their source."""
    directory = write_checkpoint(tmp_path / "d", "llama")
    index = {"weight_map": {WEIGHT: "model-00001-of-00009.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_model(str(directory), tmp_path).total_bytes > 0


def test_an_empty_tensor_overlaps_nothing(store: Store) -> None:
    with_header({WEIGHT: entry(), "nothing": entry(shape=(0, 64), offsets=(64, 64))})(store)
    assert open_stored(store).tensors["nothing"].nbytes == 0


def test_padding_between_tensors_is_harmless(store: Store) -> None:
    data = store.tensors(WEIGHT)[WEIGHT].data
    text = json.dumps({"__metadata__": None, WEIGHT: entry(offsets=(8, 8 + len(data)))}).encode()
    store.put(WEIGHT, struct.pack("<Q", len(text)) + text + bytes(8) + data + bytes(8), TENSOR)
    assert load(open_stored(store)).module is not None
    assert len(safetensors_bytes({WEIGHT: Tensor("F32", (64, 64), data)})) % 8 == 0
