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


@pytest.mark.parametrize("alphabet", ["byte-level", "sentencepiece"])
def test_every_prompt_is_one_token_per_byte_and_special_texts_are_one_id(tmp_path: Path, alphabet: Alphabet) -> None:
    from tokenizers import Tokenizer

    write_scripted(tmp_path, VOCABULARY, {}, [EOS], SPECIAL, alphabet=alphabet)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Hi there\n\ta é 😀 word"
    ids = tokenizer.encode(text + "<think>", add_special_tokens=False).ids
    assert ids == [*text.encode(), 260]
    assert tokenizer.decode([ord(" "), ord("H"), 256, 258], skip_special_tokens=False) == " Hこ word"
