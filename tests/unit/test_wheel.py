"""`scripts/wheel` names the command that failed."""

from pathlib import Path

import pytest

from scripts.tools import wheel


@pytest.mark.parametrize(
    ("command", "limit_s", "wanted"),
    [
        (["nothing-here"], 60.0, "nothing-here: No such file or directory"),
        (["sleep", "60"], 0.0, "sleep 60: ended after 0 s; is the machine busy?"),
        (["false"], 60.0, "false: exit status 1\n"),
    ],
)
def test_a_command_that_fails_is_named_in_place_of_a_traceback(
    command: list[str], limit_s: float, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "_COMMAND_TIMEOUT_S", limit_s)
    with pytest.raises(wheel.WheelError) as found:
        wheel._output(command, tmp_path)
    assert str(found.value) == wanted
