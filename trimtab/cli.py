"""The `trimtab` command."""

import json
import logging
from pathlib import Path
from typing import Any, NoReturn

import click
import grpc
from rich.console import Console
from rich.table import Table

import trimtab
from trimtab.controller.document import PolicyError
from trimtab.controller.loader import load_policy
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import trimtab_pb2_grpc as rpc

BAD_INPUT = 2
CALL_TIMEOUT_S = 5.0

address_option = click.option(
    "--address",
    envvar="TRIMTAB_ADDRESS",
    default="127.0.0.1:7461",
    show_default=True,
    help="The controller's host:port (TRIMTAB_ADDRESS).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def _fail(message: str, code: int) -> NoReturn:
    click.echo(message, err=True)
    raise SystemExit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(trimtab.__version__, prog_name="trimtab")
def main() -> None:
    r"""Watch training runs step by step and act before a bad update is applied.

    \b
    Examples:
      trimtab demo                                   see it work, in minutes
      trimtab policy check policies/default.yaml
      trimtab serve --policy policies/default.yaml
      trimtab runs
      trimtab interventions --run my-run
    """


@main.command()
@click.option("--policy", "policy", required=True, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind to.")
@click.option("--port", default=7461, show_default=True, help="For agents and people; 0: any.")
@click.option("--metrics-port", default=9461, show_default=True, help="For /metrics; 0: any.")
@click.option(
    "--store",
    default="trimtab.db",
    show_default=True,
    help="The journal: a SQLite file, or a SQLAlchemy URL such as postgresql://...",
)
@click.option("--ray-address", default="local", show_default=True, help="A Ray cluster to join.")
@click.option("--ready-file", type=click.Path(path_type=Path), help="Written when it is up.")
def serve(policy: Path, store: str, **options: Any) -> None:
    r"""Run the controller until Ctrl-C.

    \b
    Example:
      trimtab serve --policy policies/default.yaml
      TRIMTAB_ADDRESS=127.0.0.1:7461 TRIMTAB_RUN=my-run torchrun train.py
    """
    from trimtab.controller.daemon import ServeConfig, serve  # Ray takes a second to import

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    url = store if "://" in store else f"sqlite:///{Path(store).absolute()}"
    try:
        serve(
            ServeConfig(policy=policy, store=url, **options),
            lambda address, metrics: click.echo(
                f"trimtab controller at {address} (TRIMTAB_ADDRESS), metrics at {metrics}"
            ),
        )
    except PolicyError as error:
        _fail(str(error), BAD_INPUT)
    except OSError as error:
        _fail(f"trimtab serve: {error}", 1)


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="trimtab-demo",
    show_default=True,
    help="Folder for records, logs, journal and picture.",
)
@click.option(
    "--cause",
    "causes",
    multiple=True,
    type=click.Choice(["B", "D", "E"], case_sensitive=False),
    default=["E", "D"],
    show_default=True,
    help="B: eight foreign batches, D: an LR jump, E: one foreign batch.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--steps", default=300, show_default=True, type=click.IntRange(min=270))
@click.option("--hold", is_flag=True, help="Keep the controller and /metrics up until Ctrl-C.")
@json_option
def demo(out: Path, causes: tuple[str, ...], **options: Any) -> None:
    r"""Train a small GPT that spikes, without trimtab and with it, and compare.

    \b
    Examples:
      trimtab demo
      trimtab demo --cause B --seed 3 --out /tmp/b3
    """
    try:
        from trimtab.demo.run import DemoError, run_demo
    except ImportError as error:
        _fail(f"trimtab demo needs {error.name}: pip install 'trimtab[demo]'", 1)
    try:
        raise SystemExit(run_demo(out, causes, **options))
    except DemoError as error:
        _fail(f"trimtab demo: {error}", 1)
    except KeyboardInterrupt:
        _fail("trimtab demo: stopped", 130)


@main.command()
@address_option
@json_option
def runs(address: str, *, as_json: bool) -> None:
    """List the runs that the controller knows."""
    found = _call(address, "ListRuns", pb.ListRunsRequest()).runs
    rows = [
        {
            "run": run.run,
            "epoch": run.epoch,
            "step": run.step,
            "loss": run.values.get("loss"),
            "grad_norm": run.values.get("grad_norm"),
            "update_norm": run.values.get("update_norm"),
            "interventions": run.interventions,
            "connected": run.connected,
        }
        for run in found
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no run has registered yet")
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console().print(table)


@main.command()
@click.option("--run", default="", help="Only of this run.")
@address_option
@json_option
def interventions(run: str, address: str, *, as_json: bool) -> None:
    """List what was done to the runs, why, and how it ended."""
    found = _call(address, "ListInterventions", pb.ListInterventionsRequest(run=run)).interventions
    rows = [
        {
            "run": entry.run,
            "id": entry.id,
            "epoch": entry.epoch,
            "step": entry.step,
            "rule": entry.rule,
            "action": entry.action,
            "arguments": dict(entry.arguments),
            "outcome": entry.outcome,
            "detail": entry.detail,
            "evidence": list(entry.evidence),
        }
        for entry in found
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no interventions")
    for row in rows:
        outcome = " ".join([row["outcome"], f"({row['detail']})" if row["detail"] else ""])
        click.echo(f"{row['run']}  step {row['step']}  {row['rule']}: {row['action']}, {outcome}")
        for line in row["evidence"]:
            click.echo(f"    {line}")


@main.group()
def policy() -> None:
    """Work with policy files."""


@policy.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def check(files: tuple[Path, ...]) -> None:
    r"""Say what is wrong with policy files, as file:line:column: message.

    \b
    Example:
      trimtab policy check policies/*.yaml
    """
    failed = False
    for file in files:
        try:
            loaded = load_policy(file)
        except PolicyError as error:
            click.echo(str(error), err=True)
            failed = True
        else:
            click.echo(f"{file}: ok, {len(loaded.rules)} rules, version {loaded.version}")
    if failed:
        raise SystemExit(BAD_INPUT)


def _call(address: str, method: str, request: Any) -> Any:
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            return getattr(rpc.GatewayStub(channel), method)(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                details = "does not answer; is `trimtab serve` running there?"
            _fail(f"controller at {address}: {details}", 1)


def _text(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
    return str(value)
