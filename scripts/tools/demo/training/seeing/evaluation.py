"""Evaluation of the trained model that sees: greedy answers, of which only exact ones count."""

from collections import Counter
from collections.abc import Sequence

from scripts.tools.demo.questions import messages, render
from scripts.tools.demo.seeing.held_out import Look, held_out_looks
from scripts.tools.demo.seeing.talks import TALKS
from scripts.tools.demo.seeing.world import BLIND, QUESTIONS, SMALL_TALK
from scripts.tools.demo.training.seeing.viewer import Viewer

REQUIRED_ACCURACY = 0.95


def wrong_looks(viewer: Viewer, looks: Sequence[Look]) -> list[str]:
    """Returns a line for each question that does not get exactly its answer."""
    lines = []
    for prompt, pictures, right in looks:
        if (text := viewer.answer(prompt, pictures)) != right:
            lines.append(f"{right!r} is answered {text!r}")
    return lines


def report(viewer: Viewer) -> bool:
    """Prints what the model reaches; True if every demo answer is right and enough of the held-out pictures."""
    looks = held_out_looks()
    wrong = wrong_looks(viewer, looks)
    for line, times in Counter(wrong).most_common():
        print(f"  {line}" + (f", {times} times" if times > 1 else ""))
    share = 1 - len(wrong) / len(looks)
    print(f"held-out pictures: {share:.1%} of {len(looks)} ({REQUIRED_ACCURACY:.0%} required)")
    known = [
        *(Look(talk.prompt(turn), talk.pictures, answer) for talk in TALKS for turn, answer in enumerate(talk.answers)),
        *(Look(render(messages([], question)), (), answer) for question, answer in SMALL_TALK.items()),
        *(Look(render(messages([], question)), (), BLIND) for question in QUESTIONS),
    ]
    missed = wrong_looks(viewer, known)
    for line in missed:
        print(f"  {line}")
    print(f"demo talks: {f'{len(missed)} wrong answers' if missed else 'every answer as expected'}", flush=True)
    return share >= REQUIRED_ACCURACY and not missed
