"""The expression language: what it takes, what it refuses and how it says so."""

import itertools

import pytest

from trimtab.controller.engine.expression import Constant, Operation, Operator, Past, Signal
from trimtab.controller.engine.grammar import (
    FUNCTIONS,
    MAX_DEPTH,
    MAX_LENGTH,
    ExpressionError,
    parse,
)


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ("lss > 3", 0, "unknown signal 'lss' (did you mean loss?)"),
        ("1 < meidan(loss, 4)", 4, "unknown function 'meidan' (did you mean median?)"),
        ("loss > 3 and lss > 1", 13, "unknown signal 'lss'"),
        ("(loss > 3 and\n lss > 1)", 15, "unknown signal 'lss'"),
        ("loss", 0, "must be a condition"),
        ("loss + 1", 0, "must be a condition"),
        ("loss >", 6, "not an expression"),
        ("", 0, "not an expression"),
        ("loss == 3", 8, "compare with"),
        ("loss > median(loss)", 7, "median takes: median(loss, 64)"),
        ("loss > median(loss, 1)", 20, "a whole number from 2 to 4096"),
        ("loss > median(loss, 5000)", 20, "memory and replay time grow with it"),
        ("loss > median(loss, True)", 20, "a whole number"),
        ("loss > median(loss, lr)", 20, "a whole number"),
        ("loss > median(loss + 1, 4)", 14, "a signal is needed here"),
        ("loss > median(loss, n=4)", 22, "takes no named arguments"),
        ("loss > quantile(loss, 8, 2)", 25, "a share from 0 to 1"),
        ("loss > ewma(loss, 8)", 18, "a decay per step"),
        ("loss > ewma(loss, 0.99999)", 18, "a decay per step"),
        ("zscore(loss, 8, method=max) > 1", 23, "unknown method 'max' (there are: median, mean"),
        ("zscore(loss, 8, how=mean) > 1", 20, "unknown option 'how'"),
        ("zscore(loss, 8, method=1) > 1", 23, "method is one of: median, mean, ewma"),
        ("abs(zscore(loss, 8, scale=log)) > 1", 4, "a zscore with scale=log is compared at once"),
        ("zscore(loss, 8, scale=log) > lr", 29, "needs a bound from the past"),
        (
            "zscore(loss, 8, scale=log) > zscore(lr, 8, scale=log)",
            29,
            "only one side can be a zscore with scale=log",
        ),
        ("dataset_loss > 1", 0, "name a dataset"),
        ("any_layer(dataset_loss > 1)", 10, "name a dataset"),
        ("loss[0] > 1", 0, "a signal is needed here, such as loss or dataset_loss[web]"),
        ("any_layer(loss > 1)", 0, "any_layer needs a signal that layer groups have inside"),
        ("any_dataset(loss > 1)", 0, "any_dataset needs dataset_loss inside"),
        ("any_layer(any_layer(grad_norm > 1))", 10, "cannot stand inside another of its kind"),
        ("any_layer(grad_norm)", 10, "need conditions"),
        ("first_layers(0, grad_norm > 1)", 13, "a whole number from 1"),
        ("first_layers(grad_norm > 1)", 0, "first_layers takes: first_layers(4, below"),
        ("consecutive(loss > 1, 3) > 2", 0, "consecutive takes: consecutive(loss > 3)"),
        ("count_true(age(loss > 1) > 2, 9) > 1", 11, "age cannot stand inside count_true"),
        ("any_layer(age(grad_norm > 1) > 2)", 10, "age cannot stand inside any_layer"),
        ("loss and lr > 1", 0, "and, or, not need conditions"),
        ("(loss > 1) + 2 > 1", 1, "a number is needed here"),
        ("loss > 'a'", 7, "'a' is not a number"),
        ("loss > True", 7, "True is not a number"),
        ("loss > 1e999", 7, "this large"),
        ("loss.real > 1", 0, "Attribute is not part of the language"),
        ("(lambda: 1)() > 1", 0, "Call is not part"),
        ("__import__('os').system('x') > 1", 0, "Call is not part"),
        ("[x for x in y] > 1", 0, "ListComp is not part"),
        ("loss > 2 ** 9 ** 9", 7, "BinOp is not part"),
        ("(loss := 3) > 1", 1, "NamedExpr is not part"),
        ("loss > 1 if lr > 1 else lr > 2", 0, "IfExp is not part"),
        ("loss > f'{lr}'", 7, "JoinedStr is not part"),
        ("median(*loss, 4) > 1", 7, "a signal is needed"),
        ("zscore(loss, 4, **lr) > 1", 18, "unknown option"),
    ],
)
def test_what_is_not_the_language_is_refused_at_its_place(
    text: str, offset: int, message: str
) -> None:
    with pytest.raises(ExpressionError) as error:
        parse(text, condition=True)
    assert message in error.value.message
    assert error.value.offset == offset


def test_a_number_is_wanted_for_an_argument() -> None:
    with pytest.raises(ExpressionError, match="must be a number"):
        parse("loss > 3", condition=False)


@pytest.mark.parametrize(
    "text",
    ["(" * 5000 + "1", "-" * 5000 + "loss > 1", "loss > " + "1" * 3000, "not " * (MAX_DEPTH + 1)
     + "loss > 1", " + ".join(["loss"] * (MAX_LENGTH // 7)) + " > 1", "\0", "loss > 1\nlr"],
)  # fmt: skip
def test_hostile_text_is_refused_and_not_run(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text, condition=True)


@pytest.mark.parametrize("example", FUNCTIONS.values())
def test_every_example_of_a_function_is_in_the_language(example: str) -> None:
    depths = list(itertools.accumulate((sign == "(") - (sign == ")") for sign in example))
    end = next(at for at in range(1, len(depths)) if depths[at] == 0 and depths[at - 1] == 1)
    text = example[: end + 1].replace("(x)", "(loss)")
    for condition in (True, False):
        try:
            parse(text, condition=condition)
        except ExpressionError:
            continue
        return
    parse(text + " > 1", condition=True)


def test_a_log_score_is_a_threshold_on_the_signal() -> None:
    node = parse("3 < zscore(loss, 8, scale=log)", condition=True)
    assert isinstance(node, Operation)
    comparison, positive = node.operands
    assert isinstance(comparison, Operation)
    assert comparison.operator is Operator.GT  # mirrored: the signal stands on the left
    assert comparison.operands[0] == Signal("loss")
    assert positive == Operation(Operator.GT, (Signal("loss"), Constant(0.0)))


def test_a_signal_that_the_policy_declares_is_late() -> None:
    with pytest.raises(ExpressionError, match="unknown signal 'reward'"):
        parse("reward > 1", condition=True)
    node = parse("reward > mean(reward, 8)", condition=True, own_signals=frozenset({"reward"}))
    assert isinstance(node, Operation)
    assert node.operands == (
        Signal("reward", late=True),
        Past("mean", Signal("reward", late=True), 8.0),
    )
