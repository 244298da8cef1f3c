"""The command line: bad input ends with code 2 and a place, good input with what was asked for."""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from trimtab.cli import main
from trimtab.controller.engine.model import Action
from trimtab.controller.loader import load_policy

POLICIES = sorted(Path(__file__).parents[2].glob("policies/*.yaml"))


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_every_shipped_policy_is_right_and_says_what_it_is_for(path: Path) -> None:
    policy = load_policy(path)
    assert all(rule.summary.endswith(".") for rule in policy.rules)


def test_the_default_policy_acts_only_where_nobody_needs_to_be_asked() -> None:
    policy = load_policy(POLICIES[0].parent / "default.yaml")
    acting = {call.action for rule, _, call in policy.calls() if rule.acts}
    assert acting <= {Action.SKIP_BATCH, Action.CLIP_UPDATE, Action.SCALE_LR}


def test_check_says_ok_with_rules_and_version() -> None:
    result = CliRunner().invoke(main, ["policy", "check", str(POLICIES[0])])
    assert result.exit_code == 0
    assert "ok, " in result.output


def test_check_tells_the_problems_of_every_file_and_ends_with_2(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("version: 1\nrules:\n  - {name: a, when: lss > 3, do: alert}\n")
    result = CliRunner().invoke(
        main, ["policy", "check", str(first), str(second), str(POLICIES[0])]
    )
    assert result.exit_code == 2
    assert f"{first}:3:21: unknown signal 'lss' (did you mean loss?)" in result.output
    assert f"{second}: No such file or directory" in result.output
    assert f"{POLICIES[0]}: ok" in result.output


@pytest.mark.parametrize("text", ["", "- 1", "version: 1\nrules: [{name: a, when: 3, do: alert}]"])
def test_serve_refuses_a_bad_policy_before_it_starts_anything(tmp_path: Path, text: str) -> None:
    policy = tmp_path / "bad.yaml"
    policy.write_text(text)
    result = CliRunner().invoke(main, ["serve", "--policy", str(policy)])
    assert result.exit_code == 2
    assert result.output.startswith(f"{policy}:")
    missing = CliRunner().invoke(main, ["serve", "--policy", str(tmp_path / "none.yaml")])
    assert missing.exit_code == 2
    assert "none.yaml: No such file" in missing.output


@pytest.mark.parametrize("command", ["runs", "interventions"])
def test_a_controller_that_is_not_there_is_named(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--address", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.output == (
        "controller at 127.0.0.1:1: does not answer; is `trimtab serve` running there?\n"
    )


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["demo"], ["runs"], ["interventions"], ["policy", "check"]]
)
def test_help_explains_every_command(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert "\b" not in result.output


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(commands(main)), ids=" ".join)
def test_examples_of_the_help_stand_on_lines_of_their_own(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0
    assert "\\b" not in result.output
    for line in result.output.splitlines():
        if line.lstrip().startswith("Example"):
            assert line.strip() in ("Example:", "Examples:")
