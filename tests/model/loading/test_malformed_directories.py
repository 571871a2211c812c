"""Every broken directory is refused in one line that names the file, and `check` says the same."""

import json
import os
import re
import shutil
import tempfile
from collections import UserDict
from collections.abc import Callable, ItemsView, Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.model import open_model
from runner.model.sources.model_directory import open_directory
from runner.model.weights.loading import load
from runner.model.weights.parameters import parameters_of
from runner.tokenizer import open_tokenizer
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.tensors import Tensor, read_tensors, safetensors_bytes
from tests.model.loading.conftest import Checkpoints, checked
from tests.model.loading.malformed import WEIGHT, zeros

Break = Callable[[Path], object]
_FIRST, _SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX = "model.safetensors.index.json"


class Case(NamedTuple):
    """`line` is a regular expression for the whole line, with `{d}` for the directory."""

    spoil: Break
    line: str


def replaced(name: str, make: Callable[[Path], object]) -> Break:
    def apply(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return apply


def duplicated(directory: Path) -> None:
    """A second file with one of the tensors, where no index decides."""
    (directory / INDEX).unlink()
    (directory / "model.safetensors").write_bytes(safetensors_bytes({WEIGHT: zeros("F32", 64, 64)}))


def cut(name: str) -> Break:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:-1])


CASES: dict[str, Case] = {
    "shard truncated": Case(
        cut(_SECOND), rf"{{d}}/{_SECOND}: tensor \S+: data ends at byte \d+, the file holds \d+: it is truncated"
    ),
    "shard missing": Case(
        lambda directory: (directory / _SECOND).unlink(),
        rf"open {{d}}/{_SECOND}: no such file or directory \(named by {INDEX}\)",
    ),
    "shard a link to nothing": Case(
        replaced(_SECOND, lambda path: path.symlink_to("nowhere")), rf"open {{d}}/{_SECOND}: no such file or directory"
    ),
    "tensor in two files": Case(
        duplicated,
        rf"tensor {WEIGHT} is in two files: {{d}}/model-0000\d-of-00002\.safetensors and {{d}}/model\.safetensors",
    ),
    "no tokenizer": Case(
        lambda directory: (directory / "tokenizer.json").unlink(),
        r"load tokenizer config: no tokenizer\.json and no tokenizer\.model in the directory",
    ),
    "no config": Case(
        lambda directory: (directory / "config.json").unlink(),
        r"failed to read config\.json: open {d}/config\.json: no such file or directory",
    ),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A llama in two files, which tests may break."""
    return write_checkpoint(tmp_path / "d", "llama", shards=2)


def serve(directory: Path) -> None:
    opened = open_model(str(directory), Path("unused"))
    open_tokenizer(opened.file, merge_eos=True)
    load(opened)


def refusal(model: str, models_dir: Path) -> str:
    """Returns the error of opening; `check` reports the same and nothing else."""
    with pytest.raises(ModelError) as refused:
        open_model(model, models_dir)
    problems = checked(model, models_dir).problems
    assert problems == [str(refused.value)]
    return problems[0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_broken_directory_is_refused_with_one_line(case: Case, directory: Path) -> None:
    case.spoil(directory)
    with pytest.raises(ModelError) as refused:
        serve(directory)
    line = re.compile(case.line.replace("{d}", str(directory)))
    assert line.fullmatch(str(refused.value)), str(refused.value)
    problems = checked(directory).problems
    assert [bool(line.fullmatch(problem)) for problem in problems] == [True], problems


def test_a_file_of_the_directory_is_not_the_directory(directory: Path) -> None:
    with pytest.raises(ModelError, match=rf"^open {directory}/config.json: not a directory; name the one that holds "):
        open_model(str(directory / "config.json"), directory)


def with_index(change: Callable[[dict[str, str]], object]) -> Break:
    """Changes the map of tensors to files."""

    def apply(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        change(index["weight_map"])
        (directory / INDEX).write_text(json.dumps(index))

    return apply


def stray(directory: Path) -> None:
    """Zeros under the name of one tensor, in two files that the index does not name."""
    other = safetensors_bytes({WEIGHT: zeros("F32", 64, 64)})
    for name in ("model-0.safetensors", "model.safetensors"):
        (directory / name).write_bytes(other)


def renamed(directory: Path) -> None:
    """Shards may have any name that the index gives them."""
    index = (directory / INDEX).read_text()
    for path in directory.glob("model-0*"):
        path.rename(directory / path.name.replace("model", "weights"))
    (directory / INDEX).write_text(index.replace("model-0", "weights-0"))


def stale(directory: Path) -> None:
    """mlx-lm ignores the index; some conversions were published with the index of their source."""
    for number, path in enumerate(sorted(directory.glob("model-0*"))):
        path.rename(directory / f"model-{number}.safetensors")


def littered(directory: Path) -> None:
    """Files and folders that systems leave behind."""
    for name in (".DS_Store", "._model.safetensors", "notes.txt"):
        (directory / name).write_bytes(b"\0\0")
    for name in ("original", ".cache", "model.extra.safetensors"):
        (directory / name).mkdir()


def twice(directory: Path) -> None:
    """In each shard zeros under the name of a tensor of the other one."""
    tensors = {path: read_tensors(path) for path in (directory / _FIRST, directory / _SECOND)}
    for path, other in zip(tensors, [*tensors][::-1], strict=True):
        name, tensor = next((name, each) for name, each in tensors[other].items() if "norm" not in name)
        path.write_bytes(safetensors_bytes({**tensors[path], name: zeros(tensor.dtype, *tensor.shape)}))


ALL = r"all model\*\.safetensors are read instead"
PASSED_OVER: dict[str, tuple[Break, str]] = {
    "strays": (stray, rf"not read, as {INDEX} does not name them: model-0\.safetensors, model\.safetensors"),
    "a tensor in two shards": (twice, ""),
    "no weight_map": (
        lambda directory: (directory / INDEX).write_text('{"metadata": {}}'),
        rf"{{d}}/{INDEX}: want a weight_map of tensor to file: found NoneType; {ALL}",
    ),
    "no object": (
        lambda directory: (directory / INDEX).write_text("[]"),
        rf"{{d}}/{INDEX}: want a weight_map of tensor to file: found list; {ALL}",
    ),
    "cut": (cut(INDEX), rf"{{d}}/{INDEX}: want a weight_map of tensor to file: .+; {ALL}"),
    "a pointer": (
        lambda directory: (directory / INDEX).write_text("version https://git-lfs.github.com/spec/v1\n"),
        rf"{{d}}/{INDEX} is a pointer of git-lfs, .*`git lfs pull` fetches it; {ALL}",
    ),
    "names a tensor that is not there": (with_index(lambda places: places.update({"x": _FIRST})), ""),
    "leads out": (with_index(lambda places: places.update({"x": "../a.safetensors", "y": "/tmp/a.safetensors"})), ""),
    "other names": (renamed, ""),
    "stale": (stale, ""),
    "a shard by another name": (lambda directory: (directory / _SECOND).rename(directory / "model-b.safetensors"), ""),
    "litter": (littered, ""),
    "names a file that is none of weights": (with_index(lambda places: places.update({"x": "config.json"})), ""),
}
"""Changes of a sound directory of two shards, and the warning."""


@pytest.mark.parametrize("name", PASSED_OVER)
def test_the_index_decides_and_a_broken_one_stops_nothing(name: str, directory: Path) -> None:
    spoil, line = PASSED_OVER[name]
    wanted = parameters_of(load(open_model(str(directory), Path("unused"))).module)
    spoil(directory)
    opened = open_model(str(directory), Path("unused"))
    found = parameters_of(load(opened).module)
    assert all(mx.array_equal(found[name], array) for name, array in wanted.items())
    said = checked(directory)
    assert said.loads
    assert [*opened.checkpoint.warnings] == [each for each in said.warnings if INDEX in each]
    assert re.fullmatch(line.replace("{d}", str(directory)), "".join(opened.checkpoint.warnings))


def test_a_foreign_packing_is_called_by_its_name(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "d", "llama", overrides={"quantization_config": {"quant_method": "hqq"}})
    tensors = {
        name + ".W_q" if "q_proj" in name else name: tensor
        for name, tensor in read_tensors(directory / "model.safetensors").items()
    }
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(
        ModelError, match=r"lacks 2 tensors: .* \(its packing is 'hqq': convert it with mlx_lm\.convert\)"
    ):
        load(open_model(str(directory), tmp_path))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"qweight": zeros("I32", 64, 8)}, "not a 4-bit AWQ layer"),
        (
            {"qweight": zeros("I32", 64, 8), "scales": zeros("F16", 2, 64), "g_idx": zeros("I32", 64)},
            "not a 4-bit AWQ layer",
        ),
        ({"qweight": zeros("I32", 8, 64), "scales": zeros("F16", 2, 64)}, r"\[8, 64\] does not fit scales \[2, 64\]"),
    ],
)
def test_what_only_looks_like_awq_is_refused(tensors: dict[str, Tensor], text: str, tmp_path: Path) -> None:
    """GPTQ's files have the same keys and another layout."""
    directory = write_checkpoint(tmp_path / "d", "llama")
    kept = read_tensors(directory / "model.safetensors")
    del kept[WEIGHT]
    stem = WEIGHT.removesuffix(".weight")
    changed = kept | {f"{stem}.{part}": tensor for part, tensor in tensors.items()}
    (directory / "model.safetensors").write_bytes(safetensors_bytes(changed))
    with pytest.raises(ModelError, match=rf"tensor {stem}\.qweight:? .*{text}|tensor {stem}\.qweight {text}"):
        load(open_model(str(directory), tmp_path))


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that every user may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def closed() -> Iterator[Callable[[Path], None]]:
    """`closed(path)` removes all rights to it, and root's rights from the test. Afterwards, it restores them."""
    modes: dict[Path, int] = {}
    is_root = os.geteuid() == 0

    def close(path: Path) -> None:
        modes[path] = path.stat().st_mode
        path.chmod(0)
        if is_root:
            os.seteuid(65534)  # nobody

    yield close
    if is_root:
        os.seteuid(0)
    for path, mode in modes.items():
        path.chmod(mode)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "."])
def test_a_file_that_this_user_may_not_read_is_named(
    name: str, checkpoint: Checkpoints, reachable: Path, closed: Callable[[Path], None]
) -> None:
    directory = reachable / "d"
    shutil.copytree(checkpoint("llama"), directory)
    closed(directory / name)
    prefix = "failed to read config.json: " if name == "config.json" else ""
    assert refusal(str(directory), reachable) == f"{prefix}open {directory / name}: permission denied"


class Watched(UserDict[str, str]):
    """An index that counts how often somebody goes through it."""

    looks = 0

    def items(self) -> ItemsView[str, str]:
        Watched.looks += 1
        return super().items()


def test_an_index_is_not_gone_through_for_each_file_that_is_missing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a megabyte can name a hundred thousand."""
    whole = json.loads((directory / INDEX).read_text())["weight_map"]
    looks = set()
    for count in (1, 40):
        places = Watched({**whole, **{f"x{each}": f"lost-{each}.safetensors" for each in range(count)}})
        monkeypatch.setattr("runner.model.sources.model_directory._places", lambda *_, places=places: places)
        faults: list[ModelError] = []
        Watched.looks = 0
        open_directory(directory, "d", faults.append)
        assert len(faults) == count
        looks.add(Watched.looks)
    assert len(looks) == 1
