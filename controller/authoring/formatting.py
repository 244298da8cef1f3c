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
    """Put an empty line, and no more, before `rules:` and before every rule but the first."""
    spaced: list[str] = []
    rules = 0
    for line in lines:
        rules += line.startswith("  - name:")
        if line.startswith("rules:") or (line.startswith("  - name:") and rules > 1):
            start = len(spaced)
            while start and spaced[start - 1].lstrip().startswith("#"):
                start -= 1  # comments belong to what follows them
            if start and spaced[start - 1]:
                spaced.insert(start, "")
        elif line.startswith("  - name:"):
            while spaced and not spaced[-1]:
                spaced.pop()
        spaced.append(line)
    return spaced


def _meaning(policy: Policy) -> Policy:
    return replace(policy, version="", text="")
