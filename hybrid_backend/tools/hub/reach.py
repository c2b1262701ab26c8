"""Models of the hub: a check in one request, because the hub's library repeats a failed one for half a minute."""

from __future__ import annotations

import os
from textwrap import shorten

from hybrid_backend.config.reading import is_folder
from hybrid_backend.errors import ModelError

_OTHER_HUBS = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
"""Variables with which an engine takes models from another hub, which is not checked."""
_OTHER_FORMATS = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*")
"""Files of a model's repository that hold its weights once more, in formats that are not served from there."""


def check_hub(model: str) -> None:
    """Refuse a hub id that is neither in the hub's cache nor on a hub that answers; a directory is accepted.

    Raises:
        ModelError: the hub cannot be reached, or has no such model for this user.
    """
    if is_folder(model) or any(os.environ.get(name, "0").lower() in ("1", "true") for name in _OTHER_HUBS):
        return
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    fix = "or give a directory with a config.json"
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{model}: not in the hub's cache, and HF_HUB_OFFLINE forbids fetching it; unset it, {fix}")
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=10)
    except EntryNotFoundError:  # The model has other files, which some engines accept.
        return
    except OfflineModeIsEnabled:
        raise ModelError(f"{model}: not in the hub's cache, and the hub's library is offline; {fix[3:]}") from None
    except RepositoryNotFoundError as error:  # A model behind a login is reported in the same way.
        reason = f"{constants.ENDPOINT} has no such model for this user ({type(error).__name__})"
        raise ModelError(f"{model}: {reason}; check the name, set HF_TOKEN, {fix}") from None
    except Exception as error:  # The transport's errors are those of the library that huggingface_hub uses.
        reason = shorten(str(error) or type(error).__name__, 120, placeholder=" ...")
        raise ModelError(
            f"{model}: not in the hub's cache, and cannot be had from {constants.ENDPOINT} ({reason}); check the "
            f"network and HTTPS_PROXY, {fix}"
        ) from None


def hub_folder(model: str) -> str:
    """Return the folder of a model of the hub, fetched if it is not in the hub's cache; a directory as it is.

    Raises:
        ModelError: see `check_hub`; or the download fails.
    """
    check_hub(model)
    if is_folder(model):
        return model
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, ignore_patterns=list(_OTHER_FORMATS)))
    except Exception as error:  # See `check_hub`.
        reason = shorten(str(error) or type(error).__name__, 160, placeholder=" ...")
        raise ModelError(f"{model}: cannot be fetched from the hub ({reason}); give a directory") from None
