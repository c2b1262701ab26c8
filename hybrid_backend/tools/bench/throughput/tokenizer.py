"""The tokenizer with which an engine's client makes its random prompts."""

from __future__ import annotations

from pathlib import Path

from hybrid_backend.errors import ModelError
from hybrid_backend.tools.bench.client import BenchError

_FILE = "tokenizer_config.json"


def find_tokenizer(option: str, served_name: str) -> str:
    """Return the folder or hub id of a tokenizer that can be loaded here.

    Args:
        option: ``--tokenizer``; empty: the server's name of the model stands for it.
        served_name: the name under which the server lists the model.

    Raises:
        BenchError: there is no such tokenizer, or it is neither cached nor downloadable.
    """
    from hybrid_backend.tools.hub import resolve_model

    name = option or served_name
    said = f"--tokenizer {option}" if option else f"the server's model {served_name!r} names no tokenizer here"
    fix = "give --tokenizer FOLDER (of the model) or org/name"
    try:
        resolved = resolve_model(name)
    except ModelError as error:
        raise BenchError(f"{said}: {error}" if option else f"{said}; {fix}") from None
    if Path(resolved).is_dir():
        return resolved
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        hf_hub_download(name, _FILE)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BenchError(
            f"{said}: {name}/{_FILE} is not cached and cannot be fetched ({reason[:200]}); {fix}"
        ) from None
    return name
