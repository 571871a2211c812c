"""The conformance suite for any executable in the role of Ollama's MLX runner: a table of cases and generations.

Checks a runner as each generation of Ollama hosts would use it: real processes with small generated models. Exit status
0: all cases passed; 1: a case failed; 2: the executable does not start.
"""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.tools import ROOT
from scripts.tools.conformance import CASES, Case, Outcome, Runners, run
from scripts.tools.conformance.cases import argv
from scripts.tools.conformance.models import MAIN
from scripts.tools.conformance.report import Report, as_markdown, as_text
from scripts.tools.conformance.runners import NotReadyError
from scripts.tools.conformance.this_runner import FAULTY, RUNNER
from scripts.tools.host.lib import GENERATIONS, Generation, LoadError

MOST_LATE = 5
"""The number of runs in a row that took too long after which no other one is tried."""
_EMBEDDING = ("12.62-sizes", "12.63-together", "12.64-empty", "12.65-dimensions", "12.66-too-long", "12.67-media")
OTHERWISE = (
    *("32-sound-refused", "32-damaged-picture", "33-image-tags", "33-told-apart", "33-cached", "51-failure"),
    *(*_EMBEDDING, "12.69-crowd", "12.70-ends"),
)
"""Several ranks answer these otherwise: a model that sees reads text alone, one that embeds texts cannot be split, and
a failure ends all of them."""
SLOW = Outcome("not run", "takes minutes: --slow")
SILENT = Outcome("not run", "the runner does not answer")


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses and checks the command line; `command` and `faulty` become lists of words."""
    parser = argparse.ArgumentParser(
        prog="scripts/conformance",
        usage="scripts/conformance [option ...] [EXECUTABLE [WORD ...]]",
        description=(__doc__ or "").partition("\n\n")[2],
        epilog="Options stand before EXECUTABLE. The runner is asked for short prefill chunks with "
        "MLX_RUNNER_PREFILL_CHUNK=16, which other runners may ignore.",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="EXECUTABLE",
        help="the runner, which is started as `EXECUTABLE [WORD ...] runner --mlx-engine --model M --port P` "
        "(default: this repository's runner)",
    )
    parser.add_argument("--case", action="append", metavar="N", help="only this case: 36, 36-greedy, 11.3 (repeatable)")
    letters = [generation.letter for generation in GENERATIONS]
    parser.add_argument(
        "--generation",
        action="append",
        metavar="G",
        choices=letters,
        help=f"only this generation of hosts: {' '.join(letters)} (repeatable)",
    )
    parser.add_argument("--slow", action="store_true", help="include the case that takes minutes")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="let this runner split its models over N processes, and leave out what several of them answer otherwise",
    )
    parser.add_argument(
        "--faulty",
        type=shlex.split,
        metavar="COMMAND",
        help="a command that starts the same runner with an injected fault, for case 51: with FAULT=forward in its "
        "environment, every forward over the token FAULT_TOKEN must fail",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    parser.add_argument("--cwd", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    unknown = set(arguments.case or ()) - {name for case in CASES for name in (case.number, case.id)}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    return arguments


def does_not_start(runners: Runners, generations: Sequence[Generation]) -> str:
    """Returns the reason why the executable does not start for any of the generations; empty when it does for one.

    Where it runs and does not become ready, no other words are tried.
    """
    reason = ""
    for generation in {argv(generation): generation for generation in generations}.values():
        try:
            runners.shared(generation, MAIN)
        except NotReadyError as error:
            return str(error)
        except (LoadError, OSError) as error:
            reason = reason or str(error)
        else:
            return ""
    return reason


async def run_all(
    runners: Runners, cases: Sequence[Case], generations: Sequence[Generation], slow: bool
) -> Mapping[tuple[Case, Generation], Outcome]:
    """Runs everything that the cases need, one after the other, and reports progress on stderr. A run that took too
    long gives the next one fresh processes; after `MOST_LATE` of these in a row the rest is not run."""
    runs = [
        (case, generation)
        for case in cases
        for generation, part in case.parts(generations).items()
        if part is generation
    ]
    outcomes = dict.fromkeys(runs, SILENT)
    late = 0
    for number, (case, generation) in enumerate(runs, 1):
        tell(f"[{number}/{len(runs)}] {case.id} {generation.letter}")
        outcome = SLOW if case.slow and not slow else await run(case, runners, generation)
        outcomes[case, generation] = outcome
        late = late + 1 if outcome.late else 0
        if late:
            await asyncio.to_thread(runners.renew)
        if late == MOST_LATE:
            break
    tell("")
    return outcomes


def tell(text: str) -> None:
    """Shows `text` on stderr: as a line, or on a terminal in place of the last text; an empty text removes that."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    arguments = arguments_of(words)
    wanted = set(arguments.case or (case.number for case in CASES))
    left_out = OTHERWISE if arguments.ranks > 1 else ()
    cases = [case for case in CASES if {case.number, case.id} & wanted and case.id not in left_out]
    letters = arguments.generation or [generation.letter for generation in GENERATIONS]
    generations = [generation for generation in GENERATIONS if generation.letter in letters]
    command = arguments.command or RUNNER
    faulty = arguments.faulty or (None if arguments.command else FAULTY)
    cwd = arguments.cwd if arguments.command else ROOT
    with Runners(command, faulty=faulty, cwd=cwd, ranks=arguments.ranks) as runners:
        tell(f"starting {shlex.join(command)} ...")
        reason = does_not_start(runners, generations)
        if reason:
            tell("")
            print(f"{shlex.join(command)} does not start: {reason}", file=sys.stderr)
            return 2
        report = Report(command, cases, generations, asyncio.run(run_all(runners, cases, generations, arguments.slow)))
    print(as_text(report))
    if arguments.markdown is not None:
        (arguments.cwd / arguments.markdown).write_text(markdown(report, arguments), encoding="utf-8")
    return 1 if report.failures else 0


def markdown(report: Report, arguments: argparse.Namespace) -> str:
    called = ["--slow"] * arguments.slow
    for option, values in (("--case", arguments.case), ("--generation", arguments.generation)):
        called += [word for value in values or () for word in (option, value)]
    called += ["--ranks", str(arguments.ranks)] if arguments.ranks > 1 else []
    called += ["--faulty", shlex.join(arguments.faulty)] if arguments.faulty else []
    called += ["--markdown", str(arguments.markdown), *arguments.command]
    name = f"`{shlex.join(arguments.command)}`" if arguments.command else "this runner"
    return as_markdown(report, name, shlex.join(called))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        tell("")
        sys.exit(130)
