"""``hybrid plan``, ready for typer. What it needs is imported when it runs, so that the command line starts at once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hybrid_backend.config import parse_size, resolve_config
from hybrid_backend.config.reading import is_file
from hybrid_backend.errors import ConfigError


def plan(
    model: Annotated[str, typer.Argument(help="catalog name, directory, config.json or hub id")],
    context: Annotated[str, typer.Option(help="tokens of a sequence, answer included: 8192, 128k, 1M")] = "8k",
    batch: Annotated[int, typer.Option(help="sequences at once, on all devices together")] = 1,
    gpu_mem: Annotated[str | None, typer.Option(help="memory of one device, as 24GiB; 0: no device")] = None,
    ram: Annotated[str | None, typer.Option(help="host memory that the server may take, as 128GiB")] = None,
    machine: Annotated[
        str | None, typer.Option(help="t4, a10, a40, l40s, rtx4090, a100, h100, h200, or a JSON profile")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="only this one (several times: these); default: all")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file, or {...}; default: by the model's name")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="one key, as budget_tokens=1024")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32")] = "auto",
    what_if: Annotated[list[str] | None, typer.Option(help="as cores=64, pcie=5, gpus=8, context=1M")] = None,
    engine_overhead: Annotated[str | None, typer.Option(help="of the device, beside weights, activations, KV")] = None,
    host_overhead: Annotated[str | None, typer.Option(help="of the host, beside KV")] = None,
    details: Annotated[bool, typer.Option("--details", help="memory by item, a step by its parts")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """What fits where: memory, largest batch and context, and expected speed of every method against stock."""
    from hybrid_backend.hardware import find_hardware
    from hybrid_backend.methods import resolve_method
    from hybrid_backend.tools.plan.model import find_shape
    from hybrid_backend.tools.plan.report import Request, changed, make_plan
    from hybrid_backend.tools.plan.simulate import parse_what_if
    from hybrid_backend.tools.plan.table import show

    hardware = None if machine is None else find_hardware(machine)
    different = parse_what_if(what_if) if what_if else None
    settings = resolve_config(_config_name(model), config, os.environ, overrides or ())[0]
    resolve_method(settings.method)
    request = Request(
        shape=find_shape(model, dtype),
        config=settings,
        context=tokens(context),
        batch=batch,
        gpu_mem=memory("--gpu-mem", gpu_mem),
        ram=memory("--ram", ram),
        hardware=hardware,
        methods=tuple(method or ()),
        device_overhead=memory("--engine-overhead", engine_overhead),
        host_overhead=memory("--host-overhead", host_overhead),
    )
    planned = make_plan(request)
    before = None
    if different is not None:
        before, planned = planned, make_plan(changed(request, different))
    if as_json:
        typer.echo(json.dumps({**planned.as_dict(), "before": before.as_dict() if before else None}, indent=1))
    else:
        show(planned, before, _serve(model, config, overrides or []), Console(), details)


def _serve(model: str, config: str | None, overrides: list[str]) -> list[str]:
    """What of this command line `hybrid serve` needs too."""
    served = str(Path(model).parent) if Path(model).name == "config.json" else model
    chosen = ["--config", config] if config else []
    return [served, *chosen, *(f"--set={override}" for override in overrides)]


def tokens(text: str) -> int:
    """``8192``, ``128k`` (x 1024) or ``1M``."""
    match = re.fullmatch(r"([0-9]{1,9})([kKmM]?)", text.strip())
    count = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()] if match else 0
    if count < 1:
        raise ConfigError(f"--context: got {text!r}, expected a number of tokens such as 8192, 128k or 1M")
    return count


def memory(flag: str, text: str | None) -> int | None:
    """Bytes; None stays None."""
    if text is None:
        return None
    if text.strip() == "0":
        return 0
    try:
        return parse_size(int(text) if text.strip().isdigit() else text)
    except ValueError as error:
        hint = str(error) or "write a size such as 24GiB"
        raise ConfigError(f"{flag}: got {text!r}, expected a size such as 24GiB; {hint}") from None


def _config_name(model: str) -> str:
    """What the shipped YAML files are matched with: a config.json stands for its folder."""
    file = Path(model)
    return str(file.parent.resolve()) if file.name == "config.json" and is_file(file) else model
