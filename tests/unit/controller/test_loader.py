"""Policy files: what is read, and how errors point at what is wrong."""

from pathlib import Path

import pytest

from trimtab.controller.document import PolicyError
from trimtab.controller.engine.expression import Constant
from trimtab.controller.engine.model import Action, Change, Mode
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
    assert rule.rungs[0].limit == Limit(count=2, window_steps=50)
    assert rule.mode is Mode.OBSERVE
    assert policy.expires_steps == 9


def test_actions_come_as_a_name_a_mapping_or_a_list() -> None:
    for do in ("alert", "{alert: {}}", "[alert]", "[{alert: }]"):
        [rule] = parse_policy(RULE.replace("skip_batch", do), "p.yaml").rules
        assert [call.action for call in rule.rungs[0].do] == [Action.ALERT]


def test_arguments_are_numbers_or_expressions() -> None:
    text = RULE.replace("skip_batch", "{scale_lr: {by: 5e-1, over: 20 steps}}")
    [call] = parse_policy(text, "p.yaml").rules[0].rungs[0].do
    assert call.arguments == {"by": Constant(0.5), "over": Constant(20.0)}


def test_a_ladder_has_a_rung_for_each_entry_and_limits_of_their_own() -> None:
    text = (
        RULE
        + "    ladder:\n      - {scale_lr: {by: 0.5}, limit: 3 per 9 steps}\n      - rollback\n"
    )
    [rule] = parse_policy(text, "p.yaml").rules
    actions = [[call.action for call in rung.do] for rung in rule.rungs]
    assert actions == [[Action.SKIP_BATCH], [Action.SCALE_LR], [Action.ROLLBACK]]
    assert [str(rung.limit) for rung in rule.rungs] == [
        "16 per 1000 steps",
        "3 per 9 steps",
        "1 per 1000 steps",
    ]


def test_what_a_policy_says_beside_its_rules_is_read() -> None:
    top = (
        "summary: s\nsources: [a, b]\nrearm_on: [resume]\nsignals: {reward: mean reward}\n"
        "limits: {run: 9 per 99, causes: {lr: 2 per 20 steps}}\nrules:"
    )
    policy = parse_policy(
        RULE.replace("rules:", top).replace("loss > 3", "reward < 0")
        + "    labels: {cause: lr, team: 7}\n    layers: blocks.0*\n"
        + "    hold_off: {batch_size: 5 steps}\n",
        "p.yaml",
    )
    [rule] = policy.rules
    assert (policy.summary, policy.sources) == ("s", ("a", "b"))
    assert policy.rearm_on == {Change.RESUME}
    assert str(policy.run_limit) == "9 per 99 steps"
    assert {cause: str(limit) for cause, limit in policy.cause_limits.items()} == {
        "lr": "2 per 20 steps"
    }
    assert (rule.labels, rule.cause) == ({"cause": "lr", "team": "7"}, "lr")
    assert rule.layers == ("blocks.0*",)
    assert rule.hold_off == {Change.BATCH_SIZE: 5}


def test_one_number_of_hold_off_is_for_every_change() -> None:
    [rule] = parse_policy(RULE + "    hold_off: 7 steps\n", "p.yaml").rules
    assert rule.hold_off == dict.fromkeys(Change, 7)


def test_undo_lr_jump_is_scale_lr_by_the_ratio_of_the_jump() -> None:
    given, spelled = (
        parse_policy(RULE.replace("skip_batch", do), "p.yaml").rules[0].rungs[0].do[0]
        for do in ("undo_lr_jump", "{scale_lr: {by: 'median(lr, 64) / lr'}}")
    )
    assert (given.action, given.arguments) == (spelled.action, spelled.arguments)


def test_an_action_of_words_takes_its_defaults() -> None:
    text = RULE.replace("skip_batch", "[reset_moments, {call: smaller_batch}]")
    reset, call = parse_policy(text + "    mode: observe\n", "p.yaml").rules[0].rungs[0].do
    assert reset.options == {"moments": "both", "layers": "all"}
    assert call.options == {"name": "smaller_batch"}


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
        (("skip_batch", "clip_update"), "p.yaml:5:9: clip_update needs `to`, largest norm let"),
        (("skip_batch", "{clip_update: {to: -1}}"), "p.yaml:5:28: to must be over 0, not -1"),
        (
            ("skip_batch", "{clip_update: {to: min(loss, 3)}}"),
            "p.yaml:5:31: not an expression: '(' was never closed (inside {...} a comma ends",
        ),
        (("skip_batch", "halt"), "p.yaml:5:9: halt can only be observed in this version"),
        (
            ("skip_batch", "{reset_moments: {layers: some}}"),
            "p.yaml:5:34: layers must be one of: a",
        ),
        (("skip_batch", "{undo_lr_jump: {by: 1}}"), "p.yaml:5:24: undo_lr_jump takes no arguments"),
        (("skip_batch", "[skip_batch, {clip_update: {to: 1}}]"), "p.yaml:5:9: skip_batch and clip"),
        (("skip_batch", "{pause: {timeout: 3}}"), "p.yaml:5:27: 3 is no time, such as `30 min`"),
        (("skip_batch", "[alert, alert]"), "p.yaml:5:17: action 'alert' stands twice"),
        (
            ("skip_batch", "{alert: {to: 1}}"),
            "p.yaml:5:18: unknown argument 'to' (alert takes none",
        ),
        (("skip_batch", "{alert: 3}"), "p.yaml:5:17: alert takes a mapping of: nothing"),
        (("skip_batch", "scale_lr"), "p.yaml:5:9: scale_lr needs `by`, factor in (0, 1]"),
        (
            ("skip_batch", "{scale_lr: {by: 2}}"),
            "p.yaml:5:25: by must be over 0 and up to 1, not 2",
        ),
        (("skip_batch", "{scale_lr: {by: lss}}"), "p.yaml:5:25: unknown signal 'lss'"),
        (("skip_batch", "{rollback: {skip: 1.5}}"), "p.yaml:5:27: 1.5 is no number of batches"),
        (("skip_batch", "3"), "p.yaml:5:9: needs actions; there are: add_gradient_noise"),
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
        (
            ("skip_batch", "skip_batch\n    ladder: []"),
            "p.yaml:6:13: a ladder is a list of actions",
        ),
        (("skip_batch", "skip_batch\n    ladder: [hal]"), "p.yaml:6:14: unknown action 'hal' (did"),
        (
            ("skip_batch", "skip_batch\n    ladder: [{alert: , limit: 3}]"),
            "p.yaml:6:31: 3 is no limit",
        ),
        (
            ("skip_batch", "skip_batch\n    hold_off: {batchsize: 3}"),
            "p.yaml:6:15: unknown change 'batchsize' (did you mean batch_size?)",
        ),
        (("skip_batch", "skip_batch\n    hold_off: soon"), "p.yaml:6:15: 'soon' is no number of"),
        (
            ("skip_batch", "skip_batch\n    layers: 3"),
            "p.yaml:6:13: needs patterns of layer groups",
        ),
        (("skip_batch", "skip_batch\n    labels: [a]"), "p.yaml:6:13: needs a mapping of words"),
        (("rules:", "rearm_on: [resum]\nrules:"), "p.yaml:2:11: unknown change 'resum' (did you"),
        (
            ("rules:", "limits: {causes: {data: 3 per 9}}\nrules:"),
            "p.yaml:2:25: no rule has the label cause: data",
        ),
        (("rules:", "signals: {loss: x}\nrules:"), "p.yaml:2:17: signal 'loss' is built in"),
        (("rules:", "signals: {Re-ward: x}\nrules:"), "p.yaml:2:10: 'Re-ward' is no snake_case"),
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


def test_a_rule_that_waits_longer_than_its_level_lasts_is_refused() -> None:
    text = (
        "version: 1\nrules:\n  - name: a\n    when: loss > 2 * median(loss, 16)\n"
        "    for: 16 steps\n    do: alert\n"
    )
    assert parse_policy(text, "p.yaml").rules[0].for_steps == 16
    with pytest.raises(PolicyError, match=r"p\.yaml:5:10: for: 17 steps cannot be reached"):
        parse_policy(text.replace("16 steps", "17 steps"), "p.yaml")
