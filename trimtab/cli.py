"""The `trimtab` command."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click
import grpc
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import trimtab
from trimtab.controller.document import PolicyError
from trimtab.controller.engine.model import Layout
from trimtab.controller.engine.policy import Policy
from trimtab.controller.loader import load_policy, read_text
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
    """Watch training runs step by step and act before a bad update is applied.

    \b
    Examples:
      trimtab demo                                   see it work, in minutes
      trimtab policy explain policies/default.yaml
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
    """Run the controller until Ctrl-C.

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
    """Train a small GPT that spikes, without trimtab and with it, and compare.

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
            "options": dict(entry.options),
            "evidence": list(entry.evidence),
            "layers": list(entry.layers),
            "close": list(entry.close),
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
        if row["layers"]:
            click.echo(f"    in {', '.join(row['layers'])}")
        for line in row["close"]:
            click.echo(f"    close: {line}")


@main.command()
@click.argument("run")
@click.option("--steps", default="", help="FIRST-LAST or one step; by default all that is kept.")
@address_option
@json_option
def samples(run: str, steps: str, address: str, *, as_json: bool) -> None:
    """Show what each rank told of steps: its loss, batches, time, memory.

    \b
    Examples:
      trimtab samples my-run --steps 248-252
      trimtab samples my-run --steps 250 --json
    """
    first, _, last = steps.partition("-")
    if steps and not (first.isdecimal() and (last or first).isdecimal()):
        _fail(f"--steps {steps} is none of FIRST-LAST or one step, such as 248-252", 2)
    request = pb.ListRankSamplesRequest(
        run=run,
        first_step=int(first or 0),
        last_step=int(last or first or (1 << 62)),
    )
    rows = [
        {
            "step": row.sample.step,
            "epoch": row.epoch,
            "rank": row.rank,
            "loss": row.sample.loss if row.sample.HasField("loss") else None,
            "step_time_s": row.sample.step_time_s,
            "memory_mib": row.sample.memory_bytes / 2**20,
            "nonfinite": row.sample.nonfinite,
            "dataset": row.sample.dataset,
            "batch_ids": list(row.sample.batch_ids),
        }
        for row in _call(address, "ListRankSamples", request).rows
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no rank told of such steps")
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console().print(table)


@main.group()
def policy() -> None:
    """Work with policy files."""


@policy.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def check(files: tuple[Path, ...], *, as_json: bool) -> None:
    """Say what is wrong with policy files, as file:line:column: message.

    \b
    Example:
      trimtab policy check policies/*.yaml
    """
    found: list[dict[str, Any]] = []
    for file in files:
        try:
            loaded = load_policy(file)
        except PolicyError as error:
            problems = [asdict(problem) for problem in error.problems]
            found.append({"file": str(file), "ok": False, "problems": problems})
            if not as_json:
                click.echo(str(error), err=True)
        else:
            found.append({"file": str(file), "ok": True, "problems": []})
            if not as_json:
                click.echo(f"{file}: ok, {len(loaded.rules)} rules, version {loaded.version}")
    if as_json:
        click.echo(json.dumps(found, indent=2))
    if not all(entry["ok"] for entry in found):
        raise SystemExit(BAD_INPUT)


@policy.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--signals",
    "measured",
    help="Signals that a job measures, such as loss,grad_norm: says which rules would be inactive.",
)
@click.option("--layer-signals", default="", help="The same for signals per layer group.")
@json_option
def explain(file: Path, measured: str | None, layer_signals: str, *, as_json: bool) -> None:
    """Say in plain words what each rule of a policy will do, and which signals it needs.

    \b
    Examples:
      trimtab policy explain policies/default.yaml
      trimtab policy explain policies/default.yaml --signals loss,lr
    """
    from trimtab.controller.authoring.explaining import explain as explained

    layout = None
    if measured is not None:
        layout = Layout(signals=_names(measured), layer_signals=_names(layer_signals))
    found = list(explained(_loaded(file), layout))
    if as_json:
        click.echo(json.dumps([asdict(told) for told in found], indent=2))
        return
    console = Console()
    for told in found:
        console.print(f"[bold]{told.rule}[/] ({told.mode})", highlight=False)
        console.print(Padding(Text(f"when {told.when}"), (0, 0, 0, 2)))
        for line in (*told.does, *told.limits, *told.notes):
            console.print(Padding(Text(f"- {line}"), (0, 0, 0, 4)))
        console.print(Padding(Text(f"- needs {', '.join(told.signals)}"), (0, 0, 1, 4)))


@policy.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def test(files: tuple[Path, ...], *, as_json: bool) -> None:
    """Run unit tests of policies: series in, the decisions that must follow out.

    \b
    Example:
      trimtab policy test policies/tests/*.yaml
    """
    from trimtab.controller.authoring.testing import run_suite

    results = []
    for file in files:
        try:
            for result in run_suite(file):
                results.append(result)
                if not as_json:
                    click.echo(f"{'ok  ' if result.passed else 'FAIL'} {file}: {result.name}")
                    for line in result.failures:
                        click.echo(f"       {line}")
        except PolicyError as error:
            _fail(str(error), BAD_INPUT)
    failed = sum(not result.passed for result in results)
    if as_json:
        click.echo(json.dumps([asdict(result) for result in results], indent=2))
    else:
        click.echo(f"{len(results) - failed} passed, {failed} failed")
    if failed:
        raise SystemExit(1)


@policy.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors.

    \b
    Examples:
      trimtab policy schema > policy.schema.json
      # then, as the first line of a policy:
      # yaml-language-server: $schema=policy.schema.json
    """
    from trimtab.controller.authoring import schema as of_policies

    click.echo(of_policies.text(), nl=False)


@policy.command()
@click.argument("file", type=click.Path(path_type=Path))
def docs(file: Path) -> None:
    """Print a page of Markdown about a policy.

    \b
    Example:
      trimtab policy docs policies/default.yaml > docs/policies/default.md
    """
    from trimtab.controller.authoring.describing import page

    click.echo(page(_loaded(file)), nl=False)


@policy.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--check", "only_check", is_flag=True, help="Change nothing; exit 1 if one would.")
def fmt(files: tuple[Path, ...], *, only_check: bool) -> None:
    """Put policy files into one layout; comments and wording stay.

    \b
    Examples:
      trimtab policy fmt policies/*.yaml
      trimtab policy fmt --check policies/*.yaml
    """
    from trimtab.controller.authoring.formatting import formatted

    changed = False
    for file in files:
        try:
            before = read_text(file)
            after = formatted(before, str(file))
        except PolicyError as error:
            _fail(str(error), BAD_INPUT)
        if after != before:
            changed = True
            click.echo(f"{file}: {'would change' if only_check else 'formatted'}")
            if not only_check:
                file.write_text(after)
    if changed and only_check:
        raise SystemExit(1)


def _loaded(file: Path) -> Policy:
    try:
        return load_policy(file)
    except PolicyError as error:
        _fail(str(error), BAD_INPUT)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


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
