"""Predicates over a pending step: what they mean, on floats and on tensors."""

import math

import pytest
import torch

from trimtab.controller.engine.expression import (
    Node,
    Operation,
    Past,
    Seen,
    Signal,
    Term,
    compiled,
    is_condition,
)
from trimtab.controller.engine.grammar import parse

LAYERS = {
    "update_norm": (1.0, 2.0, math.nan, 4.0),
    "param_norm": (1.0, 1.0, 1.0, 1.0),
    "dataset_loss": (2.0, 7.0),
}


def without_past(node: Node) -> Node:
    """Put the term 3 in the place of every statistic."""
    if isinstance(node, Past):
        return Term(1 if node.signal.each else 0, node.signal.each)
    if isinstance(node, Operation):
        operands = tuple(without_past(operand) for operand in node.operands)
        return Operation(node.operator, operands, node.text)
    return node


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("loss > 2 * median(loss, 64)", {"loss": 6.1}, True),
        ("loss > 2 * median(loss, 64)", {"loss": 6.0}, False),
        ("rise(loss, 64) >= 2", {"loss": 6.0}, True),
        ("delta(loss, 4) > 2", {"loss": 5.0}, False),
        ("zscore(loss, 64) > 1", {"loss": 6.1}, True),
        ("zscore(loss, 64) > 1", {"loss": 6.0}, False),
        ("zscore(loss, 64, method=mean) > 1", {"loss": 6.1}, True),
        ("zscore(loss, 0.9, method='ewma') >= 1", {"loss": 6.0}, True),
        ("not loss < 1 and grad_norm <= 2", {"loss": 1.0, "grad_norm": 2.0}, True),
        ("loss < 1 or grad_norm > 2", {"loss": 1.0, "grad_norm": 2.0}, False),
        ("1 < loss < 2", {"loss": 1.5}, True),
        ("1 < loss < 2", {"loss": 2.5}, False),
        ("abs(loss - 5) > 1", {"loss": 3.0}, True),
        ("finite(loss)", {"loss": math.inf}, False),
        ("-loss < -2", {"loss": 2.5}, True),
        ("loss > -1", {"loss": 0.0}, True),
        ("loss / lr > 1", {"loss": 1.0, "lr": 0.0}, True),
        ("1e-4 < lr", {"lr": 1e-3}, True),
        ("dataset_loss[web] > 3", {"dataset_loss[web]": 3.5}, True),
        ("dataset_loss['web'] > 3", {"dataset_loss[web]": 2.5}, False),
        ("any_layer(update_norm > 3)", {}, True),
        ("any_layer(update_norm > 4)", {}, False),
        ("any_layer(not update_norm < 9)", {}, False),  # also not for the absent layer
        ("any_layer(update_norm > median(update_norm, 64))", {}, True),
        ("any_layer(update_norm > 3 and loss > 1)", {"loss": 0.0}, False),
        ("any_layer(3 < update_norm + param_norm < 4)", {}, False),
        ("count_layers(update_norm > 1.5) >= 2", {}, True),
        ("count_layers(update_norm > 1.5) > 2", {}, False),
        ("first_layers(2, update_norm > 1.5)", {}, True),
        ("first_layers(3, update_norm > 2.5)", {}, False),
        ("any_dataset(dataset_loss > 6)", {}, True),
        ("any_dataset(dataset_loss > 7)", {}, False),
    ],
)
def test_a_condition_means_what_it_says_on_floats_and_on_tensors(
    text: str, values: dict[str, float], expected: bool
) -> None:
    node = without_past(parse(text, condition=True))
    terms = (3.0, (3.0, 3.0, 3.0, 3.0))
    on_floats = compiled(node)(Seen(values=values, vectors=LAYERS, terms=terms))
    on_tensors = compiled(node, tensors=True)(
        Seen(
            values={name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()},
            vectors={name: torch.tensor(v, dtype=torch.float64) for name, v in LAYERS.items()},
            terms=[torch.tensor(term, dtype=torch.float64) for term in terms],
        )
    )
    assert on_floats is expected
    assert bool(on_tensors) is expected


@pytest.mark.parametrize(
    "text", ["loss > 3 or grad_norm > 1", "loss > 1 and any_layer(lr*grad_norm > 1)"]
)
def test_an_absent_signal_is_no_value(text: str) -> None:
    node = parse(text, condition=True)
    with pytest.raises(KeyError):
        compiled(node)(Seen(values={"grad_norm": 0.0, "lr": 1.0}))


def test_a_signal_is_per_layer_group_only_where_that_is_asked() -> None:
    node = parse("grad_norm > 1 and any_layer(grad_norm * lr > 1)", condition=True)
    assert is_condition(node)
    found = {part for part in _leaves(node) if isinstance(part, Signal)}
    assert found == {Signal("grad_norm"), Signal("grad_norm", each=True), Signal("lr")}


def _leaves(node: Node) -> list[Node]:
    if isinstance(node, Operation):
        return [leaf for operand in node.operands for leaf in _leaves(operand)]
    return [node]
