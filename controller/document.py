"""A YAML text as plain values, with the place of every key and value, for errors that point.

Used by the loader.  YAML 1.1 surprises are met here: keys are taken as written (`on:` is no
boolean), a key that stands twice is a problem, not a silent loss.
"""

from dataclasses import dataclass
from typing import Any

import yaml

MAX_VALUES = 100_000
"""Most keys and values in a policy."""

Place = tuple[str | int, ...]
"""Keys and list positions from the top of the document down to a value."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a policy, and where."""

    line: int
    """1-based; 0 when it is about the whole file."""
    column: int
    message: str


class PolicyError(Exception):
    """A policy file that cannot be used; as text one `file:line:column: message` a problem."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.name = name
        self.problems = sorted(problems, key=lambda p: (p.line, p.column))
        super().__init__(
            "\n".join(
                f"{name}:{p.line}:{p.column}: {p.message}" if p.line else f"{name}: {p.message}"
                for p in self.problems
            )
        )


class Document:
    """The values of a YAML text, where each stands, and what was found wrong so far."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self.values: dict[Place, yaml.Node] = {}
        self.keys: dict[Place, yaml.Node] = {}
        try:
            loader = yaml.SafeLoader(text)
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            message = f"not YAML: character #x{error.character:04x} is not allowed"
            raise PolicyError(name, [Problem(line, column, message)]) from None
        try:
            root = loader.get_single_node()
            self.content = None if root is None else self._plain(loader, root, ())
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            what = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise PolicyError(name, [Problem(line, column, f"not YAML: {what}")]) from None
        except RecursionError:
            raise PolicyError(name, [Problem(1, 1, "nested too deeply")]) from None
        finally:
            loader.dispose()

    def _plain(self, loader: yaml.SafeLoader, node: yaml.Node, at: Place) -> Any:
        if len(self.values) > MAX_VALUES:  # aliases of aliases make a short text a huge document
            raise PolicyError(self.name, [Problem(1, 1, f"more than {MAX_VALUES} values")])
        self.values[at] = node
        if isinstance(node, yaml.MappingNode):
            return self._mapping(loader, node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(loader, v, (*at, i)) for i, v in enumerate(node.value)]
        try:
            value = loader.construct_object(node, deep=True)
        except ValueError as error:  # such as the date 2024-02-31
            self.report(node, f"{error}")
            return None
        if isinstance(value, int | float) and ":" in node.value:
            self.report(node, f"{node.value} is {value} to YAML; write a plain number")
        return value

    def _mapping(self, loader: yaml.SafeLoader, node: yaml.MappingNode, at: Place) -> Any:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.report(key_node, "a key must be a word")
                continue
            key = key_node.value  # as written: `on:` stays "on"
            if key in result:
                self.report(key_node, f"key {key!r} stands twice; the first would be lost")
            self.keys[(*at, key)] = key_node
            result[key] = self._plain(loader, value_node, (*at, key))
        return result

    def report(self, node: yaml.Node, message: str, offset: int = 0) -> None:
        """Add a problem at a node, `offset` characters into a one-line scalar."""
        mark, style = node.start_mark, getattr(node, "style", None)
        line, column = mark.line + 1, mark.column + 1
        if style in ("|", ">"):
            line += 1  # the text begins below the sign
        else:
            column += offset + (1 if style in ("'", '"') else 0)
        self.problems.append(Problem(line, column, message))

    def at(self, path: Place, message: str, offset: int = 0) -> None:
        """Add a problem at the value of a path, or at the nearest thing above it that is there."""
        while path not in self.values:
            path = path[:-1]
        self.report(self.values[path], message, offset)
