"""The last lines of a run of the tests."""

from tests.limits import SHOWN, lines


def test_a_run_within_its_limits_is_one_line() -> None:
    said = list(lines("fast", 200, 460, {"a.py": 3.0}))
    assert said == [
        "3 min 20 s, 7 min 40 s of processor time (limits of the fast tier on two quiet cores: 4 min 0 s, 8 min 0 s)"
    ]


def test_a_run_above_one_names_the_most_expensive_files() -> None:
    files = {f"{number}.py": float(number) for number in range(99)}
    for wall_s, processor_s in ((241, 1), (1, 481)):
        _, why, *rows = lines("fast", wall_s, processor_s, files)
        assert why.startswith("Above its limit")
        assert rows[0].split() == ["98.0", "s", "98.py"]
        assert len(rows) == SHOWN


def test_a_part_of_the_tests_has_no_limit() -> None:
    assert list(lines("", 9000, 9000.4, {})) == ["150 min 0 s, 150 min 0 s of processor time"]
