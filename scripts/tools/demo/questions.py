"""The demo model's little world: its words, and the talks of the demo.

Every conversation states facts about people early (where someone lives, which number someone has, who works with
someone) and asks for them later. The facts are arbitrary, so the answer can only come from the prompt: a key-value
cache that holds another conversation, or a stale one, gives another answer. No MLX here, so that a host can import it.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

Role = Literal["system", "user", "assistant"]

MARKERS: dict[Role, str] = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
END = "<|end|>"
ACCEPTED = "Noted."
_PICTURE = re.compile(r"\[img-(\d+)\]")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words(
    "Nora Otto Emma Hugo Lena Karl Rosa Ivan Anna Paul Mona Erik Vera Omar Tina Noah Gina Hans Ruth Igor Alma Kurt "
    "Dora Jens Maya Axel Olga Theo Ines Bert Zara Juan Cora Luis Edda Finn Wanda Amir Hilda Boris Clara David Ellen "
    "Frank"
)
PLACES = _words(
    "Lisbon Oslo Cairo Lima Rome Tokyo Paris Delhi Quito Dakar Vienna Berlin Madrid Athens Dublin Prague Warsaw Riga "
    "Bern Kyoto Milan Turin Porto Seoul Hanoi Accra Tunis Doha Perth Sydney Boston Denver Austin Dallas Miami Havana "
    "Bogota Ankara Lagos Nairobi Zagreb Sofia Minsk Geneva Malta"
)
FRIENDS = _words(
    "Felix Greta Oscar Sonja Klaus Petra Bruno Heidi Simon Julia Marco Lotte Peter Sarah Jonas Agnes Ralph Betty "
    "Lucas Nadia Henry Irene Vince Tanya Scott"
)
NUMBERS = tuple(str(number) for number in range(10, 100))


class Relation(NamedTuple):
    """A kind of fact: how it is stated (and answered), how it is asked for, and which values it can have."""

    statement: str
    question: str
    values: Sequence[str]


RELATIONS = (
    Relation("{person} lives in {value}.", "Where does {person} live?", PLACES),
    Relation("{person} has number {value}.", "What number does {person} have?", NUMBERS),
    Relation("{person} works with {value}.", "Who works with {person}?", FRIENDS),
)


class Fact(NamedTuple):
    person: str
    relation: Relation
    value: str

    @property
    def statement(self) -> str:
        return self.relation.statement.format(person=self.person, value=self.value)

    @property
    def question(self) -> str:
        return self.relation.question.format(person=self.person)


class Message(NamedTuple):
    role: Role
    content: str


class Turn(NamedTuple):
    user: str
    answer: str


class Conversation(NamedTuple):
    title: str
    system: str | None
    turns: tuple[Turn, ...]

    def prompt(self, turn: int) -> str:
        """The prompt of turn number `turn` (from 0), with the expected answers of the turns before it."""
        return render(messages(self.turns[:turn], self.turns[turn].user, system=self.system))


def messages(earlier: Iterable[Turn], question: str, system: str | None = None) -> list[Message]:
    """The messages of a chat that ends with `question`."""
    opening = [] if system is None else [Message("system", system)]
    for turn in earlier:
        opening += _exchange(turn)
    return [*opening, Message("user", question)]


def render(chat: Iterable[Message]) -> str:
    """The prompt a host sends for `chat`: marked messages, then the opener of the assistant's answer."""
    return "".join(f"{MARKERS[role]}{content}{END}" for role, content in chat) + MARKERS["assistant"]


@dataclass
class Talk:
    """The questions of a user, and the answers that are expected.

    If an answer is not known beforehand, the first one counts: asked again, the model must repeat it.
    """

    title: str
    questions: Sequence[str]
    """With the marker [img-N] where the user shows picture N."""
    write: Callable[[Sequence[Message]], str]
    """Returns the prompt for a chat, in the model's own form."""
    system: str | None = None
    answers: list[str] = field(default_factory=list)
    """The expected ones, of as many turns as are known."""
    pictures: Sequence[bytes] = ()
    """Their files."""
    shows: Sequence[str] = ()
    """Their contents, in words."""

    @classmethod
    def known(cls, conversation: Conversation) -> Self:
        """Returns a talk with the demo model, whose answers are known."""
        questions, answers = zip(*conversation.turns, strict=True)
        return cls(conversation.title, questions, render, conversation.system, list(answers))

    def prompt(self, turn: int) -> str:
        """Returns the prompt of turn number `turn` (from 0), with the expected answers of the turns before it."""
        earlier = [Turn(*pair) for pair in zip(self.questions[:turn], self.answers, strict=False)]
        return self.write(messages(earlier, self.questions[turn], self.system))

    def told(self, turn: int) -> str:
        """Returns what the user says in a turn for people to read, with pictures in words."""
        return _PICTURE.sub(lambda found: f"[{self.shows[int(found[1])]}] ", self.questions[turn])

    def expected(self, turn: int, answer: str) -> str:
        """Returns the right answer to a turn; to one without, `answer` is the right one from now on."""
        if turn == len(self.answers):
            self.answers.append(answer)
        return self.answers[turn]


SMALL_TALK = {
    "Hello": "Hello! How can I help you?",
    "Who are you?": "I am a very small language model. I remember what you tell me.",
    "How are you?": "I am fine, thank you.",
    "Thank you": "You are welcome.",
    "Goodbye": "Goodbye! See you soon.",
    "What can you do?": "I can remember facts about people, and I can tell a story.",
    "Count from one to twenty.": "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, "
    "fourteen, fifteen, sixteen, seventeen, eighteen, nineteen, twenty.",
    "Name the days of the week.": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    "Name the seasons.": "Spring, summer, autumn, winter.",
    "Why is the sky blue?": "The sky is blue because air scatters blue light more than red light.",
    "What do bees make?": "Bees make honey.",
    "Say good morning in Japanese.": "おはよう",  # each character is three bytes, and a token of its own for each byte
    "Tell me a story.": "Once upon a time there was a small model who lived in a quiet machine. Every day it read one "
    "word and guessed the next one. One night somebody told it a secret. It kept the secret in its cache, and in the "
    "morning it still knew every word.",
}

_SUBJECTS = (
    *("The river", "The old clock", "A small bird", "The red train", "The garden", "My neighbour", "The bakery"),
    *("A quiet street", "The teacher", "The museum", "A green boat", "The market"),
)
_PREDICATES = (
    *("is closed today.", "was very loud this morning.", "looks nice in the rain.", "opens early in winter."),
    *("moves slowly.", "is bigger than it seems.", "needs a little time.", "was painted last year."),
    *("stands near the bridge.", "makes people smile."),
)


def filler(rng: random.Random) -> str:
    """A sentence that states nothing the model is ever asked for."""
    return f"{rng.choice(_SUBJECTS)} {rng.choice(_PREDICATES)}"


def is_held_out(person: str, relation: Relation, value: str) -> bool:
    """True if training never sees this fact: every fifth (person, value) pair of each relation."""
    return (PEOPLE.index(person) + relation.values.index(value)) % 5 == 0


def draw_facts(rng: random.Random, count: int) -> list[Fact]:
    """Returns `count` facts that training may see, no two of the same person and relation."""
    pairs = rng.sample([(person, relation) for person in PEOPLE for relation in RELATIONS], count)
    return [
        Fact(person, relation, rng.choice([v for v in relation.values if not is_held_out(person, relation, v)]))
        for person, relation in pairs
    ]


def trained_talk(rng: random.Random, length: int) -> Iterator[Message]:
    """Yields without end the messages of a talk that the model is trained on in rows of `length` tokens."""
    # A fact takes about six tokens, and some must be left for the questions: short rows hold fewer facts.
    facts = draw_facts(rng, rng.randint(1, max(1, min(72, (length - 40) // 9))))
    later = facts[len(facts) * 3 // 4 :] if rng.random() < 0.3 else []
    told = facts[: len(facts) - len(later)]
    fillers = rng.randint(0, max(0, length // 8 - len(told)) // 3)
    sentences = [*(fact.statement for fact in told), *(filler(rng) for _ in range(fillers))]
    rng.shuffle(sentences)
    body, draw, small_talk = " ".join(sentences), rng.random(), [Turn(*each) for each in SMALL_TALK.items()]
    if draw < 0.5:
        yield Message("system", body)
    elif draw < 0.7:
        yield from _exchange(rng.choice(small_talk))
    if draw >= 0.5:
        yield from _exchange(Turn(f"Remember this. {body}", ACCEPTED))
    while True:
        draw = rng.random()
        if draw < 0.55 and told:
            asked = rng.choice(told)
            yield from _exchange(Turn(asked.question, asked.statement))
        elif draw < 0.7 and later:
            told.append(later.pop())
            yield from _exchange(Turn(f"Remember this. {told[-1].statement}", ACCEPTED))
        else:
            yield from _exchange(rng.choice(small_talk))


def _exchange(turn: Turn) -> tuple[Message, Message]:
    return Message("user", turn.user), Message("assistant", turn.answer)


# Both first conversations begin with these words, so that a prefix cache can share them, and then bind the same people
# to other values, so that whoever mixes the two up answers wrong.
_INTRODUCTION = " ".join(filler(random.Random(seed)) for seed in range(60))

_LISBON = (
    "Nora lives in Lisbon. Otto lives in Oslo. Emma lives in Cairo. Hugo lives in Lima. "
    "Nora has number 47. Otto has number 82. Emma has number 15. Hugo has number 63. "
    "Nora works with Felix. Otto works with Greta. Emma works with Oscar. Hugo works with Sonja."
)
_TOKYO = (
    "Nora lives in Tokyo. Otto lives in Cairo. Emma lives in Oslo. Hugo lives in Rome. "
    "Nora has number 15. Otto has number 39. Emma has number 82. Hugo has number 71. "
    "Nora works with Oscar. Otto works with Felix. Emma works with Sonja. Hugo works with Greta."
)


def _small_talk(question: str) -> Turn:
    return Turn(question, SMALL_TALK[question])


CONVERSATIONS = (
    Conversation(
        "People and places",
        f"{_INTRODUCTION} {_LISBON}",
        (
            Turn("Where does Nora live?", "Nora lives in Lisbon."),
            _small_talk("Tell me a story."),
            Turn("What number does Otto have?", "Otto has number 82."),
        ),
    ),
    Conversation(
        "The same people elsewhere",
        f"{_INTRODUCTION} {_TOKYO}",
        (
            Turn("Where does Nora live?", "Nora lives in Tokyo."),
            _small_talk("Count from one to twenty."),
            Turn("What number does Otto have?", "Otto has number 39."),
            Turn("Who works with Emma?", "Emma works with Sonja."),
        ),
    ),
    Conversation(
        "Facts told in the chat",
        None,
        (
            _small_talk("Hello"),
            Turn("Remember this. Lena lives in Vienna. Lena has number 28. Karl lives in Dublin.", ACCEPTED),
            _small_talk("Who are you?"),
            Turn("Where does Karl live?", "Karl lives in Dublin."),
            Turn("Remember this. Rosa works with Klaus. Ivan lives in Prague.", ACCEPTED),
            _small_talk("Say good morning in Japanese."),
            Turn("What number does Lena have?", "Lena has number 28."),
            Turn("Who works with Rosa?", "Rosa works with Klaus."),
        ),
    ),
)
