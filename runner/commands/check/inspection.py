"""Gathers the facts about a model for `mlx-runner check`, from the code that would serve the model."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec

from runner import cpu
from runner.cache.layers import adapt, flatten
from runner.cache.layers.kv import KVState
from runner.cache.layers.snapshot import Ledger
from runner.cache.layers.states import RecurrentState
from runner.cache.layers.window import ChunkState, WindowState
from runner.commands.check.examination import Amount, Examination, collecting_faults, contents, examine, files, skipped
from runner.commands.check.trial import TrialFacts, try_model
from runner.device import device, usable_bytes
from runner.engine.parts import Examined, Facts
from runner.errors import MissingError, ModelError
from runner.logs import printable
from runner.model import OpenedModel
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.weights.dtype import plan_dtypes
from runner.model.weights.loading import LoadedModel
from runner.model.weights.mended import unread
from runner.settings import CheckSettings, context_limit
from runner.sizes import sized
from runner.tokenizer import Tokenizer, open_tokenizer
from runner.tokenizer.model_files import read_object
from runner.versions import misfits
from runner.wings import chooser, wings_of


class LayerKind(msgspec.Struct, frozen=True):
    """A kind of layer caches (`name`), mlx-lm's class of them (`cache`), and their number."""

    name: str
    cache: str
    count: int


class ContextLimit(msgspec.Struct, frozen=True):
    """The most tokens of a request, and the source of that limit."""

    tokens: int
    source: Literal["model", "--context", "default"]


class NumberFormat(msgspec.Struct, frozen=True):
    """The type in which the model computes, and the reason."""

    dtype: str
    why: str


class BlasFacts(msgspec.Struct, frozen=True):
    """The BLAS that serving would load. `advice` tells how to get a faster BLAS.

    `matters` is False if the matrix products are computed by a GPU or by a fast library of the operating system.
    """

    name: str
    matters: bool
    advice: str | None


class Token(msgspec.Struct, frozen=True):
    """A token of the vocabulary."""

    id: int
    text: str


class TokenizerFacts(msgspec.Struct, frozen=True):
    """The tokenizer. `vocabulary` is the number of its ids. The model has rows for `scored` ids (None if unknown).

    `added` is the number of tokens that are found in a text by their spelling; `special` of these are markup.
    """

    file: str
    kind: str
    vocabulary: int
    scored: int | None
    added: int
    special: int
    bos: Token | None
    eos: list[Token]
    add_bos: bool


class RankShare(msgspec.Struct, frozen=True):
    """A number of ranks, and the bytes of weights that each rank would hold in memory."""

    ranks: int
    bytes: int


class RankFacts(msgspec.Struct, frozen=True):
    """The possible numbers of ranks (`shares`), or the reason why the model cannot be split (`why_not`)."""

    shares: list[RankShare]
    why_not: str | None = None

    @property
    def text(self) -> str:
        """The line of the report."""
        each = ", ".join(f"{share.ranks} ({sized(share.bytes)} each)" for share in self.shares)
        return f"no: {self.why_not}" if self.why_not else each


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The report. A fact is None if a problem hides it. Sizes are in bytes."""

    model: str
    loads: bool
    source: Literal["store", "directory"] | None
    path: str | None
    children: list[str]
    """The manifests in the store's list for this name, if the store has a list instead of one manifest."""
    architecture: str | None
    module: str | None
    defaults: dict[str, object]
    """The fields that config.json lacks, with the values that apply."""
    layers: int | None
    parameters: int | None
    caches: list[LayerKind] | None
    weights: list[Amount] | None
    """The weights in memory, by type or packing."""
    read_bytes: int | None
    files: int | None
    """The number of files from which `read_bytes` would be read."""
    skipped: list[Amount] | None
    """The tensors that are in the files but that serving would not read."""
    device: Literal["cpu", "gpu"]
    computes: NumberFormat | None
    blas: BlasFacts
    kernels: str
    """The kernels that serving would use in place of MLX's."""
    context: ContextLimit | None
    tokenizer: TokenizerFacts | None
    pictures: Facts | None
    sound: Facts | None
    """None for a model that does not claim to take sounds."""
    drafts: Facts | None
    format: Facts | None
    """The result of compiling the format. None without `--format`."""
    ranks: RankFacts | None
    trial: TrialFacts | None
    """The result of a trial on this device. None without `--verify`."""
    embeddings: Facts | None
    """None for a model that makes text."""
    disk: Facts | None
    """The contents of the disk cache. None without `--disk-cache`."""
    warnings: list[str]
    problems: list[str]


def inspect(settings: CheckSettings) -> Inspection:
    """Returns the report on the model that `settings` name. Faults of the model are listed there, never raised."""
    found = examine(settings.model, settings.models_dir, digests=settings.verify, choose=chooser(settings))
    checkpoint, opened, module = found.checkpoint, found.opened, found.module
    tokenizer = None
    if checkpoint is not None:
        with collecting_faults(found.problems):
            tokenizer = open_tokenizer(found.file, merge_eos=not checkpoint.from_store)
    context = _context(opened, settings.context_tokens) if opened else None
    budget_bytes = settings.memory.bytes_of(usable_bytes())
    detected_blas = cpu.detect(settings.blas, settings.blas_threads)
    types = plan_dtypes(settings.dtype, module, budget_bytes) if module else None
    if types and module and (too_large := types.over_budget(budget_bytes, module)):
        found.problems.append(ModelError(too_large))
    amounts, parameters = contents(module, types) if module and types else (None, None)
    layers = LoadedModel(module).make_layers() if module else None
    wings = [*wings_of(settings)]
    reads: list[LogicalTensor] = []
    if opened:
        reads = [*opened.tensors.values(), *(tensor for wing in wings for tensor in wing.tensors(opened))]
    whole = None
    if opened and module and types and tokenizer and not found.problems:
        whole = Examined(opened, LoadedModel(module, library=opened.family.library), types, tokenizer, budget_bytes)
    facts = dict[str, Facts | None]()
    for wing in wings:
        with collecting_faults(found.problems):
            facts |= wing.facts(settings, whole)
    trial = None
    if settings.verify and opened and tokenizer and not (found.problems or opened.family.is_encoder):
        with collecting_faults(found.problems):
            trial = try_model(opened, settings.dtype, budget_bytes)
    texts = (each.explained if isinstance(each, MissingError) else str(each) for each in found.problems)
    problems = list(dict.fromkeys(map(plain, texts)))
    return Inspection(
        model=plain(settings.model),
        loads=not problems,
        source=None if checkpoint is None else "store" if checkpoint.from_store else "directory",
        path=plain(str(checkpoint.path)) if checkpoint else None,
        children=[plain(str(child)) for child in checkpoint.children] if checkpoint else [],
        architecture=plain(found.architecture) if found.architecture else None,
        module=found.family.import_name if found.family else None,
        defaults=found.defaults,
        layers=len(module.layers) if module else None,
        parameters=parameters,
        caches=_kinds(layers) if layers else None,
        weights=amounts if opened and not opened.unreadable else None,
        read_bytes=sum(tensor.nbytes for tensor in reads) if opened else None,
        files=len(files(reads)) if opened else None,
        skipped=skipped(checkpoint, reads) if checkpoint and opened else None,
        device=device(),
        computes=NumberFormat(types.computes, types.why) if types else None,
        blas=BlasFacts(plain(detected_blas.name), detected_blas.matters, detected_blas.advice or None),
        kernels=plain(str(cpu.find_kernels(settings.kernels))),
        context=context,
        tokenizer=_tokenizer_facts(tokenizer, opened) if tokenizer else None,
        pictures=facts.get("pictures"),
        sound=facts.get("sound"),
        drafts=facts.get("drafts"),
        format=facts.get("format"),
        ranks=rank_facts(found, settings.dtype, budget_bytes),
        trial=trial,
        embeddings=facts.get("embeddings"),
        disk=facts.get("disk"),
        warnings=[
            *filter(None, [misfits()]),
            *(plain(each.advice) for each in found.problems if each.advice not in ("", type(each).advice)),
            *(map(plain, checkpoint.warnings) if checkpoint else ()),
            *(map(plain, unread(opened, module)) if opened and module else ()),
            *_tensor_warnings(found),
            *((types.lacking,) if types and types.lacking else ()),
            *_context_warnings(context, settings.context_tokens),
            *(_tokenizer_warnings(tokenizer, found) if tokenizer else ()),
            *(trial.warnings if trial else ()),
        ],
        problems=problems,
    )


def plain(text: str) -> str:
    """Returns the text as one line without control characters."""
    return printable(" ".join(text.split()))


def _kinds(layers: list[object]) -> list[LayerKind]:
    counts = Counter((_kind(layer), type(layer).__name__) for layer in flatten(layers))
    return [LayerKind(name, cache, count) for (name, cache), count in counts.items()]


def _kind(layer: object) -> str:
    """Returns the kind of a layer cache, by the class of the adapter that the prefix cache uses for it."""
    state = adapt(layer, Ledger())
    if isinstance(state, WindowState):
        return f"sliding window {state.layer.max_size}"
    if isinstance(state, ChunkState):
        return f"chunked attention {state.layer.chunk_size}"
    if isinstance(state, RecurrentState):
        return "recurrent state"
    return "full attention" if isinstance(state, KVState) else "state of its own"


def _context(opened: OpenedModel, wanted: int | None) -> ContextLimit:
    tokens = context_limit(opened.context_length, wanted)
    if tokens == opened.context_length:
        return ContextLimit(tokens, "model")
    return ContextLimit(tokens, "--context" if wanted else "default")


def _tokenizer_facts(tokenizer: Tokenizer, opened: OpenedModel | None) -> TokenizerFacts:
    def token(number: int) -> Token:
        return Token(number, tokenizer.token_text(number))

    return TokenizerFacts(
        file=tokenizer.file,
        kind=tokenizer.kind,
        vocabulary=tokenizer.vocab_size,
        scored=(opened.vocab_size or None) if opened else None,
        added=len(tokenizer.added),
        special=len(tokenizer.special),
        bos=None if tokenizer.bos is None else token(tokenizer.bos),
        eos=[token(number) for number in sorted(tokenizer.eos)],
        add_bos=tokenizer.add_bos,
    )


def _tensor_warnings(found: Examination) -> Iterator[str]:
    if not found.compared and found.family is not None:
        yield f"the tensors were not compared with {found.family.import_name} because of the problems"


def _context_warnings(context: ContextLimit | None, wanted: int | None) -> Iterator[str]:
    if context is None:
        return
    if context.source == "default":
        yield f"config.json states no context length: {context.tokens} tokens are assumed; --context sets another"
    if wanted is not None and wanted > context.tokens:
        yield f"--context {wanted} exceeds the model's own length: {context.tokens} tokens apply"


def _tokenizer_warnings(tokenizer: Tokenizer, found: Examination) -> Iterator[str]:
    scored = found.opened.vocab_size if found.opened else 0
    if tokenizer.vocab_size > scored > 0:
        yield (
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model has rows for {scored}: prompts with others"
            " are refused"
        )
    if not tokenizer.eos and not (found.opened and found.opened.family.is_encoder):
        yield "no end-of-sequence token is known: answers end only by num_predict, stop or the context limit"
    if tokenizer.bos is None and read_object(found.file, "tokenizer_config.json").get("add_bos_token") is True:
        yield "tokenizer_config.json asks for a beginning-of-sequence token (add_bos_token), but none is known"


def rank_facts(found: Examination, dtype: str, budget_bytes: int) -> RankFacts | None:
    """Returns the numbers of ranks that can share a model. None if a fault hides them, or without the ranks wing."""
    model, whole = found.opened, found.module
    if model is None or whole is None:
        return None
    try:
        from runner.ranks.split import part_of, possible_ranks, split_fault
    except ModuleNotFoundError:  # a runner without this wing
        return None
    parts = {ranks: part_of(whole, ranks, 0) for ranks in possible_ranks(model, whole)}
    if not parts:
        return RankFacts([], split_fault(model, 2, whole))
    plans = {ranks: plan_dtypes(dtype, part, budget_bytes) for ranks, part in parts.items()}
    return RankFacts([RankShare(ranks, plans[ranks].nbytes(part)) for ranks, part in parts.items()])
