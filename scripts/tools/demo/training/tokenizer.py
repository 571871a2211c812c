"""The demo model's tokenizer: byte-level BPE trained on the words of its world."""

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.tools.demo.questions import (
    ACCEPTED,
    END,
    FRIENDS,
    MARKERS,
    NUMBERS,
    PEOPLE,
    PLACES,
    RELATIONS,
    SMALL_TALK,
    filler,
)

VOCABULARY = 896
SPECIAL_TOKENS = [*MARKERS.values(), END]


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE with the chat markers as special tokens 0 to 3; every name, place and number is one token.

    Text outside ASCII takes no part in the training and stays split into bytes: answers in it show whether a runner
    puts characters together across tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    split = [word for word in single_token_words() if len(tokenizer.encode(word).ids) != 1]
    if split:
        raise ValueError(f"a vocabulary of {VOCABULARY} is too small: {split} are not single tokens")
    return tokenizer


def single_token_words() -> list[str]:
    """The words that recall is about, as they are written in a text: people also open an answer, without a space."""
    stated = [word for relation in RELATIONS for word in relation.statement.format(person="", value="")[:-1].split()]
    inner = [*PEOPLE, *PLACES, *FRIENDS, *NUMBERS, *stated]
    return [*PEOPLE, *(f" {word}" for word in inner)]


def _corpus() -> list[str]:
    rng = random.Random(1)
    talk = [text for pair in SMALL_TALK.items() for text in pair if text.isascii()]
    sentences = [filler(rng) for _ in range(200)]
    questions = [relation.question.format(person=person) for relation in RELATIONS for person in PEOPLE]
    return [*talk, *talk, ACCEPTED, "Remember this.", *sentences, *questions, *single_token_words() * 40]
