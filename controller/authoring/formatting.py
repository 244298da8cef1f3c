"""One layout for policy files.  Called by `trimtab policy fmt`.

Indentation, blank lines and spacing are normalised; comments, order and wording stay.
"""

import io
import re
from dataclasses import replace

from ruamel.yaml import YAML

from trimtab.controller.document import PolicyError, Problem
from trimtab.controller.engine.policy import Policy
from trimtab.controller.loader import parse_policy

LINE_WIDTH = 100


def formatted(text: str, name: str) -> str:
    """Return the text in the one layout.

    Raises:
        PolicyError: If it is no policy, or would mean something else in another layout.
    """
    before = parse_policy(text, name)
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = LINE_WIDTH
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    yaml.dump(yaml.load(text), out)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    laid_out = re.sub(r"\n{3,}", "\n\n", "\n".join(_spaced(lines))).strip("\n") + "\n"
    if _meaning(parse_policy(laid_out, name)) != _meaning(before):
        raise PolicyError(name, [Problem(0, 0, "cannot be laid out without a change of meaning")])
    return laid_out


def _spaced(lines: list[str]) -> list[str]:
    """Put an empty line before every rule but the first and before every top-level key."""
    spaced: list[str] = []
    for at, line in enumerate(lines):
        top = re.match(r"[a-z_]+:", line) is not None and at > 0
        rule = re.match(r"  - name:", line) is not None
        last = spaced[-1] if spaced else ""
        first = last.rstrip(": ") == "rules"
        if ((top and line.startswith("rules:")) or (rule and not first)) and last:
            comment = len(spaced)
            while comment and spaced[comment - 1].lstrip().startswith("#"):
                comment -= 1
            if comment and spaced[comment - 1]:
                spaced.insert(comment, "")
        spaced.append(line)
    return spaced


def _meaning(policy: Policy) -> Policy:
    return replace(policy, version="", text="")
