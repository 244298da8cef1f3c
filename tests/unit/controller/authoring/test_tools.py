"""explain, docs, fmt and schema."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from trimtab.controller.authoring import schema
from trimtab.controller.authoring.describing import page
from trimtab.controller.authoring.explaining import explain
from trimtab.controller.authoring.formatting import formatted
from trimtab.controller.document import PolicyError
from trimtab.controller.engine.model import Layout
from trimtab.controller.loader import load_policy, parse_policy

ROOT = Path(__file__).parents[4]
POLICIES = sorted((ROOT / "policies").glob("*.yaml"))

RULES = """\
version: 1
summary: For the test.
sources: [a paper]
signals: {reward: mean reward}
limits: {causes: {data: 3 per 100 steps}}
rules:
  - name: deep
    when: any_layer(update_norm > 2 * median(update_norm, 64)) and reward > 0
    for: 2 steps
    do: skip_batch
    layers: ['blocks.*']
    labels: {cause: data}
    hold_off: {batch_size: 9 steps}
    ladder: [{scale_lr: {by: 0.5}}]
    summary: Deep layers move.
  - name: seen
    when: ratio_dip > 0.1
    do: {reset_moments: {layers: matched}}
    mode: observe
"""


def test_explain_says_what_a_rule_does_when_and_what_it_needs() -> None:
    deep, seen = explain(parse_policy(RULES, "p.yaml"))
    assert deep.when.endswith("and reward > 0, 2 steps in a row")
    assert deep.does == (
        "skip_batch, at most 16 per 1000 steps",
        "if that does not help: scale_lr (by: 0.5), at most 1 per 1000 steps",
        "if that does not help either: an alert, and no more of this rule (structural)",
    )
    assert deep.signals == ("reward", "update_norm per layer group")
    assert "silent for 9 steps after batch_size" in deep.limits
    assert "counts against the limit of cause data, 3 per 100 steps" in deep.limits
    assert "looks at the layer groups blocks.*" in deep.limits
    assert any(note.startswith("armed: ") for note in deep.notes)
    assert any("acts a step later on reward (user-defined)" in note for note in deep.notes)
    assert any("on ratio_dip (known only after the step)" in note for note in seen.notes)
    assert any(note.startswith("only observes") for note in seen.notes)


def test_explain_says_which_rules_a_job_makes_inactive() -> None:
    policy = parse_policy(RULES, "p.yaml")
    deep, seen = explain(policy, Layout(signals=("ratio_dip", "update_norm")))
    assert deep.notes[-1] == (
        "INACTIVE: the job does not measure reward, update_norm per layer group"
    )
    assert not any("INACTIVE" in note for note in seen.notes)


def test_a_page_tells_summary_sources_rules_and_actions() -> None:
    text = page(parse_policy(RULES, "some/where/p.yaml"))
    assert text.startswith("# p.yaml\n\nFor the test.\n\nSources:\n\n- a paper\n")
    assert "| [deep](#deep) | act | skip_batch | Deep layers move. |" in text
    assert "- `reset_moments` sets Adam's moments" in text


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_the_pages_of_shipped_policies_are_fresh(path: Path) -> None:
    committed = ROOT / "docs" / "policies" / f"{path.stem}.md"
    assert committed.read_text() == page(load_policy(path)), "make policy-docs renews them"


def test_fmt_lays_out_and_keeps_comments_and_meaning() -> None:
    text = RULES.replace("rules:\n", "rules:   # why\n\n\n").replace(
        "    do: skip", "    do:    skip"
    )
    laid_out = formatted(text, "p.yaml")
    assert "rules: # why\n  - name: deep\n" in laid_out.replace("   # why", " # why")
    assert "    do: skip_batch\n" in laid_out
    assert "\n\n  - name: seen\n" in laid_out
    assert formatted(laid_out, "p.yaml") == laid_out


def test_fmt_refuses_what_is_no_policy() -> None:
    with pytest.raises(PolicyError, match="unknown signal"):
        formatted(RULES.replace("reward > 0", "rewrd > 0"), "p.yaml")


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_shipped_policies_are_in_the_one_layout(path: Path) -> None:
    assert formatted(path.read_text(), str(path)) == path.read_text()


def test_the_committed_schema_is_fresh() -> None:
    committed = (ROOT / "policies" / "policy.schema.json").read_text()
    assert committed == schema.text(), "make policy-docs renews it"


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_the_schema_takes_what_the_loader_takes(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), schema.json_schema())
    jsonschema.validate(yaml.safe_load(RULES), schema.json_schema())


@pytest.mark.parametrize(
    "change",
    [
        ("do: skip_batch", "do: skip_bach"),
        ("limit", "limmit"),
        ("for: 2 steps", "for: 2 stops"),
        ("mode: observe", "mode: watch"),
        ("{by: 0.5}", "{bye: 0.5}"),
        ("{by: 0.5}", "{}"),
        ("batch_size: 9", "batchsize: 9"),
        ("version: 1", "version: 2"),
        ("layers: matched", "layers: some"),
        ("name: seen", "name: Not Kebab"),
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(change: tuple[str, str]) -> None:
    wrong = RULES.replace(*change)
    assert wrong != RULES
    with pytest.raises(PolicyError):
        parse_policy(wrong, "p.yaml")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(wrong), schema.json_schema())


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft7Validator.check_schema(json.loads(schema.text()))
