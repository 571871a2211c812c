"""The drafter that uses a head, and the networks of heads: of Qwen 3.5, dense or with experts, and Qwen3-Next in one
class, and of Nemotron-H."""

import copy
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Self, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import nemotron_h, qwen3_5, qwen3_next
from mlx_lm.models.base import create_attention_mask

from runner.cache.layers.rows import LONG_STEP, SHORT_STEP, KVRows
from runner.drafts.drafting import DraftedAnswer
from runner.drafts.hidden_states import RowDrafter, RowText, padded, read_drafts
from runner.drafts.target import Draw, Target
from runner.errors import ModelError
from runner.model.weights.experts import Weights


class HeadModule(Module):
    """The network of a head, without the parts that the target lends to it."""

    layers: list[Module]
    attentions: int
    """The number of the head's layers with attention: each needs a cache."""

    def __init__(self) -> None:
        Module.__init__(self)  # MLX's `__init__` is not typed

    @classmethod
    @abstractmethod
    def of_target(cls, args: object, names: Collection[str]) -> Self:
        """Returns a head for a target made from `args`. `names` are the names of the head's tensors. The parameters are
        random and lazy. Raises ModelError if the tensors make no head of this family."""

    @abstractmethod
    def __call__(self, embedded: mx.array, hidden: mx.array, layers: Sequence[KVRows]) -> mx.array:
        """Maps the embeddings of tokens and the hidden states before those tokens, [B, L, D] each, to the head's hidden
        states [B, L, D]. Advances `layers`."""

    @classmethod
    def renamed(cls, names: Collection[str]) -> dict[str, str]:
        """Maps the stored names of tensors, without `mtp.`, to the names that `sanitize` knows."""
        return {name: name for name in names}

    @classmethod
    @abstractmethod
    def sanitize(cls, weights: Weights, *, shifted: Collection[str]) -> Weights:
        """Returns the weights by the names of parameters. Adds 1 to the norms in `shifted`: they are too small by 1."""


class Head(NamedTuple):
    """A head with the parts of its target. Owner: the engine thread."""

    module: HeadModule
    target: Target

    def make_layers(self, rows: int = 1) -> list[KVRows]:
        """Returns empty layer caches for `rows` texts."""
        return [KVRows(None, [[]] * rows, [0] * rows) for _ in range(self.module.attentions)]

    def states(self, hidden: mx.array, tokens: mx.array, layers: Sequence[KVRows]) -> mx.array:
        """Returns the head's lazy hidden states [B, L, D]. `hidden` [B, L, D] are hidden states of the target or the
        head, and `tokens` [B, L] are the tokens after them. Advances `layers`."""
        return self.module(self.target.embed(tokens), hidden, layers)


_MOST_ROWS = 256
_MOST_SLOTS = 4096
"""The most slots (see `HeadDrafter`) of all texts that are drafted together. A text that would exceed its even share
begins anew, so that the layers of the head stay small."""


class HeadText(RowText):
    """A text that a head reads. Its places are the slots of `HeadDrafter`. Owner: the engine thread."""

    def go_back(self, to: int) -> None:
        super().go_back(to)
        if to < self.at:
            self.begin(0)


class HeadDrafter(RowDrafter[HeadText]):
    """Drafts with the target's own head. Owner: the engine thread.

    *Slot* i of a text joins the target's hidden state of token i with the embedding of token i + 1. The logits of slot
    i predict token i + 2. The head may miss the beginning of a text: drafts are worse then, but answers are the same.
    """

    def __init__(self, head: Head, most_rows: int = _MOST_ROWS, most_slots: int = _MOST_SLOTS) -> None:
        """Computes a hidden state with the head, and raises the errors of that forward."""
        super().__init__("the model's own head", [head.target.norm], most_rows, HeadText, head.make_layers)
        self.head = head
        self._most_slots = most_slots
        layers, tokens = head.make_layers(), mx.zeros((1, 1), mx.uint32)
        states = head.states(head.target.embed(tokens), tokens, layers)
        mx.eval(head.target.unembed(states))  # MLX refuses some layers only when they compute
        self._slot_bytes = sum(layer.nbytes for layer in layers) // SHORT_STEP
        self._row_bytes = states.nbytes

    def most_bytes(self, answers: int) -> int:
        slots = self._most_slots + answers * LONG_STEP
        return slots * self._slot_bytes + 2 * answers * self._most_rows * self._row_bytes

    def prepare(self, answer: DraftedAnswer, text: HeadText, layers: Sequence[object]) -> bool:  # noqa: ARG002
        position, recorded = answer.position, answer.session.recorded
        if position == text.at and text.held:  # nothing is left to read, so the head reads the last slot again
            text.held -= 1
        first = text.first_waiting(position)
        if first is None:
            return False
        start = max(text.at, first)
        pictures = [place for place in range(start, position) if recorded[place + 1] < 0]
        if pictures:
            start = pictures[-1] + 1
        if start != text.at:
            text.begin(start)
        return True

    def draft(
        self,
        answers: Sequence[DraftedAnswer],
        texts: Sequence[HeadText],
        layers: Sequence[object],  # noqa: ARG002
        most: int,
        draw: Draw,
    ) -> Sequence[Sequence[int]]:
        self.turn_to(texts)
        states = self._read(answers)
        drafts = [draw(self.head.target.unembed(states)[:, -1])]
        for _ in range(most - 1):
            mx.async_eval(drafts[-1])
            states = self.head.states(states, drafts[-1][:, None], self._layers)
            drafts.append(draw(self.head.target.unembed(states)[:, -1]))
        return read_drafts(drafts)

    def _read(self, answers: Sequence[DraftedAnswer]) -> mx.array:
        """Reads all tokens that the target has seen. Returns the head's states of each text's last slot, [B, 1, D]."""
        counts = [answer.position - text.at for answer, text in zip(answers, self._rows, strict=True)]
        longest, most = max(counts), self._most_slots // len(counts)
        hidden, tokens = list[mx.array](), list[list[int]]()
        for answer, text, count in zip(answers, self._rows, counts, strict=True):
            if text.held + count > most:
                text.begin(text.at)
            hidden.append(padded(text.waiting(text.at, answer.position), longest))
            tokens.append([*answer.session.recorded[text.at + 1 : answer.position + 1], *[0] * (longest - count)])
        self.stand()  # removes the slots of earlier drafts
        states = self.head.states(mx.concatenate(hidden), mx.array(tokens), self._layers)
        for text, count in zip(self._rows, counts, strict=True):
            text.held += count
            text.skip(text.at - 1)
        self.stand()
        return states[mx.arange(len(counts)), mx.array(counts) - 1][:, None]


_QWEN_NORMS = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_QWEN_NORM = re.compile(r"layers\.\d+\.(?:.+_layernorm|self_attn\.[qk]_norm)\.weight")
_QWEN_FUSED = re.compile(r"(.+)\.experts\.gate_up_proj(?:\.weight)?")
_QWEN_DOWN = re.compile(r"(.+)\.experts\.down_proj")
_QWEN_LAYER = re.compile(r"layers\.(\d+)\.")


class QwenHead(HeadModule):
    """The head of Qwen 3.5 and Qwen3-Next: layers with full attention over slots (see `HeadDrafter`)."""

    def __init__(self, width: int, eps: float, layers: list[Module]) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(width, eps)
        self.pre_fc_norm_hidden = RMSNorm(width, eps)
        self.fc = Linear(2 * width, width, bias=False)
        self.layers = layers
        self.attentions = len(layers)
        self.norm = RMSNorm(width, eps)

    @classmethod
    def of_target(cls, args: object, names: Collection[str]) -> Self:
        if "fc.weight" not in names:
            raise ModelError("it lacks mtp.fc.weight")
        count = 1 + max((int(match[1]) for match in map(_QWEN_LAYER.match, names) if match), default=0)
        if count > len(names):
            raise ModelError(f"most of its {count} layers are missing")
        own = copy.copy(cast("qwen3_5.TextModelArgs", args))
        own.full_attention_interval = 1
        if not any(".mlp.switch_mlp." in name or ".mlp.experts." in name for name in names):
            own.num_experts = 0
        kind: object = qwen3_5.DecoderLayer
        if isinstance(args, qwen3_next.ModelArgs):
            vars(own).update(decoder_sparse_step=1, mlp_only_layers=[])
            kind = qwen3_next.Qwen3NextDecoderLayer
        make = cast("Callable[[object, int], Module]", kind)
        return cls(own.hidden_size, own.rms_norm_eps, [make(own, 0) for _ in range(count)])

    def __call__(self, embedded: mx.array, hidden: mx.array, layers: Sequence[KVRows]) -> mx.array:
        joined = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(joined, axis=-1))
        mask = create_attention_mask(x, layers[0])
        for layer, cache in zip(self.layers, layers, strict=True):
            x = layer(x, mask=mask, cache=cache)
        return cast("mx.array", self.norm(x))

    @classmethod
    def sanitize(cls, weights: Weights, *, shifted: Collection[str]) -> Weights:
        result: Weights = {}
        for name, array in weights.items():
            if match := _QWEN_FUSED.fullmatch(name):
                middle = array.shape[-2] // 2
                result[f"{match[1]}.switch_mlp.gate_proj.weight"] = array[..., :middle, :]
                result[f"{match[1]}.switch_mlp.up_proj.weight"] = array[..., middle:, :]
            elif match := _QWEN_DOWN.fullmatch(name):
                result[f"{match[1]}.switch_mlp.down_proj.weight"] = array
            else:
                result[name] = array + 1.0 if name in shifted and array.ndim == 1 else array
        return result

    @classmethod
    def norms(cls, names: Collection[str], *, all_of_them: bool) -> set[str]:
        """Returns the norms among these names whose stored weights are too small by 1. With `all_of_them`, as in the
        source, these are all norms; else, as in one release of Ollama, the norms outside of layers."""
        found = {name for name in names if name in _QWEN_NORMS}
        return found | {name for name in names if _QWEN_NORM.fullmatch(name)} if all_of_them else found


_NEMOTRON_KINDS = (
    ("*", re.compile(r"mixer\.[qkvo]_proj\.")),
    ("E", re.compile(r"mixer\.(?:gate|experts|switch_mlp)\.")),
    ("M", re.compile(r"mixer\.(?:in_proj|conv1d|A_log)")),
    ("-", re.compile(r"mixer\.(?:up|down)_proj\.")),
)
"""For each kind of layer, by mlx-lm's name: a pattern of tensors that only this kind has."""
_NEMOTRON_NAMES = {
    "enorm.weight": ("pre_fc_norm_embedding.weight", "layers.{first}.enorm.weight"),
    "hnorm.weight": ("pre_fc_norm_hidden.weight", "layers.{first}.hnorm.weight"),
    "eh_proj.weight": ("fc.weight", "layers.{first}.eh_proj.weight"),
    "final_layernorm.weight": (
        "norm.weight", "shared_head.norm.weight", "layers.{last}.final_layernorm.weight",
    ),
}  # fmt: skip
"""Parameter -> the names that packages give to its tensor. The first name that a package has counts."""
_NEMOTRON_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_NEMOTRON_EXPERTS = re.compile(r"(.+\.mixer\.switch_mlp)\.(up|down)_proj\.weight")


class NemotronHead(HeadModule):
    """The head of Nemotron-H: layers of attention, experts or plain projections over slots (see `HeadDrafter`)."""

    def __init__(self, args: nemotron_h.ModelArgs, kinds: str) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.layer_norm_epsilon
        self.enorm = RMSNorm(width, eps)
        self.hnorm = RMSNorm(width, eps)
        self.eh_proj = Linear(2 * width, width, bias=False)
        make = cast("Callable[[nemotron_h.ModelArgs, str], Module]", nemotron_h.NemotronHBlock)
        self.layers = [make(args, kind) for kind in kinds]
        self.final_layernorm = RMSNorm(width, eps)
        self.attentions = kinds.count("*")
        self._kinds = kinds

    @classmethod
    def of_target(cls, args: object, names: Collection[str]) -> Self:
        assert isinstance(args, nemotron_h.ModelArgs)
        layers: dict[int, list[str]] = {}
        for match in filter(None, map(_NEMOTRON_LAYER.fullmatch, names)):
            layers.setdefault(int(match[1]), []).append(match[2])
        if not layers:
            raise ModelError("it has no layers")
        kinds = ""
        for _, parts in sorted(layers.items()):
            kind = next((kind for kind, pattern in _NEMOTRON_KINDS if any(map(pattern.match, parts))), "")
            if kind not in ("*", "E", "-"):
                raise ModelError(f"one of its layers is {'recurrent' if kind else 'of an unknown kind'}")
            kinds += kind
        return cls(args, kinds)

    def __call__(self, embedded: mx.array, hidden: mx.array, layers: Sequence[KVRows]) -> mx.array:
        x = self.eh_proj(mx.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))
        mask = create_attention_mask(x, layers[0]) if layers else None
        caches = iter(layers)
        for kind, layer in zip(self._kinds, self.layers, strict=True):
            x = layer(x, mask=mask, cache=next(caches)) if kind == "*" else layer(x)
        return cast("mx.array", self.final_layernorm(x))

    @classmethod
    def renamed(cls, names: Collection[str]) -> dict[str, str]:
        numbers = sorted({int(match[1]) for match in map(_NEMOTRON_LAYER.fullmatch, names) if match})
        if not numbers:
            return super().renamed(names)
        places = {number: place for place, number in enumerate(numbers)}
        result = {}
        for name in names:
            match = _NEMOTRON_LAYER.fullmatch(name)
            result[name] = f"layers.{places[int(match[1])]}.{match[2]}" if match else name
        for parameter, stored in _NEMOTRON_NAMES.items():
            known = (name.format(first=numbers[0], last=numbers[-1]) for name in stored)
            if found := next((name for name in known if name in names), None):
                result[found] = parameter
        return result

    @classmethod
    def sanitize(cls, weights: Weights, *, shifted: Collection[str]) -> Weights:  # noqa: ARG003  none does
        parts = {"up": "fc1", "down": "fc2"}
        return {_NEMOTRON_EXPERTS.sub(lambda match: f"{match[1]}.{parts[match[2]]}.weight", name): array
                for name, array in weights.items()}  # fmt: skip
