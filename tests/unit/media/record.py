"""Records what transformers' image processors make of pictures: `python -m tests.unit.media.record`.

Writes `processors.json` beside this file: digests of the rows that processors for Pillow make, and the sizes that all
processors choose. Of those that need torch only the function that chooses the size is run, cut out of its module.
"""

import ast
import hashlib
import importlib.util
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.unit.media.pictures import pattern
from tests.unit.media.recorded import PATH, ROW_CASES, SIZES


def digest(rows: "np.typing.NDArray[np.float32]") -> str:
    """Of rows of values, float32 [count, values]."""
    assert rows.dtype == np.float32
    return hashlib.sha256(rows.tobytes()).hexdigest()[:32]


def qwen_rows(width: int, height: int, limit: int) -> "np.typing.NDArray[np.float32]":
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 65_536, "longest_edge": limit}
    half = [0.5, 0.5, 0.5]
    processor = Qwen2VLImageProcessorPil(patch_size=16, size=size, image_mean=half, image_std=half)
    return np.asarray(processor(Image.fromarray(pattern(width, height)))["pixel_values"])


def gemma_rows(width: int, height: int, limit: int) -> "np.typing.NDArray[np.float32]":
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    found = Gemma4ImageProcessorPil(max_soft_tokens=limit)(Image.fromarray(pattern(width, height)))
    (count,) = found["num_soft_tokens_per_image"]
    return np.asarray(found["pixel_values"])[0, : count * 9]


ROWS = {"qwen3_5": qwen_rows, "gemma4": gemma_rows}


def function(module: str, name: str) -> Callable[..., tuple[int, int]]:
    """A function of a module of transformers that cannot be imported without torch."""
    package, _, last = module.rpartition(".")
    spec = importlib.util.find_spec(f"transformers.models.{package}")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / f"{last}.py").read_text()
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    names: dict[str, Callable[..., tuple[int, int]]] = {}
    exec(compile(ast.Module([found], []), module, "exec"), {"math": math, "itertools": itertools}, names)
    return names[name]


def size_rules() -> dict[str, Callable[[int, int], tuple[int, int]]]:
    """Family -> height and width after resizing, in pixels, of a height and a width."""
    qwen = function("qwen2_vl.image_processing_pil_qwen2_vl", "smart_resize")
    gemma = function("gemma4.image_processing_pil_gemma4", "get_aspect_ratio_preserving_size")
    unified = function("gemma4_unified.image_processing_gemma4_unified", "get_aspect_ratio_preserving_size")
    glimmer = function("muse_glimmer.image_processing_muse_glimmer", "smart_resize")
    nemotron = function("nemotron_h_omni.image_processing_nemotron_h_omni", "get_patch_grid_size")

    def nemotron_pixels(height: int, width: int) -> tuple[int, int]:
        rows, columns = nemotron(height, width, 16, 2, 1024, 13312)
        return rows * 16, columns * 16

    return {
        "qwen3_5": lambda height, width: qwen(height, width, 32, 65_536, 16_777_216),
        "gemma4": lambda height, width: gemma(height, width, 16, 280 * 9, 3),
        "gemma4_unified": lambda height, width: unified(height, width, 16, 280 * 9, 3),
        "glimmer": lambda height, width: glimmer(height, width, 28, 4096),
        "nemotron_h": nemotron_pixels,
    }


def sizes(rule: Callable[[int, int], tuple[int, int]]) -> list[list[int] | None]:
    """Width and height for each of SIZES; None where the rule refuses the picture."""
    found: list[list[int] | None] = []
    for width, height in SIZES:
        try:
            rows, columns = rule(height, width)
        except (ValueError, ZeroDivisionError):
            found.append(None)
        else:
            found.append([columns, rows])
    return found


if __name__ == "__main__":
    recorded = {
        "rows": {
            family: {
                f"{width}x{height} {limit}": digest(ROWS[family](width, height, limit))
                for width, height, limit in cases
            }
            for family, cases in ROW_CASES.items()
        },
        "sizes": {family: sizes(rule) for family, rule in size_rules().items()},
    }
    PATH.write_text(json.dumps(recorded, indent=None, separators=(",", ":")) + "\n")
