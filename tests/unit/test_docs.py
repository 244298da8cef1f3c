"""What docs/policies.md shows is sound, and it leaves nothing out."""

import re
from pathlib import Path

import pytest

from trimtab.controller.actions import NAMES
from trimtab.controller.authoring.testing import run_suite
from trimtab.controller.engine.grammar import FUNCTIONS
from trimtab.controller.engine.signals import SIGNALS
from trimtab.controller.loader import parse_policy
from trimtab.controller.shape import DefaultsShape, PolicyShape, RuleShape

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_example_is_sound(block: str, tmp_path: Path) -> None:
    if block.startswith("policy:"):
        suite = tmp_path / "suite.yaml"
        suite.write_text(block.replace("..", str(PAGE.parents[1])))
        assert [result.failures for result in run_suite(suite)] == [()]
    else:
        parse_policy(block if "version:" in block else "version: 1\n" + block, "policies.md")


def test_nothing_is_left_out() -> None:
    keys = [
        field.alias or name
        for shape in (PolicyShape, DefaultsShape, RuleShape)
        for name, field in shape.model_fields.items()
    ]
    text = PAGE.read_text()
    names = {f"{key}:" for key in keys if f"`{key}`" not in text}
    assert [name for name in names if name not in text] == []
    assert [n for n in (*SIGNALS, *FUNCTIONS, *NAMES) if f"| `{n}` |" not in text] == []
