"""Typer command `hybrid plan`. Imports are inside the function, so that the command line starts without torch."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from rich.console import Console

from hybrid_backend.config import resolve_config
from hybrid_backend.config.reading import is_file
from hybrid_backend.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_backend.hardware import Hardware
    from hybrid_backend.model import ModelShape
    from hybrid_backend.tools.plan.report import RamSource, Request

_MOST_GIB = 4096
_DEFAULT_CONTEXT = 2**15
_BYTES = TypeAdapter(Annotated[ByteSize, Field(ge=0, lt=2**63)])


def plan(
    model: Annotated[str, typer.Argument(help="catalog name, directory, config.json or hub id")],
    context: Annotated[
        str | None,
        typer.Option(
            help="tokens of a sequence, answer included: 8192, 128k, 1M; default: 32k, or the model's longest"
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="sequences at once, on all devices together; default: 1, with --traffic as many as fit",
            show_default=False,
        ),
    ] = None,
    gpu_mem: Annotated[
        str | None, typer.Option(help="memory of one device, as 24GiB or 24; 0: no device; default: the machine's")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="host memory that the server may take, as 128GiB; default: the machine's")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="GPU: t4, a10, a40, l40s, rtx4090, a100, h100, h200; CPU: ryzen-7950x, epyc-7313, epyc-9354, "
            "xeon-6426y, xeon-8480; or a JSON profile; default: this machine"
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="only this one (several times: these); default: those that serve there")
    ] = None,
    all_methods: Annotated[bool, typer.Option("--all-methods", help="on a CPU those for tests too")] = False,
    config: Annotated[str | None, typer.Option(help="YAML file, or {...}; default: by the model's name")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="one key, as budget_tokens=1024")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32")] = "auto",
    cores: Annotated[int | None, typer.Option(min=1, help="of the host of --machine; default: all of them")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="of --machine, a replica on each; default: the machine's")
    ] = None,
    engine_overhead: Annotated[str | None, typer.Option(help="of the device, beside weights, activations, KV")] = None,
    host_overhead: Annotated[str | None, typer.Option(help="of the host, beside KV")] = None,
    traffic: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPT:ANSWER",
            help="simulate requests of these lengths that come and go, as 32k:200, on stock and on the method",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="of --traffic: requests/s on all devices; default: the greatest within the SLO"),
    ] = None,
    slo_ttft: Annotated[float, typer.Option(help="of --traffic: longest TTFT, in times stock's without load")] = 1.5,
    slo_tpot: Annotated[float, typer.Option(help="of --traffic: longest TPOT, in milliseconds")] = 50.0,
    seed: Annotated[int, typer.Option(help="of --traffic: seed of the arrivals")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, with every item of memory and of a step")] = False,
) -> None:
    """Plan memory, largest batch and context, and expected speed of every method against stock."""
    from hybrid_backend.hardware import find_hardware
    from hybrid_backend.methods import check_method_name
    from hybrid_backend.tools.counts import counted
    from hybrid_backend.tools.plan.local import LocalMachine
    from hybrid_backend.tools.plan.model import find_shape, served_name
    from hybrid_backend.tools.plan.report import Request, make_plan
    from hybrid_backend.tools.plan.table import show

    check_lengths(traffic, rate, context)
    device_bytes, host_bytes = memory("--gpu-mem", gpu_mem), memory("--ram", ram)
    hardware, machine_name = None, None
    ram_source: RamSource = "asked" if host_bytes is not None else "free" if machine is None else "machine"
    if machine is not None:
        hardware = find_hardware(machine)
        host_bytes = int(hardware.host_ram_bytes.value) if host_bytes is None else host_bytes
    elif device_bytes is None or host_bytes is None:
        local = LocalMachine.probe()
        if device_bytes is None:
            hardware, machine_name, device_bytes = local.hardware, local.name, local.gpu_bytes
        host_bytes = local.host_bytes if host_bytes is None else host_bytes
    check_devices(hardware, machine, device_bytes, cores, gpus)
    if hardware is not None and (cores is not None or gpus is not None):
        changes = [counted(count, noun) for count, noun in ((cores, "core"), (gpus, "device")) if count]
        name = ", ".join([hardware.name, *changes])
        hardware = hardware.with_cores(cores or hardware.cores).replace(gpus=gpus or hardware.gpus, name=name)
    named = served_name(model)
    settings = resolve_config(_config_name(named), config, os.environ, overrides or ())[0]
    check_method_name(settings.method)
    shape = find_shape(model, dtype, host_bytes if _emulates_bf16(hardware, device_bytes) else None)
    if shape.name != model and not model.endswith(".json"):
        typer.echo(f"{model}: its config.json is not here; planned as {shape.name}, its kin", err=True)
    request = Request(
        shape=shape,
        config=settings,
        context=_default_context(shape) if context is None else tokens(context),
        batch=1 if batch is None else batch,
        gpu_mem=device_bytes,
        ram=host_bytes,
        hardware=hardware,
        machine=machine_name,
        methods=tuple(method or ()),
        all_methods=all_methods,
        device_overhead=memory("--engine-overhead", engine_overhead),
        host_overhead=memory("--host-overhead", host_overhead),
        ram_source=ram_source,
    )
    if traffic is not None:
        _show_traffic(request, traffic, rate, batch, (slo_ttft, slo_tpot), seed, as_json)
        return
    planned = make_plan(request)
    if as_json:
        typer.echo(json.dumps(asdict(planned), indent=1))
    else:
        show(planned, _serve(named, config, overrides or []), Console())
        if not any(row.max_batch for row in planned.rows):
            raise typer.Exit(1)


def _emulates_bf16(hardware: Hardware | None, device_bytes: int | None) -> bool:
    """Tell whether a CPU that emulates bf16 is planned: the named one, or this machine's if no rates are known."""
    from hybrid_backend.engines.cpu_defaults import has_bf16

    return hardware.emulates_bf16 if hardware is not None else device_bytes == 0 and not has_bf16()


def check_lengths(traffic: str | None, rate: float | None, context: str | None) -> None:
    """Refuse a rate of requests without their lengths, and a context beside their lengths.

    Raises:
        ConfigError: ``--rate`` without ``--traffic``, or ``--context`` with it.
    """
    if traffic is None and rate is not None:
        raise ConfigError(f"--rate: got {rate:g} without --traffic; add --traffic with lengths, such as 32k:200")
    if traffic is not None and context is not None:
        raise ConfigError(f"--context: got {context} beside --traffic {traffic}, which has the lengths; leave it out")


def _show_traffic(
    request: Request,
    lengths: str,
    rate: float | None,
    batch: int | None,
    slo: tuple[float, float],
    seed: int,
    as_json: bool,
) -> None:
    """Simulate the traffic of ``--traffic`` and print it. ``slo`` is ``--slo-ttft`` and ``--slo-tpot``."""
    from hybrid_backend.tools.plan.traffic.report import simulate_traffic
    from hybrid_backend.tools.plan.traffic.table import show_traffic
    from hybrid_backend.tools.plan.traffic.workload import Slo, Workload

    workload, (ttft_times, tpot_ms) = Workload.parse(lengths, tokens, seed), slo
    simulated = simulate_traffic(request, workload, Slo(ttft_times, tpot_ms / 1e3), rate=rate, max_requests=batch)
    if as_json:
        typer.echo(json.dumps(asdict(simulated), indent=1))
    else:
        show_traffic(simulated, Console())
        if not (simulated.stock.holds or simulated.hybrid.holds):
            raise typer.Exit(1)


def check_devices(
    hardware: Hardware | None, machine: str | None, gpu_mem: int | None, cores: int | None, gpus: int | None
) -> None:
    """Refuse options that contradict each other.

    Args:
        hardware: rates of the machine; None if they are not known.
        machine: what ``--machine`` names.
        gpu_mem: bytes of ``--gpu-mem``.
        cores: ``--cores``.
        gpus: ``--gpus``.

    Raises:
        ConfigError: GPU memory beside a CPU server or none beside a GPU, or a count without a machine that has such.
    """
    from hybrid_backend.hardware import machine_choices

    is_cpu = gpu_mem == 0 if hardware is None else hardware.device == "cpu"
    if machine is not None and gpu_mem is not None and is_cpu != (gpu_mem == 0):
        if is_cpu:
            fix = f"leave --gpu-mem out, or name a machine with a GPU: {machine_choices('gpu')}"
            raise ConfigError(f"--gpu-mem: --machine {machine} is a CPU server, which has no GPU memory; {fix}")
        fix = f"name a CPU server: {machine_choices('cpu')}"
        raise ConfigError(f"--gpu-mem 0: --machine {machine} has a GPU, whose rates are not those of its CPU; {fix}")
    if gpus is not None and is_cpu:
        fix = "leave --gpus out, or name a machine with a GPU"
        raise ConfigError(f"--gpus {gpus}: a CPU server without a GPU is planned; {fix}: {machine_choices('gpu')}")
    if hardware is None and (cores is not None or gpus is not None):
        flag = "--gpus" if cores is None else "--cores"
        reason = "counts are for speeds, and the rates of this machine are not known"
        choices = machine_choices("cpu" if is_cpu else "gpu")
        raise ConfigError(f"{flag}: {reason}; add --machine with {choices}, or leave {flag} out to plan memory alone")


def _serve(model: str, config: str | None, overrides: list[str]) -> list[str]:
    """Return the words of this command line that `hybrid serve` needs too."""
    directory = str(Path(model).parent) if Path(model).name == "config.json" else model
    option = ["--config", config] if config else []
    return [directory, *option, *(f"--set={override}" for override in overrides)]


def _default_context(shape: ModelShape) -> int:
    """Return the tokens of a sequence that are planned where none are given: 32k, if the model was made for as many."""
    return min(_DEFAULT_CONTEXT, shape.max_context or _DEFAULT_CONTEXT)


def tokens(text: str) -> int:
    """Read a number of tokens: ``8192``, ``128k`` (x 1024) or ``1M``."""
    match = re.fullmatch(r"([0-9]{1,9})([kKmM]?)", text.strip())
    count = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()] if match else 0
    if count < 1:
        raise ConfigError(f"--context: got {text!r}, expected a number of tokens such as 8192, 128k or 1M")
    return count


def memory(flag: str, text: str | None) -> int | None:
    """Read a size for ``flag`` and return its bytes; None stays None.

    Units are binary (GiB) or decimal (GB). A number without a unit means GiB up to 4096, and bytes from 2**20 on.

    Raises:
        ConfigError: no size, a negative size, or a number without a unit between 4096 and 2**20.
    """
    if text is None:
        return None
    bare = re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip())
    if bare and _MOST_GIB < float(bare[0]) < 2**20:
        raise ConfigError(f"{flag}: got {text!r}, which is neither GiB nor bytes; write a unit, as {text.strip()}GiB")
    try:
        return _BYTES.validate_python(f"{text}GiB" if bare and float(bare[0]) <= _MOST_GIB else text)
    except ValidationError:
        raise ConfigError(f"{flag}: got {text!r}, expected a size such as 24GiB, 24GB or 24 (GiB)") from None


def _config_name(model: str) -> str:
    """Return the name by which a shipped YAML file is found; that of a config.json is its folder's."""
    file = Path(model)
    return str(file.parent.resolve()) if file.name == "config.json" and is_file(file) else model
