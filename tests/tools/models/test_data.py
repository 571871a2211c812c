"""The tables of tiny models: what a table takes from others, and the names that a pattern stands for."""

from pathlib import Path

import pytest

from scripts.tools.models import data
from scripts.tools.models.sources_form import _shapes

TABLES = """
[base]
width = 64
rope = "null"
list = ["$SIZE", 2]

[child]
like = "base"
without = ["rope"]
width = 32
inner = "@base"

[both]
like = ["base", "child"]
"""


def test_a_table_takes_fields_from_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(TABLES)
    monkeypatch.setattr(data, "__file__", str(tmp_path / "data.py"))
    base = {"width": 64, "rope": None, "list": [7, 2]}
    child = {"width": 32, "list": [7, 2], "inner": base}
    assert data.read("file", SIZE=7) == {"base": base, "child": child, "both": {**child, "rope": None}}


def test_a_pattern_stands_for_names_in_order() -> None:
    said = {"a.{0..1}.{x,y}": [2, 3], "tower.": "tower"}
    assert list(_shapes(said))[:4] == ["a.0.x", "a.0.y", "a.1.x", "a.1.y"]
    assert _shapes(said)["tower.layers.0.self_attn.q_proj.bias"] == (64,)
