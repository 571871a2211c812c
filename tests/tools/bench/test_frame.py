"""The command line that all benchmarks share."""

import pytest

from scripts.tools.bench import __main__ as bench


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["parallel", "--turns=0"], "there is at least one turn"),
        (["decode", "--peer=other="], "NAME=COMMAND is wanted"),
        (["decode", "--peer=other='"], "No closing quotation"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(words)
    assert complaint in capsys.readouterr().err.splitlines()[-1]
