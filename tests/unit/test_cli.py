"""Flags, environment and defaults, in the spellings of hosts and of people."""

import logging
import re
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from msgspec import NODEFAULT

from runner import logs
from runner.cli.commands import OLLAMA_SERVE, version_text
from runner.cli.convert import Given, fields_of
from runner.cli.parse import (
    parse_check,
    parse_command,
    parse_follow,
    parse_ollama,
    parse_replay,
    parse_server,
    unknown_variables,
)
from runner.errors import UsageError
from runner.settings import (
    DEFAULT_CONTEXT_TOKENS,
    HAND_OVER,
    CheckSettings,
    LaunchSettings,
    Settings,
    context_limit,
    flags_of,
)
from runner.sizes import Bound

FLAGS = [*flags_of(Settings).values()]
CHECK_FLAGS = [*flags_of(CheckSettings).values()]
HOST_CALL = ["runner", "--mlx-engine", "--model", "m:latest", "--port", "41000"]


@pytest.mark.parametrize(
    "argv",
    [
        HOST_CALL,
        [*HOST_CALL, "--verbose"],
        [*HOST_CALL, "--verbose=true"],
        ["runner", "--model", "m:latest", "--port", "41000"],
        ["--mlx-engine", "--model", "m:latest", "--port", "41000"],
        ["--model=m:latest", "--port=41000"],
        ["-model", "m:latest", "-port", "41000"],
        ["runner", "--mlx-engine", "-model=m:latest", "-port=41000", "-verbose"],
    ],
)
def test_every_spelling_of_a_host_is_understood(argv: list[str]) -> None:
    settings = parse_server(argv, {})
    assert (settings.model, settings.port) == ("m:latest", 41000)


@pytest.mark.parametrize("word", ["--imagegen-engine", "--ollama-engine", "llama"])
def test_another_engine_is_refused_in_ollamas_words(word: str) -> None:
    with pytest.raises(UsageError, match=r"^unknown runner engine, expected --mlx-engine$"):
        parse_server(["runner", word, "--model", "m", "--port", "1"], {})


def test_only_a_process_started_by_a_host_watches_its_parent() -> None:
    assert parse_server(HOST_CALL, {}).watch_parent
    assert not parse_server(HOST_CALL[2:], {}).watch_parent
    assert parse_server([*HOST_CALL[2:], "--watch-parent", "on"], {}).watch_parent
    assert not parse_server(HOST_CALL, {"MLX_RUNNER_WATCH_PARENT": "off"}).watch_parent
    assert (parse_server(HOST_CALL, {}).hosted, parse_server(HOST_CALL[2:], {}).hosted) == (True, False)


def test_a_flag_beats_its_variable_and_that_the_default() -> None:
    argv = ["--model", "m"]
    assert parse_server(argv, {}).max_gap_s == 0.1
    assert parse_server(argv, {"MLX_RUNNER_MAX_GAP_MS": "64"}).max_gap_s == 0.064
    assert parse_server([*argv, "--max-gap-ms", "32"], {"MLX_RUNNER_MAX_GAP_MS": "64"}).max_gap_s == 0.032


EXAMPLES = {
    **dict.fromkeys(("verify", "watch-parent", "verbose", "no-media", "inspect-text", "unproven-models", "json"), "on"),
    "model": "x",
    "models-dir": "/m",
    "port": "9",
    "hand-over": "refused",
    "log-level": "debug",
    "format": "s.json",
    "context": "4096",
    "parallel": "5",
    "max-gap-ms": "7",
    "prefill-chunk": "8",
    "draft-tokens": "3",
    "kv-bits": "4",
    "cache": "none",
    "cache-memory": "3MiB",
    "disk-cache": "/kept",
    "disk-memory": "5G",
    "memory": "40%",
    "ranks": "1",
    "followers": "",
    "secret-file": "/secret",  # more ranks exclude other flags
    "draft": "small:latest",
    "dtype": "float16",
    "trace": "/t.json",
    "record": "/t.tape",
    "blas": "off",
    "kernels": "off",
    "blas-threads": "2",
}


def test_every_flag_has_its_variable() -> None:
    assert {*EXAMPLES} == {flag.name for flag in (*FLAGS, *CHECK_FLAGS)}
    settings = parse_server([f"--{flag.name}={EXAMPLES[flag.name]}" for flag in FLAGS], {})
    assert settings == parse_server([], {flag.variable: EXAMPLES[flag.name] for flag in FLAGS})
    assert (settings.context_tokens, settings.verify, settings.dtype) == (4096, True, "float16")
    assert (settings.trace, settings.inspect_text, settings.no_media) == (Path("/t.json"), True, True)
    assert (settings.parallel, settings.max_gap_s, settings.prefill_chunk_tokens) == (5, 0.007, 8)
    assert (settings.disk_cache, settings.disk_memory) == (Path("/kept"), Bound(5 << 30))
    assert settings.unproven_models
    check = parse_check(["m", *(f"--{flag.name}={EXAMPLES[flag.name]}" for flag in CHECK_FLAGS)], {})
    variables = {flag.variable: EXAMPLES[flag.name] for flag in CHECK_FLAGS}
    assert check == parse_check([], {**variables, "MLX_RUNNER_MODEL": "m"})
    assert (check.model, check.models_dir, check.context_tokens) == ("m", Path("/m"), 4096)
    assert (check.verify, check.json, check.log_level) == (True, True, logging.DEBUG)
    assert (check.dtype, check.draft, check.blas, check.blas_threads) == ("float16", "small:latest", "off", 2)
    assert (check.memory, check.disk_cache) == (Bound(percent=40), Path("/kept"))


def test_a_default_is_that_of_the_field() -> None:
    """Texts of defaults that are not made from the fields: all but the cache's limit, which only servers have."""
    read = fields_of(Settings, Given({flag.name: flag.default for flag in FLAGS if flag.default}, {}, []))
    fields = {field.name: field.default for field in msgspec.structs.fields(Settings) if field.default is not NODEFAULT}
    assert {name for name, value in read.items() if name in fields and value != fields[name]} == {"cache_memory"}


def test_a_directory_that_others_may_write_to_keeps_no_conversations(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    argv = ["--model", "m", "--disk-cache", str(kept)]
    assert parse_server(["--model", "m"], {}).disk_cache is None
    assert parse_server(argv, {}).disk_cache == kept  # it will be made
    kept.mkdir(mode=0o700)
    assert parse_server(argv, {}).disk_cache == kept
    kept.chmod(0o777)
    with pytest.raises(UsageError, match="others may write to it"):
        parse_server(argv, {})
    kept.rmdir()
    kept.write_text("")
    with pytest.raises(UsageError, match="not a directory"):
        parse_server(argv, {})


FOLLOWED = ["--model", "m", "--followers", "10.0.0.2:11600, studio.local:1", "--secret-file", "/s"]


def test_followers_are_ranks_on_other_machines() -> None:
    settings = parse_server(FOLLOWED, {})
    assert settings.followers == ("10.0.0.2:11600", "studio.local:1")
    assert (settings.ranks, settings.ranks_here, settings.secret_file) == (3, 1, Path("/s"))
    here = parse_server(["--model", "m", "--ranks", "2"], {})
    assert (here.ranks, here.ranks_here, here.followers) == (2, 2, ())
    assert parse_server(["--model", "m"], {}).ranks == 1


def test_follow_needs_an_address_to_listen_at_and_a_secret_file() -> None:
    settings = parse_follow(["--listen", "10.0.0.2:11600", "--secret-file", "~/s"], {"OLLAMA_MODELS": "/m"})
    assert (settings.address, settings.port, settings.models_dir) == ("10.0.0.2", 11600, Path("/m"))
    assert settings.secret_file == Path("~/s").expanduser()
    variables = {"MLX_RUNNER_LISTEN": "10.0.0.2:11600", "MLX_RUNNER_SECRET_FILE": "~/s", "OLLAMA_MODELS": "/m"}
    assert parse_follow([], variables) == settings


def test_check_takes_its_model_before_or_after_its_flags() -> None:
    for words in (["m", "--verify", "--json"], ["--verify", "m", "--json"], ["--json=on", "-verify=true", "m"]):
        settings = parse_check(words, {"MLX_RUNNER_MODEL": "another"})
        assert (settings.model, settings.verify, settings.json) == ("m", True, True)
    settings = parse_check(["m"], {})
    assert (settings.verify, settings.json, settings.context_tokens) == (False, False, None)


@pytest.mark.parametrize(
    ("words", "environ", "on"),
    [
        (["--verify"], {}, True),
        (["--verify=on"], {}, True),
        (["-verify=1"], {}, True),
        (["--verify", "off"], {}, False),
        ([], {"MLX_RUNNER_VERIFY": "on"}, True),
        ([], {"MLX_RUNNER_VERIFY": " 1 "}, True),
        ([], {"MLX_RUNNER_VERIFY": ""}, False),
        (["--verify"], {"MLX_RUNNER_VERIFY": "off"}, True),
        (["--verify=off"], {"MLX_RUNNER_VERIFY": "on"}, False),
    ],
)
def test_a_switch_is_on_alone_and_takes_a_value(words: list[str], environ: dict[str, str], on: bool) -> None:
    assert parse_server(["--model", "m", *words], environ).verify is on
    assert parse_server([*words, "--model", "m"], environ).verify is on
    assert parse_check([*words, "m"], environ).verify is on


@pytest.mark.parametrize(
    ("own", "wanted", "limit"),
    [
        (4096, None, 4096),
        (4096, 512, 512),
        (4096, 131072, 4096),
        (0, None, DEFAULT_CONTEXT_TOKENS),
        (0, 131072, 131072),
    ],
)
def test_the_context_is_the_models_own_or_less(own: int, wanted: int | None, limit: int) -> None:
    assert context_limit(own, wanted) == limit


def test_a_tilde_in_models_dir_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves it in `--models-dir=~/m`. Ollama takes it literally in OLLAMA_MODELS, so do we."""
    monkeypatch.setenv("HOME", "/home/u")
    assert parse_server(["--model", "m", "--models-dir=~/m"], {}).models_dir == Path("/home/u/m")
    assert parse_server(["--model", "m"], {"OLLAMA_MODELS": "~/m"}).models_dir == Path("~/m")


KV, PARALLEL = "OLLAMA_KV_CACHE_TYPE", "OLLAMA_NUM_PARALLEL"


@pytest.mark.parametrize(
    ("flag", "environ", "name", "value"),
    [
        ([], {"OLLAMA_MODELS": "/x/models"}, "models_dir", Path("/x/models")),
        ([], {"OLLAMA_MODELS": ' "/x/models" '}, "models_dir", Path("/x/models")),
        ([], {"OLLAMA_MODELS": "'/x/models'"}, "models_dir", Path("/x/models")),
        ([], {"OLLAMA_MODELS": ""}, "models_dir", Path("/home/u/.ollama/models")),
        ([], {"OLLAMA_MODELS": "  "}, "models_dir", Path("/home/u/.ollama/models")),
        ([], {"OLLAMA_MODELS": "'/x/my models '"}, "models_dir", Path("/x/my models ")),
        ([], {}, "log_level", logging.INFO),
        ([], {"OLLAMA_DEBUG": ""}, "log_level", logging.INFO),
        ([], {"OLLAMA_DEBUG": "1"}, "log_level", logging.DEBUG),
        ([], {"OLLAMA_DEBUG": ' "1" '}, "log_level", logging.DEBUG),
        ([], {"OLLAMA_DEBUG": "2"}, "log_level", logs.TRACE),
        ([], {"OLLAMA_DEBUG": "-1"}, "log_level", logging.WARNING),
        ([], {"OLLAMA_DEBUG": "-2"}, "log_level", logging.ERROR),
        ([], {"OLLAMA_DEBUG": "nonsense"}, "log_level", logging.INFO),
        (["--log-level", "warn"], {"OLLAMA_DEBUG": "2"}, "log_level", logging.WARNING),
        ([], {}, "kv_bits", None),
        (["--kv-bits", "8"], {}, "kv_bits", 8),
        ([], {"MLX_RUNNER_KV_BITS": "4"}, "kv_bits", 4),
        (["--kv-bits", "5"], {KV: "q8_0"}, "kv_bits", 5),
        ([], {KV: "q8_0"}, "kv_bits", 8),
        ([], {KV: ' "Q8_0" '}, "kv_bits", 8),
        ([], {KV: "f16"}, "kv_bits", None),
        (["--kv-bits", "off"], {KV: "q8_0"}, "kv_bits", None),
        ([], {"MLX_RUNNER_KV_BITS": "off", KV: "q8_0"}, "kv_bits", None),
        ([], {"MLX_RUNNER_KV_BITS": " ", KV: "q8_0"}, "kv_bits", 8),
        (["--kv-bits", "8"], {KV: "nonsense"}, "kv_bits", 8),
        ([], {}, "parallel", 4),
        (["-parallel=64"], {}, "parallel", 64),
        ([], {PARALLEL: "64"}, "parallel", 64),
        ([], {PARALLEL: ' "08" '}, "parallel", 8),
        ([], {PARALLEL: "0"}, "parallel", 4),
        ([], {PARALLEL: " '' "}, "parallel", 4),
        ([], {"MLX_RUNNER_PARALLEL": "3", PARALLEL: "7"}, "parallel", 3),
        ([], {"MLX_RUNNER_PARALLEL": " ", PARALLEL: "7"}, "parallel", 7),
        (["--parallel", "2"], {"MLX_RUNNER_PARALLEL": "3", PARALLEL: "nonsense"}, "parallel", 2),
    ],
)
def test_a_setting_is_ollamas_unless_it_is_given(
    flag: list[str], environ: dict[str, str], name: str, value: object
) -> None:
    settings = parse_server(["--model", "m", *flag], {"HOME": "/home/u", **environ})
    assert (getattr(settings, name), settings.warnings) == (value, ())
    if name in ("models_dir", "log_level"):
        assert getattr(parse_check(["m", *flag], {"HOME": "/home/u", **environ}), name) == value


NO_NUMBER = "is not a whole number: 4 requests run at once"


@pytest.mark.parametrize(
    ("variable", "text", "value", "why"),
    [
        (KV, "q5_1", None, " is none of q8_0, q4_0, f16, bf16, f32: keys and values are not quantized"),
        *((PARALLEL, text, 4, f" {NO_NUMBER}") for text in ("many", "-1", "1_0", "\N{ARABIC-INDIC DIGIT FOUR}")),
        *((PARALLEL, text, 64, ": at most 64 requests run at once") for text in ("65", "9" * 5000)),
    ],
)
def test_a_wrong_variable_of_ollamas_is_ignored_with_a_warning(
    variable: str, text: str, value: int | None, why: str
) -> None:
    settings = parse_server(["--model", "m"], {variable: text})
    assert (settings.kv_bits if variable == KV else settings.parallel) == value
    assert settings.warnings == (f"{variable}={text}{why}",)


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match=r"^0$"):
        parse_command(words, {})
    return capsys.readouterr().out


def test_the_help_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal has 80 columns; the help is little longer than a screen."""
    text = shown(["--help"], capsys)
    assert "[8GiB,25%]" in text, "argparse would take the sign of percent for its own"
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 62
    for flag in FLAGS:
        (at,) = [number for number, line in enumerate(lines) if line.split()[:1] == [f"--{flag.name}"]]
        texts = " ".join(lines[at : at + 2])
        assert flag.short in texts, "one line, or one below"


@pytest.mark.parametrize("command", ["", "check", "top", "replay", "follow"])
def test_no_help_leads_to_a_file_that_an_installation_lacks(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.findall(r"(?:docs|requirements|scripts)/\S+", shown([*command.split(), "--help"], capsys)) == []


@pytest.mark.parametrize("words", ["help", "help check", "completion --help", "version -h"])
def test_help_may_be_asked_for_in_every_place(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(words.split(), capsys) == shown(["--help"], capsys)


def test_the_version_is_that_of_what_it_stands_on_too(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(["version"], capsys)
    assert told == shown(["--version"], capsys)
    assert told == version_text() + "\n"
    pattern = r"mlx-runner \d+\.\d+\.\d+ \(mlx \d[\w.]*, mlx-lm \d[\w.]*, Python \d[\w.]*\)"
    assert re.fullmatch(pattern, version_text())


def test_a_replay_takes_a_file_and_where_its_model_is() -> None:
    settings = parse_replay(["/t.tape"], {"OLLAMA_MODELS": "/m"})
    assert (settings.file, settings.model, settings.models_dir) == (Path("/t.tape"), None, Path("/m"))
    assert parse_replay(["--model", "n", "/t.tape"], {}).model == "n"


def test_ollama_serve_takes_its_own_flags_before_ollamas_path_and_ollamas_after_it() -> None:
    assert parse_ollama(["serve"]) == LaunchSettings(ollama=None, words=["serve"], runner=None, start=None)
    settings = parse_ollama(["serve", "--runner", "a b", "/bin/ollama", "run", "--verbose", "m", "--runner", "x"])
    assert settings == LaunchSettings(
        ollama="/bin/ollama", words=["run", "--verbose", "m", "--runner", "x"], runner="a b"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a command: mlx-runner ollama serve; see mlx-runner ollama --help"),
        (["serve", "--port", "1"], "unrecognized arguments: --port"),
        (["serve", "--runner"], "expected one argument; see mlx-runner ollama serve --help"),
    ],
)
def test_wrong_usage_of_ollama_is_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_ollama(words)


def test_all_together_takes_three_quarters_of_what_there_is_and_the_cache_a_quarter_at_most() -> None:
    argv = ["--model", "m"]
    assert parse_server(argv, {}).cache_memory == Bound(8 << 30, 25)
    assert parse_server(argv, {}).memory == parse_check(["m"], {}).memory == Bound(percent=75)
    assert parse_server(argv, {"MLX_RUNNER_MEMORY": "24G"}).memory == Bound(24 << 30)
    assert parse_server([*argv, "--memory", "50%"], {"MLX_RUNNER_MEMORY": "24G"}).memory == Bound(percent=50)


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        ([], {}, "--model is missing"),
        (["--model", "m", "--port", "x"], {}, "--port x: give a whole number from 0 to 65535"),
        (["--model", "m", "--nonsense"], {}, "unrecognized arguments: --nonsense"),
        (["--model", "m", "--cach", "none"], {}, "unrecognized arguments"),
        (["--model", "m", "--cache", "huge"], {}, "invalid choice: 'huge'"),
        (["--model", "m"], {"MLX_RUNNER_CACHE": "huge"}, "MLX_RUNNER_CACHE=huge: choose one of"),
        (["--model", "m", "--context", "1"], {}, "--context 1: give a whole number from 2 to"),
        (["--model", "m"], {"MLX_RUNNER_VERIFY": "maybe"}, "MLX_RUNNER_VERIFY=maybe: choose one of on, off"),
        (["--model", "m", "--json"], {}, "unrecognized arguments: --json"),
        (["--model", "m", "--parallel", "0"], {}, "--parallel 0: give a whole number from 1 to 64"),
        (["--model", "m", "--max-gap-ms", "0"], {}, "--max-gap-ms 0: give a whole number from 1 to 60000"),
        (["--model", "m", "--cache-memory", "8Q"], {}, "--cache-memory 8Q: give bytes (123456, 512MiB, 8G), a share"),
        (["--model", "m", "--memory", "all"], {}, "--memory all: give bytes (123456, 512MiB, 8G), a share (25%)"),
        (["--model", "m", "--draft-known"], {}, "^--draft-known is gone: leave it out (prompts that come again get"),
        (["completion", "ksh"], {}, "mlx-runner completion bash|zsh|fish"),
        (["--model", "m"], {"MLX_RUNNER_KV_BITS": "q8_0"}, "MLX_RUNNER_KV_BITS=q8_0: choose one of 8, 6, 5, 4, 3, off"),
        (["--model", "m"], {"MLX_RUNNER_PARALLEL": "x"}, "^MLX_RUNNER_PARALLEL=x: give a whole number from 1 to 64"),
        (
            ["--model", "m"],
            {"MLX_RUNNER_MEMORY": "x"},
            "^MLX_RUNNER_MEMORY=x: give bytes (123456, 512MiB, 8G), a share",
        ),
        (["--model", "m"], {"MLX_RUNNER_BLAS_THREADS": "x"}, "^MLX_RUNNER_BLAS_THREADS=x: give a whole number from 1"),
        (["--model", "m"], {"MLX_RUNNER_DISK_CACHE": "/etc/passwd"}, "^MLX_RUNNER_DISK_CACHE=/etc/passwd: not a dir"),
        (["--model", "m"], {"MLX_RUNNER_FOLLOWERS": "x"}, "^MLX_RUNNER_FOLLOWERS=x: give HOST:PORT"),
        (["--model", "m", "--parallel", "y"], {"MLX_RUNNER_PARALLEL": "x"}, "^--parallel y: give a whole number"),
        (["follow"], {"MLX_RUNNER_LISTEN": "x"}, "^MLX_RUNNER_LISTEN=x: give HOST:PORT"),
        (["follow", "--secret-file", "/s"], {}, "--listen is missing"),
        (["follow", "--listen", "10.0.0.2:1"], {}, "--secret-file is missing"),
        (
            ["follow", "--listen", "0.0.0.0:1", "--secret-file", "/s"],
            {},
            "--listen 0.0.0.0:1: it stands for every",
        ),
        ([*FOLLOWED, "--ranks", "2"], {}, "--followers excludes --ranks"),
        ([*FOLLOWED, "--record", "/t"], {}, "--followers excludes --record: leave out one of them"),
        ([*FOLLOWED, "--disk-cache", "/kept"], {}, "--followers excludes --disk-cache: leave out one of them"),
        ([*FOLLOWED, "--draft", "small"], {}, "--followers excludes draft models: leave out --draft small"),
        (FOLLOWED[:4], {}, "--followers needs --secret-file: name a file"),
        ([*FOLLOWED, "--followers", "10.0.0.2"], {}, "--followers 10.0.0.2: give HOST:PORT"),
        ([*FOLLOWED, "--followers", "a:1,b:2,a:1"], {}, "each once"),
        ([*FOLLOWED, "--followers", ",".join(f"a:{port}" for port in range(64))], {}, "at most 63 addresses"),
        (["--model", "m", "--ranks", "2", "--disk-cache", "/kept"], {}, "--ranks 2 excludes --disk-cache"),
        (["--model", "m", "--ranks", "2", "--record", "/t.tape"], {}, "--ranks 2 excludes --record"),
        (["--model", "m", "--ranks", "2", "--draft", "small"], {}, "--ranks 2 excludes draft models"),
        (["--model", "m", "--ranks", "0"], {}, "whole number from 1 to"),
        (["check"], {}, "name a model in the Ollama store, or a directory: mlx-runner check NAME|DIR"),
        (["check", "m", "n"], {}, "unrecognized arguments: n; see mlx-runner check --help"),
        (["check", "m", "--port", "1"], {}, "unrecognized arguments: --port 1"),
        (["check", "m"], {"MLX_RUNNER_JSON": "yes"}, "MLX_RUNNER_JSON=yes: choose one of on, off"),
        (["replay"], {}, "FILE"),
        (["top"], {"MLX_RUNNER_PORT": "x"}, "^MLX_RUNNER_PORT=x: give a whole number"),
        (["top", "0"], {"MLX_RUNNER_PORT": "x"}, "^--port 0: give a whole number"),
        (["--prt", "1"], {}, "^unrecognized arguments: --prt 1: did you mean --port? See mlx-runner --help"),
        (
            ["--draft-token=3", "--x", "1"],
            {},
            "--draft-token=3 --x 1: did you mean --draft-tokens? See mlx-runner --help",
        ),
        (["check", "m", "--formt", "x"], {}, "--formt x: did you mean --format? See mlx-runner check --help"),
        (["--zzz"], {}, "^unrecognized arguments: --zzz; see mlx-runner --help"),
        (["chek", "m"], {}, "^chek is no command: did you mean check? See mlx-runner --help"),
        (["serve", "q:4b", "--port", "1"], {}, "^serve is no command: mlx-runner --model q:4b --port N serves a model"),
        (["run"], {}, "^run is no command: mlx-runner --model NAME|DIR --port N serves"),
        (
            ["./dir"],
            {},
            "^./dir is no command: mlx-runner --model ./dir --port N serves a model, mlx-runner check ./dir",
        ),
        (["qwen3"], {}, "mlx-runner ollama serve starts Ollama with this runner"),
        (["pull", "q"], {}, "^pull is a command of ollama, not of mlx-runner"),
    ],
)
def test_a_wrong_value_is_refused_by_name(argv: list[str], environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_command(argv, environ)
    begins = said.startswith("^")
    assert str(refused.value).startswith(said[1:]) if begins else said in str(refused.value)


def test_a_variable_that_nothing_reads_is_named() -> None:
    known = {flag.variable: "x" for flag in (*FLAGS, *CHECK_FLAGS)}
    known |= {"MLX_RUNNER_LISTEN": "x", "MLX_RUNNER_OLLAMA": "/x", "MLX_RUNNER_OLLAMA_MEDIA": "x", "PATH": "/x"}
    assert unknown_variables(known) == ""
    assert unknown_variables({"MLX_RUNNER_DRAFT_KNOWN": "on"}).startswith(
        "MLX_RUNNER_DRAFT_KNOWN is gone: leave it out"
    )
    assert unknown_variables({**known, "MLX_RUNNER_PARALEL": "3", "MLX_RUNNER_": "1"}) == (
        "MLX_RUNNER_ is no variable of this runner; MLX_RUNNER_PARALEL is no variable of this runner: did you mean"
        " MLX_RUNNER_PARALLEL?"
    )


def test_every_extent_of_the_hand_over_that_help_offers_is_taken() -> None:
    offered = re.findall(r"`(\w+)`, ", OLLAMA_SERVE.epilog)
    assert offered == [*HAND_OVER]
    for word in offered:
        assert parse_server(["--model", "m"], {"MLX_RUNNER_HAND_OVER": word}).hand_over == word


def test_a_user_without_a_home_has_the_store_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a number that no list knows; a directory is served all the same."""
    monkeypatch.delenv("HOME", raising=False)

    def unknown(user: int) -> NoReturn:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    store = Path("/usr/share/ollama/.ollama/models")
    assert parse_server(["--model", "/m"], {}).models_dir == store
    assert parse_check(["m"], {}).models_dir == store
    assert parse_server(["--model", "m"], {"OLLAMA_MODELS": "/x"}).models_dir == Path("/x")
    assert parse_server(["--model", "m", "--models-dir", "/y"], {}).models_dir == Path("/y")
