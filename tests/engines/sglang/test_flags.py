"""Engine flags of `hybrid serve --engine sglang`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_backend.errors import EngineError

pytestmark = pytest.mark.engine


def test_flags_in_a_file_win_over_ours_and_those_beside_it_over_both(tmp_path: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    from hybrid_backend.engines.sglang import serve

    file = tmp_path / "engine.yaml"
    file.write_text("served-model-name: mine\nport: 1\nhost: 0.0.0.0\n")
    for words in (["--config", str(file)], [f"--config={file}"]):
        flags = serve._with_flags_of_file([*words, "--port", "2"])
        arguments = serve.engine_arguments("/models/x", "x", flags)
        parsed = prepare_server_args([word for word in arguments if word not in ("--attention-backend", "hybrid")])
        assert (parsed.served_model_name, parsed.port, parsed.host) == ("mine", 2, "0.0.0.0")


def test_a_file_of_flags_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    from hybrid_backend.engines.sglang import serve

    file = tmp_path / "engine.yaml"
    file.write_text("model-path: another/one\n")
    with pytest.raises(EngineError, match="--config: the file names a model; leave it out"):
        serve._with_flags_of_file(["--config", str(file)])
    with pytest.raises(EngineError, match=r"--config: SGLang cannot read it: .*/nowhere/engine.yaml"):
        serve._with_flags_of_file(["--config", "/nowhere/engine.yaml"])
