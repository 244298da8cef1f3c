"""The JSON Schema of policy files, for editors.  Called by `trimtab policy schema`."""

import json
from typing import Any

from trimtab.controller.actions import ACTIONS, UNDO_LR_JUMP, ActionInfo
from trimtab.controller.engine.grammar import FUNCTIONS
from trimtab.controller.engine.signals import SIGNALS
from trimtab.controller.shape import PolicyShape


def json_schema() -> dict[str, Any]:
    """Return the schema as JSON-able values."""
    schema = PolicyShape.model_json_schema()
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    schema["title"] = "trimtab policy"
    rule = schema["$defs"]["RuleShape"]["properties"]
    words = f"Signals: {', '.join(SIGNALS)}. Functions: {', '.join(FUNCTIONS)}."
    rule["when"] |= {"type": ["string", "number"], "description": f"One expression. {words}"}
    schema["$defs"]["actions"] = _actions()
    rule["do"] |= {"$ref": "#/$defs/actions"}
    rule["ladder"] = {
        "description": rule["ladder"]["description"],
        "type": "array",
        "minItems": 1,
        "items": {"$ref": "#/$defs/rung"},
    }
    by_name = _by_name()
    limit = schema["$defs"]["LimitsShape"]["properties"]["run"]
    schema["$defs"]["rung"] = {
        "anyOf": [
            {"enum": _names()},
            by_name
            | {"properties": {**by_name["properties"], "limit": {"pattern": limit["pattern"]}}},
        ]
    }
    return schema


def text() -> str:
    """Return the schema as it stands in policies/policy.schema.json."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _names() -> list[str]:
    return [*(action.value for action in ACTIONS), UNDO_LR_JUMP]


def _by_name() -> dict[str, Any]:
    calls = {action.value: _call(info) for action, info in ACTIONS.items()}
    calls["call"] = {"anyOf": [{"type": "string"}, calls["call"]]}
    return {
        "type": "object",
        "minProperties": 1,
        "properties": {**calls, UNDO_LR_JUMP: {"type": "null"}},
        "additionalProperties": False,
    }


def _actions() -> dict[str, Any]:
    one = [{"enum": _names()}, _by_name()]
    return {"anyOf": [*one, {"type": "array", "minItems": 1, "items": {"anyOf": one}}]}


def _call(info: ActionInfo) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, argument in info.arguments.items():
        properties[name] = {"description": argument.meaning}
        if argument.words:
            properties[name]["enum"] = list(argument.words)
        else:
            properties[name]["type"] = ["string", "number"]
    return {
        "description": info.meaning,
        "type": ["object", "null"]
        if not any(a.needed for a in info.arguments.values())
        else "object",
        "properties": properties,
        "required": [name for name, a in info.arguments.items() if a.needed],
        "additionalProperties": False,
    }
