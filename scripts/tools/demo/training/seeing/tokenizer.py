"""The tokenizer of the model that sees: byte-level BPE trained on the words of its world."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.tools.demo.questions import END, MARKERS
from scripts.tools.demo.seeing.world import BLIND, COLOURS, QUESTIONS, SMALL_TALK, scenes, which

VOCABULARY = 400
START, SOFT, STOP = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
SPECIAL_TOKENS = [*MARKERS.values(), END, START, SOFT, STOP]


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE with the markers of chats and pictures as special tokens 0 to 6."""
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
    split = [word for word in COLOURS if len(tokenizer.encode(f" {word}").ids) != 1]
    if split:
        raise ValueError(f"a vocabulary of {VOCABULARY} is too small: {split} are not single tokens")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token that the tokenizer has."""
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def _corpus() -> list[str]:
    answers = [answer(scene) for answer in QUESTIONS.values() for scene in scenes()]
    talk = [text for pair in SMALL_TALK.items() for text in pair]
    colours = [f" {colour}" for colour in COLOURS]
    return [*answers, *[*QUESTIONS, *talk, *colours, *colours, BLIND, which(0), which(1)] * 10]
