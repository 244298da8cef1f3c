"""Any policy document gives a policy, or errors that point into it.

By hand, over many more: python tests/property/test_policy_documents.py 100000
"""

import random
import sys
from pathlib import Path

import pytest

from trimtab.controller.document import PolicyError
from trimtab.controller.engine.grammar import FUNCTIONS
from trimtab.controller.engine.signals import SIGNALS
from trimtab.controller.loader import parse_policy

POLICIES = sorted(Path(__file__).parents[2].joinpath("policies").glob("*.yaml"))
WORDS = [
    *FUNCTIONS, *SIGNALS, "and", "or", "not", "(", ")", "[", "]", "{", "}", ",", ":", "- ", "#",
    "'", '"', "|", ">-", "&a", "*a", "!!python/name:os.system", "\n", "\n  ", "\n    ", "\t", "\0",
    "null", "on", "off", "1e-4", "0", "-1", "1e999", "nan", "do", "when", "name", "rules",
    "ladder", "limit", "3 per 9 steps", "20 steps", "10 min", "skip_batch", "halt", "scale_lr",
    "by", "to", "mode", "act", "é", "\U0001d6fc", "\u2028", "__import__", "lambda", "..", "**",
    "==", "1:30", "2024-02-31",
]  # fmt: skip


def mangled(noise: random.Random) -> str:
    """Return a policy with some places replaced, doubled or taken out."""
    text = noise.choice(POLICIES).read_text()
    for _ in range(noise.randint(1, 6)):
        at = noise.randrange(len(text) + 1)
        to = min(len(text), at + noise.choice([0, 0, 1, 3, 30]))
        what = noise.choice(
            ["", noise.choice(WORDS), " " + noise.choice(WORDS) + " ", text[at:to] * 2]
        )
        text = text[:at] + what + text[to:]
    return text


def try_documents(seed: int, count: int) -> tuple[int, int]:
    """Return how many of `count` documents were policies, and how many were refused."""
    noise, sound = random.Random(seed), 0
    for number in range(count):
        text = mangled(noise)
        try:
            parse_policy(text, "p.yaml")
            sound += 1
        except PolicyError as error:
            lines = text.count("\n") + text.count("\u2028") + text.count("\x85") + 2
            for problem in error.problems:
                assert 0 <= problem.line <= lines, (seed, number, problem)
                assert problem.column >= 0, (seed, number, problem)
                assert problem.message, (seed, number)
    return sound, count - sound


@pytest.mark.parametrize("seed", range(4))
def test_any_document_is_a_policy_or_errors_with_places(seed: int) -> None:
    sound, refused = try_documents(seed, 100)
    assert sound > 5
    assert refused > 5


if __name__ == "__main__":
    print(try_documents(int(sys.argv[2]) if len(sys.argv) > 2 else 0, int(sys.argv[1])))
