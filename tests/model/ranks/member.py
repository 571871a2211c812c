"""One process of a group: loads its share of one model after another, as lines of JSON on its input say.

It ends with its input, and in any case a minute after the last job came.
"""

import faulthandler
import json
import logging
import os
import sys
from pathlib import Path
from typing import cast

from runner.cpu import preload

preload()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from runner.errors import ModelError  # noqa: E402
from runner.kv_bits.wing import find_format  # noqa: E402
from runner.model import open_model  # noqa: E402
from runner.ranks.share import load_share  # noqa: E402
from tests.model.ranks.jobs import Job, Outcome, answer, state_shapes  # noqa: E402

_MOST_S = 60


def serve() -> None:
    """Joins the group that the environment names, and answers each line with one of its own."""
    output = os.fdopen(os.dup(1), "w")  # nothing else may write there
    os.dup2(2, 1)
    faulthandler.dump_traceback_later(_MOST_S, exit=True)
    group = mx.distributed.init(strict=True, backend="ring")
    mx.disable_compile()
    for line in sys.stdin:
        faulthandler.dump_traceback_later(_MOST_S, exit=True)
        print(json.dumps(_done(json.loads(line), group)), file=output, flush=True)


def _done(job: Job, group: mx.distributed.Group) -> Outcome:
    """Loads and runs one model. A refusal is an outcome, too."""
    opened = open_model(job["model"], Path(job["models_dir"]))
    budget_bytes = job["budget_bytes"]
    if budget_bytes is not None:
        budget_bytes += job["more_bytes"] * group.rank()
    try:
        loaded = load_share(opened, group, job["dtype"], budget_bytes)
    except ModelError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    make_layers = loaded.make_layers
    if job["kv_bits"]:
        make_layers = find_format(make_layers, loaded.logits, opened.vocab_size, job["kv_bits"]).make_layers
    scores, layers = answer(loaded, make_layers)
    mx.save_safetensors(f"{job['out']}-{group.rank()}.safetensors", {"scores": scores})
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(loaded.module.parameters()))
    return {
        "error": "",
        "share_bytes": sum(array.nbytes for _, array in arrays),
        "layers": [type(layer).__name__ for layer in layers],
        "state_shapes": state_shapes(layers),
        "dtypes": loaded.dtypes,
    }


if __name__ == "__main__":
    logging.disable()
    serve()
