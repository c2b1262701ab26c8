"""What a vLLM user is told whose mapping takes the place of the model's shipped file."""

from __future__ import annotations

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm.settings import unread_file


def test_a_mapping_that_replaces_the_models_file_says_so() -> None:
    line = unread_file("smollm2-135m-instruct", {"budget_tokens": 4096})
    assert line == (
        "hybrid backend: additional_config['hybrid'] is the whole configuration: configs/smollm2-135m.yaml, which fits "
        "smollm2-135m-instruct, is not read, and keys that are left out have their defaults"
    )


def test_the_file_for_all_other_models_is_replaced_too() -> None:
    """Without it there are no exact layers, which default.yaml has."""
    assert "configs/default.yaml, which fits my-own-model, is not read" in unread_file("my-own-model", {"sinks": 2})


def test_nothing_is_said_of_a_resolved_configuration() -> None:
    """`hybrid serve` hands a mapping with all keys to the engine, whose processes read it again."""
    assert unread_file("smollm2-135m-instruct", HybridConfig().model_dump(mode="json")) == ""
