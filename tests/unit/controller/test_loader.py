"""Policy files: what is read, and how errors point at what is wrong."""

from pathlib import Path

import pytest

from trimtab.controller.document import PolicyError
from trimtab.controller.engine.expression import Constant
from trimtab.controller.engine.model import Action, Mode
from trimtab.controller.engine.policy import Limit
from trimtab.controller.loader import load_policy, parse_policy

RULE = """version: 1
rules:
  - name: loud
    when: loss > 3
    do: skip_batch
"""


def problems(text: str) -> list[str]:
    with pytest.raises(PolicyError) as error:
        parse_policy(text, "p.yaml")
    return str(error.value).splitlines()


def test_a_rule_takes_the_defaults_and_its_own_values() -> None:
    policy = parse_policy(
        RULE.replace("rules:", "defaults: {after: 7 steps, cooldown: 3}\nexpires: 9\nrules:")
        + "    cooldown: 1 step\n    for: '2 steps'\n    limit: 2 per 50 steps\n"
        + "    mode: observe\n",
        "p.yaml",
    )
    [rule] = policy.rules
    assert (rule.after_steps, rule.cooldown_steps, rule.for_steps) == (7, 1, 2)
    assert rule.limit == Limit(count=2, window_steps=50)
    assert rule.mode is Mode.OBSERVE
    assert policy.expires_steps == 9


def test_actions_come_as_a_name_a_mapping_or_a_list() -> None:
    for do in ("alert", "{alert: {}}", "[alert]", "[{alert: }]"):
        [rule] = parse_policy(RULE.replace("skip_batch", do), "p.yaml").rules
        assert [call.action for call in rule.do] == [Action.ALERT]


def test_arguments_are_numbers_or_expressions() -> None:
    text = RULE.replace("skip_batch", "{scale_lr: {by: 5e-1, over: 20 steps}}")
    [call] = parse_policy(text, "p.yaml").rules[0].do
    assert call.arguments == {"by": Constant(0.5), "over": Constant(20.0)}


def test_the_version_is_that_of_the_text() -> None:
    first, same, other = (parse_policy(t, "p").version for t in (RULE, RULE, RULE + "# x\n"))
    assert first == same != other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("loss > 3", "lss > 3"), "p.yaml:4:11: unknown signal 'lss' (did you mean loss?)"),
        (("loss > 3", '"1 < lss"'), "p.yaml:4:16: unknown signal 'lss' (did you mean loss?)"),
        (("loss > 3", "|\n      lss > 3"), "p.yaml:5:11: unknown signal 'lss'"),
        (("loss > 3", "loss >"), "p.yaml:4:17: not an expression"),
        (("loss > 3", "[1]"), "p.yaml:4:11: needs a condition, such as loss > 3"),
        (("loss > 3", "on"), "p.yaml:4:11: needs a condition, such as loss > 3"),
        (("    do", "    doo"), "p.yaml:5:5: unknown key 'doo' (did you mean do?)"),
        (("    do: skip_batch\n", ""), "p.yaml:3:5: key 'do' is missing"),
        (("skip_batch", "skip_bach"), "p.yaml:5:9: unknown action 'skip_bach' (did you mean skip_"),
        (("skip_batch", "clip_update"), "p.yaml:5:9: action 'clip_update' is not in this version"),
        (("skip_batch", "[alert, alert]"), "p.yaml:5:17: action 'alert' stands twice"),
        (
            ("skip_batch", "{alert: {to: 1}}"),
            "p.yaml:5:18: unknown argument 'to' (alert takes none",
        ),
        (("skip_batch", "{alert: 3}"), "p.yaml:5:17: alert takes a mapping of: nothing"),
        (("skip_batch", "scale_lr"), "p.yaml:5:9: scale_lr needs `by`, a factor in (0, 1]"),
        (("skip_batch", "{scale_lr: {by: 2}}"), "p.yaml:5:25: the factor must be in (0, 1], not 2"),
        (("skip_batch", "{scale_lr: {by: lss}}"), "p.yaml:5:25: unknown signal 'lss'"),
        (("skip_batch", "{rollback: {skip: 1.5}}"), "p.yaml:5:27: 1.5 is no number of batches"),
        (("skip_batch", "3"), "p.yaml:5:9: needs actions; there are: skip_batch, scale_lr"),
        (("name: loud", "name: Loud Rule"), "p.yaml:3:11: a name is kebab-case"),
        (("name: loud", "name: reflex"), "p.yaml:3:11: name 'reflex' is built in"),
        (
            ("rules:", "rules:\n  - {name: loud, when: lr > 3, do: alert}"),
            "p.yaml:4:11: name 'loud' stands twice",
        ),
        (("name: loud", "name: 3"), "p.yaml:3:11: input should be a valid string"),
        (("version: 1", "version: 2"), "p.yaml:1:10: input should be 1"),
        (("version: 1\n", ""), "p.yaml:1:1: key 'version' is missing"),
        (("rules:", "rulez:"), "p.yaml:2:1: unknown key 'rulez' (did you mean rules?)"),
        (("rules:", "expires: x\nrules:"), "p.yaml:2:10: 'x' is no number of steps"),
        (
            ("rules:", "defaults: {aftr: 1}\nrules:"),
            "p.yaml:2:12: unknown key 'aftr' (did you mean",
        ),
        (("skip_batch", "skip_batch\n    mode: of"), "p.yaml:6:11: mode must be observe or act"),
        (("skip_batch", "skip_batch\n    mode: off"), "p.yaml:6:11: mode must be observe or act"),
        (("skip_batch", "skip_batch\n    mode: approve"), "p.yaml:6:11: mode 'approve' is not in"),
        (("skip_batch", "skip_batch\n    for: 0"), "p.yaml:6:10: 0 is no number of steps"),
        (
            ("skip_batch", "skip_batch\n    for: 10:30"),
            "p.yaml:6:10: 10:30 is 630 to YAML; write a plain number",
        ),
        (("skip_batch", "skip_batch\n    limit: 3"), "p.yaml:6:12: 3 is no limit, such as `8 per"),
        (("skip_batch", "skip_batch\n    ladder: []"), "p.yaml:6:5: key 'ladder' is not in this"),
        (("skip_batch", "skip_batch\n    do: alert"), "p.yaml:6:5: key 'do' stands twice"),
        (("skip_batch", "skip_batch\n    when : x: y"), "p.yaml:6:13: not YAML: mapping values"),
        (("version: 1", "version: 1\nx: !!python/object:os.system"), "p.yaml:2:4: not YAML"),
        (("version: 1", "a: &a [*a]\nversion: 1"), "p.yaml:1:1: nested too deeply"),
    ],
)
def test_an_error_points_at_its_place(change: tuple[str, str], message: str) -> None:
    found = problems(RULE.replace(*change))
    assert any(line.startswith(message) for line in found), found


def test_all_problems_are_told_at_once_in_order() -> None:
    text = RULE.replace("loss > 3", "lss > 3").replace("skip_batch", "skip") + "    fro: 3\n"
    assert [line.split(":")[1] for line in problems(text)] == ["4", "5", "6"]


def test_aliases_that_explode_are_refused() -> None:
    layers = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    [line] = problems("a0: &a0 [x]\n" + layers)
    assert "values" in line


@pytest.mark.parametrize(("text", "what"), [("", "empty"), ("- 1", "a list"), ("42", "a int")])
def test_a_document_that_is_no_policy_says_what_it_is(text: str, what: str) -> None:
    assert problems(text) == [f"p.yaml:1:1: the policy is {what}" + (
        "; it starts with `version: 1`" if what == "empty" else ", not a mapping; it starts with"
        " `version: 1`"
    )]  # fmt: skip


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"none\.yaml: No such file"):
        load_policy(tmp_path / "none.yaml")
    with pytest.raises(PolicyError, match="Is a directory"):
        load_policy(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"version: \xe9")
    with pytest.raises(PolicyError, match="not UTF-8"):
        load_policy(tmp_path / "latin.yaml")
