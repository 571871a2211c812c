"""The runner of this tree, but what its grammar leaves no choice about is drawn token by token:
`python -m scripts.tools.bench.format.without_jumps`."""

import os

from runner import blas
from scripts.tools.bench.common.options import threads

if __name__ == "__main__":  # before MLX is imported, as the runner does
    blas.preload(os.environ["MLX_RUNNER_BLAS"], threads(os.environ["MLX_RUNNER_BLAS_THREADS"]))

from runner.__main__ import main
from runner.engine.answer_grammar import AnswerGrammar


def _none(_: AnswerGrammar, __: int) -> list[int]:
    return []


AnswerGrammar.forced = _none  # type: ignore[assignment,method-assign]  # to measure what it brings

if __name__ == "__main__":
    main()
