"""Makers of tiny `tokenizer.json` files, of every model type, and of `tokenizer.model` files.

Token ids are positions in the vocabulary that the caller gives, so a test knows every id. Special tokens follow it.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

Document = dict[str, object]

GPT2_SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's rule, by which byte-level models cut text into words before merging."""

ALL_BYTES: tuple[bytes, ...] = tuple(bytes([value]) for value in range(256))
"""The vocabulary that can spell everything; a sensible beginning of any other."""


def _byte_letters() -> list[str]:
    """GPT-2's printable letter of each byte value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, spare = [], 0x100
    for value in range(256):
        if value in printable:
            letters.append(chr(value))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


_LETTERS = _byte_letters()


def spell(token: bytes) -> str:
    """A byte string in the alphabet of byte-level vocabularies: a space is `Ġ`."""
    return "".join(_LETTERS[value] for value in token)


def _merges(tokens: Iterable[str]) -> list[list[str]]:
    """One merge per token of two letters or more that two tokens before it make up; shorter results come first."""
    known = set(tokens)
    merges = []
    for token in sorted(known, key=lambda text: (len(text), text)):
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in known and token[cut:] in known:
                merges.append([token[:cut], token[cut:]])
                break
    return merges


def _added(tokens: Sequence[str], first_id: int) -> list[Document]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": first_id + index, "content": token, **plain} for index, token in enumerate(tokens)]


def document(model: Document, added_tokens: Sequence[Document] = (), **parts: object) -> Document:
    """A `tokenizer.json` of `model`; `parts` may be its normalizer, pre_tokenizer and decoder."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added_tokens),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        **parts,
        "model": model,
    }


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: object) -> Document:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def byte_level(
    vocabulary: Sequence[bytes] = ALL_BYTES,
    special_tokens: Sequence[str] = (),
    *,
    split: str = GPT2_SPLIT,
    merge: bool = True,
) -> Document:
    """A byte-level BPE: id i means exactly the bytes `vocabulary[i]`, whatever they are; special tokens come after.

    Text encodes to the longest merges that the vocabulary allows, or, without `merge`, to single bytes. Bytes that no
    token spells are lost in encoding.
    """
    vocab = {spell(token): index for index, token in enumerate(vocabulary)}
    if len(vocab) != len(vocabulary):
        raise ValueError("the vocabulary holds a byte string twice")
    return document(
        _bpe(vocab, _merges(vocab) if merge else []),
        _added(special_tokens, len(vocab)),
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


SENTENCEPIECE_SPECIAL = ("<pad>", "</s>", "<s>", "<unk>")
"""The first ids of `sentencepiece` vocabularies; the 256 byte tokens `<0x00>`.. follow."""


def sentencepiece(
    pieces: Sequence[str],
    special_tokens: Sequence[str] = (),
    *,
    prepend_space: bool = False,
    first: Sequence[str] = SENTENCEPIECE_SPECIAL,
) -> Document:
    """A sentencepiece-style BPE with byte fallback, as Gemma's (`prepend_space`: as Llama 2's) `tokenizer.json`.

    `pieces` are written with plain spaces. Ids: the `first` specials, 256 byte tokens, the pieces, `special_tokens`.
    """
    texts = [piece.replace(" ", "▁") for piece in pieces]
    ordinary = [*first, *map(fallback_byte, range(256)), *texts]
    vocab = {token: index for index, token in enumerate(ordinary)}
    if len(vocab) != len(ordinary):
        raise ValueError("the pieces hold a text twice")
    added = [*_added(first, 0), *_added(special_tokens, len(vocab))]
    return _sentencepiece(vocab, _merges(texts), added, prepend_space=prepend_space)


def sentencepiece_bytes(vocabulary: Sequence[bytes], special_tokens: Sequence[str] = ()) -> Document:
    """A sentencepiece-style BPE without merges in which id i means the bytes `vocabulary[i]`, each a byte or UTF-8."""
    vocab = {_sentencepiece_spelling(token): index for index, token in enumerate(vocabulary)}
    return _sentencepiece(vocab, [], _added(special_tokens, len(vocab)), prepend_space=False)


def _sentencepiece(
    vocab: dict[str, int], merges: list[list[str]], added: Sequence[Document], *, prepend_space: bool
) -> Document:
    replace: Document = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend: Document = {"type": "Prepend", "prepend": "▁"}
    strip: list[Document] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepend_space else []
    return document(
        _bpe(vocab, merges, unk_token="<unk>" if "<unk>" in vocab else None, fuse_unk=True, byte_fallback=True),
        added,
        normalizer={"type": "Sequence", "normalizers": [prepend, replace]} if prepend_space else replace,
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
    )


def fallback_byte(value: int) -> str:
    """Returns sentencepiece's spelling of a byte that is no text."""
    return f"<0x{value:02X}>"


def _sentencepiece_spelling(token: bytes) -> str:
    if len(token) == 1 and not 0x20 <= token[0] < 0x7F:
        return fallback_byte(token[0])
    try:
        return token.decode().replace(" ", "▁")
    except UnicodeDecodeError:
        raise ValueError(f"sentencepiece cannot spell {token!r}") from None


CORPUS: tuple[str, ...] = tuple(
    " ".join(
        ("hello world", "the quick", "brown fox", "über", "日本語 テスト", "don't", "  indent", "    deep", "1234")[
            (index * step) % 9
        ]
        for step in (1, 2, 4, 5, 7)
    )
    for index in range(200)
)
"""The training text of tiny sentencepiece models: words, runs of spaces, accents, Japanese, digits."""


@cache
def trained_model(
    algorithm: Literal["bpe", "unigram"] = "bpe",
    *,
    dummy_prefix: bool = True,
    byte_fallback: bool = True,
    normalization: Literal["identity", "nmt_nfkc"] = "identity",
    remove_extra_whitespaces: bool = False,
    user_defined: tuple[str, ...] = (),
    control: tuple[str, ...] = (),
) -> bytes:
    """A `tokenizer.model` trained on `CORPUS`; `<unk>`, `<s>`, `</s>`, `control` and `user_defined` have the first ids.

    The defaults are those of Llama 2.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=algorithm,
        vocab_size=400 if byte_fallback else 110,
        hard_vocab_limit=False,
        character_coverage=1.0,
        byte_fallback=byte_fallback,
        add_dummy_prefix=dummy_prefix,
        normalization_rule_name=normalization,
        remove_extra_whitespaces=remove_extra_whitespaces,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=list(user_defined),
        control_symbols=list(control),
        minloglevel=4,
    )
    return model.getvalue()


PIECE_TYPES = {"normal": 1, "unknown": 2, "control": 3, "user-defined": 4, "unused": 5, "byte": 6}


def written_model(
    pieces: Sequence[tuple[str, str]], *, dummy_prefix: bool = False, escape_spaces: bool = True
) -> bytes:
    """A BPE `tokenizer.model` of the given pieces, each a text and its type in `PIECE_TYPES`; id i is the i-th.

    Pieces that come first are preferred. Text is not normalized, but for spaces, which become `▁`.
    """
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made while it is imported
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = any(kind == "byte" for _, kind in pieces)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = dummy_prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = escape_spaces
    for rank, (text, kind) in enumerate(pieces):
        piece = model.pieces.add(piece=text, score=-float(rank))
        if kind != "normal":
            piece.type = PIECE_TYPES[kind]
    data: bytes = model.SerializeToString()
    return data


def model_of_bytes(vocabulary: Sequence[bytes], special_tokens: Sequence[str] = ()) -> bytes:
    """A `tokenizer.model` in which id i means the bytes `vocabulary[i]`; the first 256 are the bytes in order.

    Any text encodes to its bytes: the longer tokens, which must be UTF-8, are only ever generated. The unknown comes
    last, behind the special tokens.
    """
    if tuple(vocabulary[:256]) != ALL_BYTES:
        raise ValueError("a vocabulary starts with the 256 bytes in order")
    longer = [(_sentencepiece_spelling(token), "unused") for token in vocabulary[256:]]
    return written_model(
        [
            *((fallback_byte(value), "byte") for value in range(256)),
            *longer,
            *((token, "control") for token in special_tokens),
            ("<unk>", "unknown"),
        ],
        escape_spaces=False,
    )


def vocabulary_size(tokenizer: Document) -> int:
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    assert isinstance(model, dict)
    assert isinstance(added, list)
    base = len(model["vocab"])
    return base + len([token for token in added if token["id"] >= base])


def with_tokens(tokenizer: Document, tokens: Mapping[str, int]) -> Document:
    """`tokenizer` with further special tokens, which take these ids from what had them."""
    added = [each for token, token_id in tokens.items() for each in _added([token], token_id)]
    known = tokenizer["added_tokens"]
    assert isinstance(known, list)
    return {**tokenizer, "added_tokens": [*known, *added]}


def write_tokenizer(directory: Path, tokenizer: Document) -> None:
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
