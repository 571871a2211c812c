"""The layouts that each generation of Ollama's store gives a published model (docs/internals/store.md, 1.6).

`plan` decides, as `ollama create` did in that release, what tensors are called, which are packed and which lie
together in one blob. It knows the published names only; nothing here comes from mlx-lm.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import mlx.core as mx

from scripts.tools.models.layouts_policy import Config, Question, Rules, type_of
from scripts.tools.models.sources_steps import SHIFTED_NORMS
from scripts.tools.models.tensors import PACKINGS, Packing, Quantization, Tensor, changed, quantize, stacked, unstacked

_EARLY = Rules(False, False, ("mlp.gate.weight",), False, False)


class Layout(NamedTuple):
    """One generation. `release` is the first that wrote it."""

    release: str
    types: tuple[Quantization, ...] = ("int4", "int8", "nvfp4", "mxfp4", "mxfp8")
    int4_group: int = 64
    qwen: Literal["verbatim", "rewritten", "rewritten with mtp"] = "verbatim"
    splits_gemma4: bool = False
    experts: Literal["together", "renamed if uniform", "renamed", "stacked"] = "stacked"
    rules: Rules = Rules()


HEAD = Layout("0.32.8")
_APRIL = Layout("0.20.8", qwen="rewritten", splits_gemma4=True, experts="renamed", rules=_EARLY)
LAYOUTS = {
    layout.release: layout
    for layout in (
        Layout("0.16", ("int4", "int8"), int4_group=32, experts="together", rules=_EARLY),
        Layout("0.17.8", ("int4", "int8"), experts="together", rules=_EARLY),
        Layout("0.18.2", ("int4", "int8"), qwen="rewritten", experts="together", rules=_EARLY),
        Layout("0.18.3", qwen="rewritten", experts="renamed if uniform", rules=_EARLY),
        _APRIL,
        _APRIL._replace(release="0.23.1"),  # which knew drafts
        _APRIL._replace(release="0.30", qwen="rewritten with mtp"),
        Layout("0.31.2", rules=Rules(eight_bit_head=False, dense_vision=False)),
        HEAD,
    )
}


class Blob(NamedTuple):
    """One file of tensors.

    `layer` is its name in the manifest, `origins` the published tensors that it was made of; `by_mlx` tells which of
    the two writers made it.
    """

    layer: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = {}
    by_mlx: bool = False
    origins: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors.values())


class _Piece(NamedTuple):
    """A tensor under the name that it will be judged by, made from the published tensor `origin`."""

    name: str
    tensor: Tensor
    origin: str
    packing: Packing | None = None
    kind: Quantization | None = None


class Plan(NamedTuple):
    """`packings` are those of the published tensors, by their names; the others stay dense."""

    blobs: list[Blob]
    packings: dict[str, Packing]


def plan(
    tensors: Mapping[str, Tensor], config: Config, quantization: Quantization | None = None, layout: Layout = HEAD
) -> Plan:
    """Returns the blobs that `ollama create` of that release makes of a published model, quantized to `quantization`
    (None: not)."""
    pieces = [_Piece(name, tensor, name) for name, tensor in sorted(tensors.items())]
    pieces = [_typed(piece, config, quantization, layout) for piece in _rewritten(pieces, config, layout)]
    packings = {piece.origin: piece.packing for piece in pieces if piece.packing}
    return Plan(list(_blobs(pieces, layout)), packings)


def _typed(piece: _Piece, config: Config, wanted: Quantization | None, layout: Layout) -> _Piece:
    if wanted is None:
        return piece
    assert wanted in layout.types
    shape = piece.tensor.shape
    if layout.experts == "stacked" and _expert(piece.name, layout):
        shape = (1 << 16, *shape)  # judged as the stack that it becomes
    kind = type_of(Question(piece.name, shape, wanted, config, layout.rules))
    if kind is None:
        return piece
    packing = PACKINGS[kind]._replace(group_size=layout.int4_group) if kind == "int4" else PACKINGS[kind]
    return piece._replace(packing=packing, kind=kind)


# What some releases did to some families before anything else.


def _rewritten(pieces: list[_Piece], config: Config, layout: Layout) -> list[_Piece]:
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture.startswith(("Qwen3_5", "Qwen3Next")) and layout.qwen != "verbatim":
        return _qwen(pieces, architecture, keeps_prediction=layout.qwen == "rewritten with mtp")
    if architecture.startswith(("Gemma4", "gemma4_unified")) and layout.splits_gemma4:
        return [part for piece in pieces for part in _gemma4(piece)]
    return pieces


def _qwen(pieces: list[_Piece], architecture: str, *, keeps_prediction: bool) -> list[_Piece]:
    """Names of mlx-lm's, convolutions [C, K, 1], norms around one, everything but `A_log` in bfloat16."""
    raw = any("mtp." in name or ("conv1d" in name and tensor.shape[2] != 1) for name, tensor, *_ in pieces)
    result = []
    for name, tensor, origin, *_ in pieces:
        if "mtp." in name and not keeps_prediction:
            continue
        used = _qwen_name(name, "ConditionalGeneration" in architecture)
        for part_name, part in _qwen_parts(used, tensor):
            if "conv1d.weight" in part_name and part.shape[2] != 1:
                part = changed(part, lambda array: array.moveaxis(2, 1))
            if raw and part_name.endswith(SHIFTED_NORMS):
                part = changed(part, lambda array: (array.astype(mx.float32) + 1).astype(array.dtype))
            if part.dtype in ("F16", "F32") and not part_name.endswith("A_log"):
                part = changed(part, lambda array: array.astype(mx.bfloat16))
            result.append(_Piece(part_name, part, origin))
    return result


def _qwen_name(name: str, wrapped: bool) -> str:
    if name.startswith("model.visual."):
        return "vision_tower." + name.removeprefix("model.visual.")
    if not wrapped or name.startswith(("vision_tower.", "language_model.")):
        return name
    if name.startswith("model.language_model"):
        return "language_model.model" + name.removeprefix("model.language_model")
    return f"language_model.{name}"


def _qwen_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    head, found, tail = name.removesuffix(".weight").partition(".mlp.experts.")
    if found and tail == "gate_up_proj":
        middle = tensor.shape[1] // 2
        yield f"{head}.mlp.switch_mlp.gate_proj.weight", changed(tensor, lambda array: array[:, :middle])
        yield f"{head}.mlp.switch_mlp.up_proj.weight", changed(tensor, lambda array: array[:, middle:])
    elif found and tail == "down_proj":
        yield f"{head}.mlp.switch_mlp.down_proj.weight", tensor
    else:
        yield name, tensor


def _gemma4(piece: _Piece) -> Iterator[_Piece]:
    """Stacks of experts are cut up: the packing of expert groups that follows stacks them again if they are packed."""
    match = re.fullmatch(r"(.*\.layers\.\d+)\.(?:moe|experts)\.(\w+_proj)(?:\.weight)?", piece.name)
    if match is None or len(piece.tensor.shape) != 3:
        yield piece
        return
    for index, part in enumerate(unstacked(piece.tensor)):
        yield _Piece(f"{match[1]}.moe.experts.{index}.{match[2]}.weight", part, piece.origin)


# Which tensors lie in one blob.

_EARLY_GROUP = re.compile(
    r"((?:model\.language_model\.|language_model\.(?:model\.)?|model\.)?layers\.\d+"
    r"\.(?:mlp\.experts|mlp\.shared_experts|mlp\.switch_mlp|moe\.experts))\.(.+)\.weight"
)
_GROUP = re.compile(
    r"((?:.+\.)?layers\.\d+\.(?:mlp|moe|mixer)\.(?:experts|shared_experts|switch_mlp))\.(\d+\..+)\.weight"
)
_EXPERT = re.compile(r"(\d+)\.(.+)")


def _group(name: str, layout: Layout) -> tuple[str, str] | None:
    """The expert group that a tensor lies in and its name there, e.g. `model.layers.0.mlp.experts` and `3.up_proj`."""
    match = (_GROUP if layout.experts == "stacked" else _EARLY_GROUP).fullmatch(name)
    return (match[1], match[2]) if match else None


def _expert(name: str, layout: Layout) -> tuple[str, int, str] | None:
    """Group, number and projection of one expert's tensor."""
    found = _group(name, layout)
    match = _EXPERT.fullmatch(found[1]) if found else None
    return (found[0], int(match[1]), match[2]) if found and match else None


def _blobs(pieces: list[_Piece], layout: Layout) -> Iterator[Blob]:
    groups: dict[str, list[_Piece]] = {}
    for piece in pieces:
        found = _group(piece.name, layout)
        if found:
            groups.setdefault(found[0], []).append(piece)
        else:
            yield _blob(piece.name, [piece])
    for name, members in sorted(groups.items()):
        yield from _group_blobs(name, members, layout)


def _group_blobs(name: str, members: list[_Piece], layout: Layout) -> Iterator[Blob]:
    kinds = {piece.kind for piece in members}
    if layout.experts == "stacked":
        stacks = _stacks(members, f"{name}.", layout)
        if len(kinds) == 1:
            yield _blob(name, stacks)
        else:
            yield from (_blob(piece.name, [piece]) for piece in stacks)
    elif layout.experts == "together":
        yield _blob(name, members)._replace(metadata={})
    else:
        separate = all(_expert(piece.name, layout) for piece in members) and name.endswith(".experts")
        uniform = len(kinds) == 1 or layout.experts == "renamed"
        if separate and uniform and kinds != {None}:
            members = _stacks(members, name.removesuffix("experts") + "switch_mlp.", layout)
        blob = _blob(name, members)
        metadata = {**blob.metadata} if len(kinds) == 1 and not separate else {}
        for piece in members:
            if piece.kind and piece.packing:
                metadata[f"{piece.name}.quant_type"] = piece.kind
                metadata[f"{piece.name}.group_size"] = str(piece.packing.group_size)
        yield blob._replace(metadata=metadata)


def _stacks(members: list[_Piece], prefix: str, layout: Layout) -> list[_Piece]:
    """One three-dimensional piece per projection."""
    projections: dict[str, dict[int, _Piece]] = {}
    for piece in members:
        found = _expert(piece.name, layout)
        assert found
        projections.setdefault(found[2], {})[found[1]] = piece
    return [
        experts[0]._replace(
            name=f"{prefix}{projection}.weight",
            tensor=stacked([experts[index].tensor for index in range(len(experts))]),
        )
        for projection, experts in sorted(projections.items())
    ]


def _blob(layer: str, pieces: list[_Piece]) -> Blob:
    """A blob as it is written without regard to experts: its metadata name one type, or each tensor's."""
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        tensors |= quantize(piece.tensor, piece.name, piece.packing) if piece.packing else {piece.name: piece.tensor}
    packed = [piece for piece in pieces if piece.packing]
    metadata = {}
    if packed and len({piece.kind for piece in pieces}) == 1:
        assert packed[0].kind
        assert packed[0].packing
        metadata = {"quant_type": packed[0].kind, "group_size": str(packed[0].packing.group_size)}
    return Blob(layer, tensors, metadata, by_mlx=bool(packed), origins=frozenset(piece.origin for piece in pieces))


class _Producer(NamedTuple):
    """Names that follow a module's path. `inverted` tells whether the global scale divides."""

    weight: str
    scale: str
    bias: str = ""
    global_scale: str = ""
    inverted: bool = False
    metadata: Mapping[str, str] = {}


_MLX = _Producer(".weight", ".scales", ".biases")
_COMPRESSED = _Producer(
    ".weight_packed",
    ".weight_scale",
    global_scale=".weight_global_scale",
    inverted=True,
    metadata={"quant_type": "nvfp4", "group_size": "16"},
)
_PRODUCERS = (
    _MLX,
    _COMPRESSED,
    _Producer(".weight", ".weight_scale", global_scale=".weight_scale_2", metadata={"quant_type": "nvfp4"}),
)
_ACTIVATIONS = (".input_scale", ".input_global_scale")


def is_packed(tensors: Mapping[str, Tensor]) -> bool:
    return any(_found(name, tensors) for name in tensors)


def import_packed(tensors: Mapping[str, Tensor], config: Config, layout: Layout = HEAD) -> Iterator[Blob]:
    """The blobs of a checkpoint that is packed already."""
    blobs = _copied(tensors, config)
    yield from _stacked_groups(blobs) if layout.experts == "renamed" else blobs


def _copied(tensors: Mapping[str, Tensor], config: Config) -> Iterator[Blob]:
    consumed: set[str] = set()
    weights: dict[str, Blob] = {}
    for name in tensors:
        found = _found(name, tensors)
        if found is None:
            continue
        producer, stem = found
        companions = [stem + part for part in (producer.scale, producer.bias, producer.global_scale) if part]
        consumed |= {*companions, *(stem + part for part in _ACTIVATIONS)}
        arrays = {f"{stem}.weight": _words(tensors[name]), f"{stem}.weight.scale": _bytes(tensors[companions[0]])}
        if producer.bias and stem + producer.bias in tensors:
            arrays[f"{stem}.weight.bias"] = tensors[stem + producer.bias]
        if producer.global_scale and stem + producer.global_scale in tensors:
            factor = tensors[stem + producer.global_scale]
            arrays[f"{stem}.weight.global_scale"] = _inverse(factor) if producer.inverted else factor
        metadata = {**producer.metadata} if producer is not _MLX else _declared(config)
        weights[name] = Blob(f"{stem}.weight", arrays, metadata)
    for name, tensor in tensors.items():
        if name in weights:
            yield weights[name]
        elif name not in consumed:
            yield Blob(name, {name: tensor})


_EXPERT_WEIGHT = re.compile(r"((?:.+\.)?layers\.\d+\.(?:mlp|moe))\.experts\.(\d+)\.(\w+)\.weight")


def _stacked_groups(blobs: Iterator[Blob]) -> Iterator[Blob]:
    """From 0.20.8 to 0.30 the experts of compressed-tensors were stacked, their global scales to [E, 1, 1]."""
    groups: dict[str, dict[str, dict[int, Blob]]] = {}
    for blob in blobs:
        match = _EXPERT_WEIGHT.fullmatch(blob.layer)
        if match and blob.metadata == _COMPRESSED.metadata:
            groups.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = blob
        else:
            yield blob
    for head, projections in groups.items():
        arrays: dict[str, Tensor] = {}
        metadata = dict(_COMPRESSED.metadata)
        for projection, experts in sorted(projections.items()):
            name = f"{head}.switch_mlp.{projection}.weight"
            for suffix in ("", ".scale", ".global_scale"):
                parts = [experts[index].tensors[f"{experts[index].layer}{suffix}"] for index in range(len(experts))]
                whole = stacked([part._replace(shape=(1, 1)) if suffix == ".global_scale" else part for part in parts])
                arrays[name + suffix] = whole
            metadata |= {f"{name}.{key}": value for key, value in _COMPRESSED.metadata.items()}
        yield Blob(f"{head}.experts", arrays, metadata)


def _found(name: str, tensors: Mapping[str, Tensor]) -> tuple[_Producer, str] | None:
    for producer in _PRODUCERS:
        stem = name.removesuffix(producer.weight)
        if stem != name and stem + producer.scale in tensors:
            return producer, stem
    return None


def _declared(config: Config) -> dict[str, str]:
    """Returns the config's settings for the whole model, right or wrong for this tensor; none without a mode."""
    said = config.get("quantization")
    if not isinstance(said, Mapping) or "mode" not in said:
        return {}
    kind = {4: "int4", 8: "int8"}.get(said["bits"]) if said["mode"] == "affine" else str(said["mode"])
    return {"quant_type": kind, "group_size": str(said["group_size"])} if kind else {}


def _words(tensor: Tensor) -> Tensor:
    """Two values a byte are eight values a word."""
    if tensor.dtype != "U8":
        return tensor
    return Tensor("U32", (*tensor.shape[:-1], tensor.shape[-1] // 4), tensor.data)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor._replace(dtype="U8") if tensor.dtype == "F8_E4M3" else tensor


def _inverse(tensor: Tensor) -> Tensor:
    (value,) = struct.unpack("<f", tensor.data)
    return tensor._replace(data=struct.pack("<f", 1 / value))
