"""A policy as a page of Markdown.  Called by `trimtab policy docs`; docs/policies/ is its."""

from pathlib import PurePath

from trimtab.controller.authoring.explaining import action_meanings, explain
from trimtab.controller.engine.policy import Policy


def page(policy: Policy) -> str:
    """Return the page."""
    lines = [f"# {PurePath(policy.name).name}", ""]
    if policy.summary:
        lines += [policy.summary.strip(), ""]
    if policy.sources:
        lines += ["Sources:", "", *(f"- {source}" for source in policy.sources), ""]
    lines += ["| rule | mode | does | because |", "|---|---|---|---|"]
    for rule, told in zip(policy.rules, explain(policy), strict=True):
        first = told.does[0].split(", at most")[0]
        lines.append(f"| {_link(rule.name)} | {told.mode} | {first} | {rule.summary} |")
    for told in explain(policy):
        lines += ["", f"## {told.rule}", "", "```", told.when, "```", ""]
        for line in (*told.does, *told.limits, *told.notes):
            lines.append(f"- {line}")
        lines.append(f"- needs {', '.join(told.signals)}")
    lines += ["", "## The actions", ""]
    for action, meaning in action_meanings(policy).items():
        lines.append(f"- `{action}` {meaning}")
    return "\n".join(lines) + "\n"


def _link(rule: str) -> str:
    return f"[{rule}](#{rule})"
