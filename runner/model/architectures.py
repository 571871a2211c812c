"""Maps each architecture to the mlx-lm module that computes it, and to the names that differ between file and module.

FAMILIES has a row for each architecture with rules of its own. Any other architecture runs on the mlx-lm module that
the config's `model_type` names, if there is one, and its tensors keep their names.
"""

import importlib.util
import re
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from runner.errors import ModelError
from runner.model.sources.checkpoint import LogicalTensor
from runner.versions import installed

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

Config = dict[str, object]

_PREFIX = r"(?:model\.|language_model\.)?"
UNNEEDED = {
    "vision": re.compile(
        rf"{_PREFIX}(?:vision(?:_tower|_model|_embedder|_adapter|_projection|_projector|_final_layernorm)?|visual"
        r"|embed_vision|mlp1|aligner|multi_modal_projector|mm_projector|patch_merge_mlp)\."
    ),
    "audio": re.compile(rf"{_PREFIX}(?:audio_tower|embed_audio|sound_encoder|sound_projection)\."),
    "mtp": re.compile(r"(?:.+\.)?mtp(?:_\w+)?\."),
    "rotary tables": re.compile(r".+\.rotary_emb\.inv_freq$"),
}
"""Part that text models do not need -> a pattern of the names of the part's tensors. `mtp`: multi-token prediction."""

Rename = tuple[str, str]


class Library(Protocol):
    """A Python package, other than mlx-lm, whose models this runner serves with their towers. Any thread may use it."""

    name: str
    """The name by which Python imports the package."""
    title: str

    def module_config(self, family: "Family", read: Callable[[str], Config]) -> Config:
        """Returns the configuration for `make_module`. `read(name)` returns the object in the model's file `name`."""

    def make_module(self, module: str, config: Config) -> "Module":
        """Returns a fresh module with random, lazy parameters. Imports the package. Raises ModelError if the import
        fails or the configuration does not fit."""

    def why_not(self, module: str, *, batches: bool) -> str:
        """Returns the reason why answers must not share a forward (if `batches`) or must not be drafted (otherwise).
        The text is empty if there is no reason."""


class Family(NamedTuple):
    """The rules by which one architecture runs on a module.

    `text` is the key of the config object that describes the text model: "" for the top level, `a.b` for a nested
    object. `flat` is the family of a config without that object. `unwrapped` is true if the module is built from that
    object alone. `required` are fields without a right default in mlx-lm. `defaults` are values for missing fields that
    mlx-lm's class requires or this runner checks. `renames` are pairs (pattern, replacement) for tensor names, applied
    in order. `head` is the output projection's name after renaming.
    """

    module: str
    text: str = ""
    flat: "Family | None" = None
    unwrapped: bool = False
    required: tuple[str, ...] = ()
    defaults: Mapping[str, object] = {}
    renames: tuple[Rename, ...] = ()
    head: str = "lm_head.weight"
    context_default: int = 0
    most_context: int = 0
    """The most tokens of context; 0 if only the config limits them."""
    library: Library | None = None
    """The package that has the module; None for mlx-lm."""
    unseen: str = ""
    """The reason why pictures are not served although another package has a tower for them; else empty."""

    @property
    def import_name(self) -> str:
        """The name by which the module is imported."""
        return f"{'mlx_lm' if self.library is None else self.library.name}.models.{self.module}"

    def renamed(self, name: str) -> str:
        """Returns the tensor's name for the module's `sanitize`. A name that was already renamed stays the same."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    @property
    def is_listed(self) -> bool:
        """True if FAMILIES has a row for this architecture; False if the family was made by general rules."""
        return bool(self.required)

    @property
    def is_encoder(self) -> bool:
        """True if the model makes embeddings or scores of texts, but does not generate text."""
        return self.module in ENCODERS or self.decides

    @property
    def decides(self) -> bool:
        """True if the model scores given options with an output head of its own, instead of generating text."""
        return self.module in DECIDERS.values()


_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size")
_HEADS = (*_SIZES, "num_attention_heads")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_KOLIBRI = (*_HEADS[:2], *_HEADS[3:], "num_key_value_heads", "head_dim", *_EXPERTS, "shared_expert_intermediate_size")
_LINEAR = tuple(
    f"linear_{part}"
    for part in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
)
_MAMBA = {
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4, "n_groups": 1,
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip
"""Ollama's values for fields that the config of a Nemotron-H lacks."""

_UNWRAPPED: tuple[Rename, ...] = (
    (r"^(model\.language_model\.|language_model\.model\.)", "model."),
    (r"^language_model\.", ""),
)
_WRAPPED: tuple[Rename, ...] = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
_WRAPPED_HEAD = "language_model.lm_head.weight"

_LLAMA = Family("llama", required=_HEADS, defaults={"rms_norm_eps": 1e-5}, renames=_UNWRAPPED)
_GEMMA4_EXPERTS: tuple[Rename, ...] = (
    (r"\.moe\.(?:switch_mlp\.)?(gate_up_proj|down_proj)(?:\.weight)?$", r".experts.\1"),
    (r"\.moe\.(?:switch_mlp\.)?(gate_proj|up_proj)(?:\.weight)?$", r".experts.switch_glu.\1.weight"),
)
_GEMMA4_TEXT = Family(
    "gemma4_text", required=_SIZES, defaults={"head_dim": 256}, renames=(*_UNWRAPPED, *_GEMMA4_EXPERTS)
)
_GEMMA4 = _GEMMA4_TEXT._replace(
    module="gemma4", text="text_config", flat=_GEMMA4_TEXT, renames=(*_WRAPPED, *_GEMMA4_EXPERTS), head=_WRAPPED_HEAD
)
_QWEN3_5_TEXT = Family(
    "qwen3_5",
    required=(*_HEADS, "num_key_value_heads", "head_dim", *_LINEAR),
    renames=((r"^(?!language_model\.|model\.language_model\.)", "language_model."), *_WRAPPED),
    head=_WRAPPED_HEAD,
)
_QWEN3_5 = _QWEN3_5_TEXT._replace(text="text_config", flat=_QWEN3_5_TEXT)
_QWEN3_5_MOE_TEXT = _QWEN3_5_TEXT._replace(
    module="qwen3_5_moe",
    required=(*(field for field in _QWEN3_5_TEXT.required if field != "intermediate_size"), *_EXPERTS),
)
_QWEN3_5_MOE = _QWEN3_5_MOE_TEXT._replace(text="text_config", flat=_QWEN3_5_MOE_TEXT)
_QWEN3_NEXT = Family(
    "qwen3_next",
    required=(*_HEADS, "rms_norm_eps", "num_key_value_heads", "head_dim", "rope_theta", *_LINEAR, *_EXPERTS),
    defaults={"mlp_only_layers": [], "decoder_sparse_step": 1, "max_position_embeddings": 0},
    renames=_UNWRAPPED,
)
_QWEN3_NEXT_WRAPPED = _QWEN3_NEXT._replace(text="text_config", flat=_QWEN3_NEXT, unwrapped=True)
_GLM4_MOE_LITE = Family("glm4_moe_lite", required=_HEADS, defaults={"kv_lora_rank": 512}, renames=_UNWRAPPED)
_NEMOTRON_H = Family(
    "nemotron_h",
    required=("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    defaults=_MAMBA,
    renames=((r"^(model\.)?language_model\.", ""),),
)
_NEMOTRON_H_WRAPPED = _NEMOTRON_H._replace(text="llm_config", flat=_NEMOTRON_H, unwrapped=True)
_EMBEDDING_GEMMA2_SIZES: Mapping[str, object] = {
    "vocab_size": 262144, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "embedding_dim": 768,
}  # fmt: skip
_EMBEDDING_GEMMA2_TEXT = Family(
    "embedding_gemma2",
    required=(*_EMBEDDING_GEMMA2_SIZES,),
    defaults=_EMBEDDING_GEMMA2_SIZES,
    renames=(
        (r"^(model\.)?language_model\.", ""),
        (r"^model\.", ""),
        (r"^per_layer_projection_norm\.", "ple.per_layer_projection_norm."),
        (
            r"^(layers\.\d+)\.(per_layer_input_gate|per_layer_projection|post_per_layer_input_norm)\.",
            r"\1.ple_block.\2.",
        ),
    ),
    context_default=8192,
    most_context=8192,
)
_GLIMMER = Family("muse_glimmer", required=_HEADS, defaults={"head_dim": 128}, renames=_UNWRAPPED)
_LFM2 = Family("lfm2", required=(*_HEADS[:2], _HEADS[3]), renames=_UNWRAPPED)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": Family(
        "qwen3",
        required=(*_HEADS, "num_key_value_heads"),
        # mlx-lm requires these fields. `head_dim` gets transformers' default. The context length only sets this
        # runner's own limit; 0 means unknown. The other two fields get Ollama's defaults.
        defaults={"head_dim": 128, "max_position_embeddings": 0, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0},
        renames=_UNWRAPPED,
    ),
    "Gemma3ForCausalLM": Family("gemma3_text", required=_SIZES, renames=_UNWRAPPED),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3", text="text_config", required=_SIZES, renames=_WRAPPED, head=_WRAPPED_HEAD, context_default=131072
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3NextForConditionalGeneration": _QWEN3_NEXT_WRAPPED,
    "Qwen3NextMoeForCausalLM": _QWEN3_NEXT,
    "Qwen3NextMoeForConditionalGeneration": _QWEN3_NEXT_WRAPPED,
    "Glm4MoeLiteForCausalLM": _GLM4_MOE_LITE,
    "GLM4MoeLite": _GLM4_MOE_LITE,
    "Cohere2MoeForCausalLM": Family("cohere2_moe", required=_HEADS, renames=_UNWRAPPED, context_default=8192),
    "Kolibri1ForCausalLM": Family("kolibri1", required=_KOLIBRI, renames=_UNWRAPPED),
    "EmbeddingGemma2Model": _EMBEDDING_GEMMA2_TEXT._replace(
        text="text_config", flat=_EMBEDDING_GEMMA2_TEXT, unwrapped=True
    ),
    "LagunaForCausalLM": Family("laguna", required=_HEADS, defaults={"head_dim": 128}, renames=_UNWRAPPED),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2VlForConditionalGeneration": _LFM2._replace(text="text_config", flat=_LFM2, unwrapped=True),
    "NemotronHForCausalLM": _NEMOTRON_H,
    "NemotronH_Nano_VL_V2": _NEMOTRON_H_WRAPPED,
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON_H_WRAPPED,
    "MuseGlimmerForConditionalGeneration": _GLIMMER._replace(text="text_config", flat=_GLIMMER, unwrapped=True),
}

OLLAMA_ONLY = {
    "ClefForDecision": "decides with its own output head over a Qwen 3.5",
    "LayaForDecision": "is an encoder that decides",
    "Qwen4ExpForConditionalGeneration": "has four streams, sparse attention and a table of n-grams",
    "StrandsDeciderForDecision": "decides with its own output head over a Qwen 3.5",
}
"""Architecture that neither mlx-lm nor this runner can compute -> a description. Some of these models have a
`model_type` of mlx-lm, but that module would compute something else."""

RENAMED_MODULES = {
    "mistral": "llama", "xverse": "llama", "iquestcoder": "llama", "llava": "mistral3", "phi-msft": "phixtral",
    "falcon_mamba": "mamba", "joyai_llm_flash": "deepseek_v3", "kimi_k2": "deepseek_v3", "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax", "gemma4_unified": "gemma4", "deepseek_v41_text": "deepseek_v41",
}  # fmt: skip
"""`model_type` -> the mlx-lm module that computes it, if the module has another name."""

COMPUTED_TENSORS = {
    "baichuan_m1": (r"lm_head\.weight", ""),
    "bailing_moe": (r"lm_head\.weight", "norm_head"),
    "bailing_moe_linear": (r"lm_head\.weight", "norm_head"),
    "kimi_k3": (r".+\.self_attn\.[qkv]_proj\.weight", ""),
    "muse_spark": (r".+\.self_attn\.(q|k|v|g|gate)_proj\.weight", ""),
}
"""mlx-lm module -> a pattern of tensor names, and a config field or an empty text. The module's `sanitize` computes
with these tensors if that field is true, or always if it is empty. So packed ones must be unpacked first. No trial
shows this: `sanitize` casts the result back, or joins tensors that Ollama packs differently."""

TRIED = frozenset(
    """
    Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 bitnet cohere
    cohere2 cohere2_moe dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v41 dots1 ernie4_5 ernie4_5_moe
    exaone exaone4 exaone_moe falcon_h1 gear gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4
    glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium
    hunyuan hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl kolibri1
    laguna lfm2 lfm2-vl lfm2_moe lille-130m llama llama4 llama4_text longcat_flash longcat_flash_ngram mamba mamba2
    mellum mimo mimo_v2_flash minicpm minicpm3 minimax minimax_m3_vl ministral3 mistral3 mistral4 mixtral muse_glimmer
    muse_spark nanbeige nanochat nemotron nemotron-nas nemotron_h olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3
    phi3small phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35 qwen qwen2 qwen2_moe qwen2_vl qwen3
    qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open
    spark2_5 stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The mlx-lm modules that `python -m scripts.tools.models.abilities` has tried: with answers that share a forward, and
with drafts. The next two tables list the modules that failed."""

UNBATCHABLE = {
    "afm7": "its last layers count their positions by the length of the buffers",
    "deepseek_v41": "mlx-lm has no batch of its layers",
    "gemma2": "its own attention has no dimension for a mask of several rows",
    "gpt_bigcode": "it needs the same position in all rows",
    "llama4": "mlx-lm has no batch of its chunked layers",
    "minimax_m3_vl": "its sparse attention counts the padding of shorter rows among the blocks to choose from",
    "phi3small": "its own attention has no dimension for a mask of several rows",
}
"""mlx-lm module -> the reason why answers must not share a forward. The trial finds all of them but `minimax_m3_vl`. A
`gemma2` with as many key heads as query heads could share forwards, but none is known."""
UNDRAFTABLE = {
    "deepseek_v41": "its layers cannot go back",
    "phi3small": "its masks let tokens attend to later ones",
    "plamo3": "its mask covers more tokens than its window keeps",
}
"""mlx-lm module -> the reason why drafts would change an answer."""

ENCODERS = frozenset({"embedding_gemma2"})
"""This runner's modules that make embeddings of texts. They are in no table above: they have no cache and no logits."""

DECIDERS = {"ClefForDecision": "clef", "LayaForDecision": "laya"}
"""Architecture of a model that scores options with a head of its own -> the package of mlx-vlm that computes it."""

METAL_ONLY = frozenset({"bitnet", "muse_spark"})
"""Modules whose kernels exist only for Metal. Their entries in TRIED come from a trial on a CPU, with plain MLX in
place of the kernels."""


def architecture_of(config: Config, *, from_store: bool) -> str:
    """Returns the first entry of `architectures`. For a directory without this field, returns the architecture that has
    the module of its `model_type`, else the `model_type`. Raises ModelError if both fields are missing."""
    names = config.get("architectures")
    if isinstance(names, str):
        names = [names]
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    model_type = config.get("model_type")
    if from_store or not isinstance(model_type, str):
        raise ModelError("no architectures found in config.json")
    module = RENAMED_MODULES.get(model_type, model_type)
    return next((name for name, family in FAMILIES.items() if family.module == module), model_type)


class ChooseFamily(Protocol):
    """A function that chooses the family of a model by its config: `family_of`, or one that also knows a `Library`."""

    def __call__(self, architecture: str, config: Config, *, from_store: bool) -> Family: ...


def family_of(architecture: str, config: Config, *, from_store: bool = True) -> Family:
    """Returns the row of `architecture`, else a family made from the `model_type`. Raises ModelError if there is no
    module. For a directory, a `model_type` with another module takes precedence over the row, as in mlx-lm."""
    if architecture in OLLAMA_ONLY:
        what = OLLAMA_ONLY[architecture]
        raise ModelError(f"unsupported architecture: {architecture}, which {what}: only Ollama's own runner serves it")
    model_type = config.get("model_type")
    module = RENAMED_MODULES.get(model_type, model_type) if isinstance(model_type, str) else ""
    if row := FAMILIES.get(architecture):
        flat = row.flat or row
        if from_store or not _is_module(module) or module in (row.module, flat.module):
            return row if row.text in config else flat
    if architecture == "BailingMoeV3ForCausalLM" and module == "bailing_hybrid":
        module = "bailing_moe_v3"
    if not _is_module(module):
        raise ModelError(
            f"unsupported architecture: {architecture}",
            f"this runner has no row for {architecture!r:.80}; for the model_type {model_type!r:.80}, mlx-lm"
            f" {installed('mlx-lm')} has no module mlx_lm.models.{module:.80}, and mlx-vlm no package that is known"
            " here",
        )
    text = next((key for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), "")
    return Family(module, text=text)


def _is_module(name: str) -> bool:
    """Returns True if mlx-lm has the module `name`. Names come from files: a name with a dot or a slash is refused."""
    plain = re.fullmatch(r"[A-Za-z0-9][\w-]*", name)
    return plain is not None and importlib.util.find_spec(f"mlx_lm.models.{name}") is not None


def is_needed(name: str) -> bool:
    """Returns True if a text model may need the tensor called `name`."""
    return not any(pattern.match(name) for pattern in UNNEEDED.values())


def select_tensors(
    family: Family, tensors: Mapping[str, LogicalTensor], left_out: Container[str] = frozenset()
) -> dict[str, LogicalTensor]:
    """Returns the tensors that the model needs, by the names that the module's `sanitize` knows. Skips `left_out`."""
    chosen: dict[str, LogicalTensor] = {}
    towers = [UNNEEDED["vision"], UNNEEDED["audio"]] if family.library is not None and not family.decides else []
    for tensor in tensors.values():
        needed = is_needed(tensor.name) or any(tower.match(tensor.name) for tower in towers)
        if tensor.name in left_out or not needed:
            continue
        name = family.renamed(tensor.name)
        if name in chosen:
            raise ModelError(f"tensor {name} is in the model twice: {chosen[name].weight.file}, {tensor.weight.file}")
        chosen[name] = tensor._replace(name=name)
    return chosen
