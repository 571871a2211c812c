"""The scripted model is what it says, by mlx-lm's own llama and by the tokenizers library."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import runner.process.lean_mlx_lm  # noqa: F401  (registers mlx_lm without its __init__)

# isort: split
from mlx_lm.models import llama

from scripts.tools.models.scripted import BACKGROUND, BYTES, Alphabet, write_scripted

VOCABULARY = (*BYTES, "こ".encode(), b"ab", b" word")
EOS = 259
SPECIAL = {EOS: "<|end|>", 260: "<think>"}


def _load(directory: Path) -> llama.Model:
    config = json.loads((directory / "config.json").read_text())
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.load_weights(str(directory / "model.safetensors"))
    return model


def test_logits_are_exact_whatever_stands_before_the_last_token(tmp_path: Path) -> None:
    wanted = {80: 0.1, 81: 5.0, 82: -3.25, 260: 1000.0, 7: -20000.0}
    model = _load(write_scripted(tmp_path, VOCABULARY, {81: wanted, 260: 97}, [EOS], SPECIAL))
    expected = np.full(len(VOCABULARY) + len(SPECIAL), BACKGROUND, np.float32)
    for token, logit in wanted.items():
        expected[token] = logit
    for prompt in ([81], [80, 5, 81], [260] * 40 + [81]):
        assert np.array_equal(np.array(model(mx.array([prompt]))[0, -1]), expected)
    assert mx.argmax(model(mx.array([[81, 260]]))[0, -1]).item() == 97
    assert mx.argmax(model(mx.array([[81, 5]]))[0, -1]).item() == EOS, "a token without a transition ends the text"


@pytest.mark.parametrize("words", [0, 300])
def test_heads_are_as_large_as_every_llama_takes_them_to_be(words: int, tmp_path: Path) -> None:
    """Ollama's own runner knows no head size but the width of the model over its heads."""
    vocabulary = (*BYTES, *(f"token{i}".encode() for i in range(words)))
    directory = write_scripted(tmp_path, vocabulary, {}, [0])
    config = json.loads((directory / "config.json").read_text())
    head, rest = divmod(config["hidden_size"], config["num_attention_heads"])
    assert (rest, config.get("head_dim", head)) == (0, head)
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    rows = {name: weights[f"model.layers.0.self_attn.{name}_proj.weight"].shape[0] for name in "qkvo"}
    kv = config["num_key_value_heads"] * head
    assert rows == {"q": config["hidden_size"], "k": kv, "v": kv, "o": config["hidden_size"]}


def test_a_large_vocabulary_widens_the_model_and_stays_exact(tmp_path: Path) -> None:
    vocabulary = (*BYTES, *(f"token{i}".encode() for i in range(300)))
    model = _load(write_scripted(tmp_path, vocabulary, {555: {3: 1.3}}, [0], default={9: -0.7}))
    logits = np.array(model(mx.array([[555, 555]]))[0])
    assert logits.shape == (2, 556)
    assert logits[-1, 3] == np.float32(1.3)
    assert logits[-1, 9] == np.float32(BACKGROUND), "the default is only for tokens without a transition"


@pytest.mark.parametrize("alphabet", ["byte-level", "sentencepiece"])
def test_every_prompt_is_one_token_per_byte_and_special_texts_are_one_id(tmp_path: Path, alphabet: Alphabet) -> None:
    from tokenizers import Tokenizer

    write_scripted(tmp_path, VOCABULARY, {}, [EOS], SPECIAL, alphabet=alphabet)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Hi there\n\ta é 😀 word"
    ids = tokenizer.encode(text + "<think>", add_special_tokens=False).ids
    assert ids == [*text.encode(), 260]
    assert tokenizer.decode([ord(" "), ord("H"), 256, 258], skip_special_tokens=False) == " Hこ word"


def test_a_tokenizer_model_has_the_same_ids_and_one_more_for_the_unknown(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    write_scripted(tmp_path, VOCABULARY, {}, [EOS], SPECIAL, alphabet="tokenizer.model")
    assert not (tmp_path / "tokenizer.json").exists()
    processor = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    text = "Hi there\n\ta é 😀 word"
    assert processor.encode(text) == [*text.encode()]
    assert [processor.id_to_piece(i) for i in (256, 258, 259, 260, 261)] == [
        "こ",
        "▁word",
        "<|end|>",
        "<think>",
        "<unk>",
    ]


def test_a_vocabulary_that_cannot_spell_every_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="256 bytes"):
        write_scripted(tmp_path, VOCABULARY[1:], {}, [0])
    with pytest.raises(ValueError, match="ids after"):
        write_scripted(tmp_path, VOCABULARY, {}, [0], {5: "<x>"})
    with pytest.raises(ValueError, match="sentencepiece"):
        write_scripted(tmp_path, (*BYTES, b"\x93\xe3"), {}, [0], alphabet="sentencepiece")
