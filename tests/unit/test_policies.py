"""The shipped policies do what their tests in policies/tests say."""

from pathlib import Path

import pytest

from trimtab.controller.authoring.testing import run_suite
from trimtab.controller.engine.model import Action, Mode
from trimtab.controller.loader import load_policy

FOLDER = Path(__file__).parents[2] / "policies"
POLICIES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_shipped_policy_passes_its_tests(path: Path) -> None:
    results = list(run_suite(FOLDER / "tests" / path.name))
    assert [f"{r.name}: {line}" for r in results for line in r.failures] == []


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_every_rule_of_a_shipped_policy_decides_in_a_test(path: Path) -> None:
    tested = (FOLDER / "tests" / path.name).read_text()
    for rule in load_policy(path).rules:
        assert f"rule: {rule.name}" in tested


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_shipped_policy_names_its_sources(path: Path) -> None:
    policy = load_policy(path)
    assert policy.summary
    assert policy.sources
    assert all(rule.summary for rule in policy.rules)


def test_the_default_policy_arms_nothing_that_needs_a_person() -> None:
    armed = {c.action for r, _, c in load_policy(FOLDER / "default.yaml").calls() if r.acts}
    assert armed == {Action.SKIP_BATCH, Action.CLIP_UPDATE, Action.SCALE_LR}


def test_observe_only_acts_nowhere() -> None:
    policy = load_policy(FOLDER / "observe-only.yaml")
    assert {rule.mode for rule in policy.rules} == {Mode.OBSERVE}
