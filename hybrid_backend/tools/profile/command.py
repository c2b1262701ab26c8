"""The command ``hybrid profile``. What it needs is imported when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hybrid_backend.config import resolve_config
from hybrid_backend.errors import ConfigError


def profile(
    model: Annotated[str | None, typer.Argument(help="catalog name, directory or hub id of the model")] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="twice the windows and lookups, and gates; several times as long")
    ] = False,
    hardware: Annotated[bool, typer.Option("--hardware", help="profile this machine instead of a model")] = False,
    out: Annotated[Path | None, typer.Option(help="MODEL.yaml, or hardware.json")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="text file to profile on; default: Python's reference and source")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(help="tokens of a window; default 4096")] = None,
    positions: Annotated[int, typer.Option(help="decode steps of a window")] = 128,
    windows: Annotated[
        int | None, typer.Option(help="windows per text and context; default 1, with --thorough 2", show_default=False)
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="of the heads file's prefetch_bytes: name or hardware JSON")
    ] = None,
    tau: Annotated[float, typer.Option(help="largest share of a layer's attended tokens for the CPU")] = 0.12,
    margin: Annotated[float, typer.Option(help="share below tau at which intervals are chosen")] = 0.1,
    batch: Annotated[int, typer.Option(help="sequences at once, for --machine")] = 1,
    min_cosine: Annotated[float, typer.Option(help="of predicted queries; below, a layer's own selects")] = 0.9,
    max_kl: Annotated[
        float,
        typer.Option(help="nats per token that all sparse layers may cost together; quality.max_kl goes before it"),
    ] = 0.05,
    lookups: Annotated[
        int | None,
        typer.Option(
            help="prompts in which entries are looked up, for --max-kl; default 1, with --thorough 2",
            show_default=False,
        ),
    ] = None,
    spread: Annotated[bool, typer.Option(help="budgets per layer, by KL; with lookups")] = True,
    gates: Annotated[
        bool | None,
        typer.Option("--gates/--no-gates", help="importance of heads, by training; default: with --thorough"),
    ] = None,
    gate_steps: Annotated[int, typer.Option(help="training steps per kind of head")] = 20,
    gate_context: Annotated[int, typer.Option(help="tokens of a training prompt")] = 512,
    config: Annotated[
        str | None, typer.Option(help="YAML file, or {...}, to start from; default: by the model's name")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="one key, as budget_tokens=1024")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="measure again what OUT's JSON holds")] = False,
    device: Annotated[str, typer.Option(help="where the model runs: cpu or cuda; hardware: auto")] = "auto",
) -> None:
    """Measure MODEL and write its YAML: exact layers, budgets per layer, recall intervals, and the importance of heads.

    A run of a small model takes minutes, with --thorough several times as long. Ctrl-C loses little: the same command
    goes on from there.
    """
    if hardware:
        from hybrid_backend.tools.plan.hardware.measure import profile_hardware

        profile_hardware(out or Path("hardware.json"), device=device)
        return
    if not model:
        raise ConfigError("hybrid profile: name a model, or write --hardware to profile this machine")
    from hybrid_backend.tools.hub import check_model

    if batch < 1:
        raise ConfigError(f"--batch: got {batch}, expected an integer >= 1")
    settings = resolve_config(model, config, os.environ, overrides or ())[0]
    check_model(model)
    console = Console()
    name = Path(model.rstrip("/")).name
    # Imports and the model's loading take their time, so the first line comes before them.
    first = f"measuring attention and KL of each layer of {name}; a forward pass is timed first, for the estimate"
    console.print(first, highlight=False, markup=False, soft_wrap=True)
    # Torch reads this variable when it is imported, which is below. Threads that wait by spinning would take the core
    # from those that compute if another program runs at the same time (docs/lab/profile.md#beside-other-programs).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from hybrid_backend.tools.profile.gates import GateOptions
    from hybrid_backend.tools.profile.options import Options
    from hybrid_backend.tools.profile.profiler import profile

    contexts, repeats = tuple(context or (4096,)), 2 if thorough else 1
    prefetch_bytes = 0
    if machine is not None:
        from hybrid_backend.hardware import find_hardware
        from hybrid_backend.tools.plan.model import find_shape
        from hybrid_backend.tools.profile.gates import prefetch_bytes_of

        spec, shape = find_hardware(machine), find_shape(model, "auto")
        prefetch_bytes = prefetch_bytes_of(spec, shape, settings, max(contexts), batch)
    options = Options(
        contexts=contexts,
        positions=positions,
        windows=repeats if windows is None else windows,
        lookups=repeats if lookups is None else lookups,
        spread=spread,
        texts=tuple(map(str, text or ())),
        min_cosine=min_cosine,
        max_kl=max_kl,
        gates=GateOptions(steps=gate_steps, context=gate_context) if (thorough if gates is None else gates) else None,
        tau=tau,
        prefetch_bytes=prefetch_bytes,
        margin=margin,
        fresh=fresh,
        device="cpu" if device == "auto" else device,
    )
    target = out or Path(f"{name}.yaml")
    try:
        profile(model, target, settings, options, console)
    except KeyboardInterrupt:
        again = "the same command without --fresh" if fresh else "the same command"
        stored = target.with_suffix(".json")
        more = f"; {stored} holds what was measured" if stored.exists() else ""
        typer.echo(f"\nstopped; {again} goes on from here{more}", err=True)
        raise typer.Exit(130) from None
