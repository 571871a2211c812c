"""Training data of the demo model: dialogues made from the words of its world."""

import random

import numpy as np
from tokenizers import Tokenizer

from scripts.tools.demo.questions import ACCEPTED, END, MARKERS, SMALL_TALK, Fact, Role, draw_facts, filler

Row = list[tuple[int, bool]]  # a token, and whether the model has to predict it


class Dialogues:
    """An endless, seeded source of training batches. Facts are drawn from the pairs that are not held out."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer

    def batch(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and loss weights (1.0 for the assistant's words), both `[rows, length]`."""
        drawn = np.array([self._dialogue(length) for _ in range(rows)])
        return drawn[..., 0].astype(np.int32), drawn[..., 1].astype(np.float32)

    def _dialogue(self, length: int) -> Row:
        rng = self._rng
        # A fact takes about six tokens, and some must be left for the questions: short rows hold fewer facts.
        facts = draw_facts(rng, rng.randint(1, max(1, min(72, (length - 40) // 9))), held_out=False)
        later = facts[len(facts) * 3 // 4 :] if rng.random() < 0.3 else []
        told = facts[: len(facts) - len(later)]
        row = self._opening(told, most_filler=max(0, length // 8 - len(told)) // 3)
        while len(row) < length:
            draw = rng.random()
            if draw < 0.55 and told:
                asked = rng.choice(told)
                row += self._turn(asked.question, asked.statement)
            elif draw < 0.7 and later:
                told.append(later.pop())
                row += self._turn(f"Remember this. {told[-1].statement}", ACCEPTED)
            else:
                question = rng.choice(list(SMALL_TALK))
                row += self._turn(question, SMALL_TALK[question])
        return row[:length]

    def _opening(self, told: list[Fact], most_filler: int) -> Row:
        """The message that states `told`, mixed with at most `most_filler` other sentences."""
        rng = self._rng
        sentences = [fact.statement for fact in told]
        sentences += [filler(rng) for _ in range(rng.randint(0, most_filler))]
        rng.shuffle(sentences)
        body = " ".join(sentences)
        draw = rng.random()
        if draw < 0.5:
            return self._message("system", body)
        before = []
        if draw < 0.7:
            question = rng.choice(list(SMALL_TALK))
            before = self._turn(question, SMALL_TALK[question])
        return before + self._turn(f"Remember this. {body}", ACCEPTED)

    def _turn(self, question: str, answer: str) -> Row:
        return self._message("user", question) + self._message("assistant", answer)

    def _message(self, role: Role, content: str) -> Row:
        marker, *tokens = self._tokenizer.encode(f"{MARKERS[role]}{content}{END}", add_special_tokens=False).ids
        return [(marker, False), *((token, role == "assistant") for token in tokens)]
