"""Prompts with pictures give the logits of mlx-vlm, which were recorded."""

from typing import cast

import mlx.core as mx
import pytest

from tests.lib.seeing import tokens_of
from tests.model.pictures import dense
from tests.model.pictures.record import GEMMA, PARTS, QWEN, RECORDED
from tests.model.pictures.test_forward import TOLERANCE, away, compute, cuts_of


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_any_cuts_give_the_logits_of_mlx_vlm(name: str) -> None:
    wanted = cast("dict[str, mx.array]", mx.load(str(RECORDED)))[name]
    assert away(dense.logits(name, PARTS), wanted) <= TOLERANCE
    for stops in ([len(tokens_of(PARTS))], *cuts_of(name, PARTS)):
        assert away(compute(name, PARTS, stops), wanted) <= TOLERANCE
