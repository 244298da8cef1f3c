"""The expression language: what it takes, what it refuses and how it says so."""

import math

import pytest

from trimtab.controller.engine.expression import (
    MAX_DEPTH,
    MAX_LENGTH,
    Constant,
    ExpressionError,
    evaluate,
    evidence,
    fold,
    parse,
)


def three(_: str, signal: str, size: int) -> float | None:
    """Every statistic of every signal is 3."""
    return 3.0


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("loss > 2 * median(loss, 64)", {"loss": 6.1}, True),
        ("loss > 2 * median(loss, 64)", {"loss": 6.0}, False),
        ("rise(loss, 64) >= 2", {"loss": 6.0}, True),
        ("zscore(loss, 64) > 1", {"loss": 6.1}, True),
        ("zscore(loss, 64) > 1", {"loss": 6.0}, False),
        ("not loss < 1 and grad_norm <= 2", {"loss": 1.0, "grad_norm": 2.0}, True),
        ("loss < 1 or grad_norm > 2", {"loss": 1.0, "grad_norm": 2.0}, False),
        ("1 < loss < 2", {"loss": 1.5}, True),
        ("1 < loss < 2", {"loss": 2.5}, False),
        ("abs(loss - 5) > 1", {"loss": 3.0}, True),
        ("finite(loss)", {"loss": math.inf}, False),
        ("-loss < -2", {"loss": 2.5}, True),
        ("loss / lr > 1", {"loss": 1.0, "lr": 0.0}, True),
        ("1e-4 < lr", {"lr": 1e-3}, True),
    ],
)
def test_a_condition_means_what_it_says(
    text: str, values: dict[str, float], expected: bool
) -> None:
    residual = fold(parse(text, condition=True), three)
    assert residual is not None
    assert evaluate(residual, values) is expected


def test_a_residual_keeps_only_the_pending_step() -> None:
    residual = fold(parse("2 * median(lr, 64)", condition=False), three)
    assert residual == Constant(6.0)


def test_an_unknown_statistic_makes_the_whole_rule_unknown() -> None:
    condition = parse("loss > 3 or median(lr, 64) > 1", condition=True)
    assert fold(condition, lambda *_: None) is None


def test_evidence_shows_both_sides_of_every_comparison() -> None:
    condition = parse("loss > 2 * median(loss, 64) and lr < 1", condition=True)
    assert evidence(condition, {"loss": 7.0, "lr": 0.5}, three) == (
        "loss = 7 > 2 * median(loss, 64) = 6",
        "lr = 0.5 < 1",
    )


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ("lss > 3", 0, "unknown signal 'lss' (did you mean loss?)"),
        ("1 < meidan(loss, 4)", 4, "unknown function 'meidan' (did you mean median?)"),
        ("loss > 3 and lss > 1", 13, "unknown signal 'lss'"),
        ("loss", 0, "must be a condition"),
        ("loss + 1", 0, "must be a condition"),
        ("loss >", 6, "not an expression"),
        ("", 0, "not an expression"),
        ("loss == 3", 8, "compare with"),
        ("loss > median(loss)", 7, "takes a signal and a number of steps"),
        ("loss > median(loss, 1)", 20, "a window has 2 to 4096 steps"),
        ("loss > median(loss, 5000)", 20, "a window has 2 to 4096 steps"),
        ("loss > median(loss, True)", 20, "a window has"),
        ("loss > median(loss + 1, 4)", 7, "takes a signal and a number of steps"),
        ("loss > median(loss, n=4)", 22, "takes no named arguments"),
        ("loss and lr > 1", 0, "and, or, not need conditions"),
        ("(loss > 1) + 2 > 1", 1, "a number is needed here"),
        ("loss > 'a'", 7, "'a' is not a number"),
        ("loss > True", 7, "True is not a number"),
        ("loss > 1e999", 7, "this large"),
        ("loss.real > 1", 0, "Attribute is not part of the language"),
        ("loss[0] > 1", 0, "Subscript is not part"),
        ("(lambda: 1)() > 1", 0, "Call is not part"),
        ("__import__('os').system('x') > 1", 0, "Call is not part"),
        ("[x for x in y] > 1", 0, "ListComp is not part"),
        ("loss > 2 ** 9 ** 9", 7, "BinOp is not part"),
        ("(loss := 3) > 1", 1, "NamedExpr is not part"),
        ("loss > 1 if lr > 1 else lr > 2", 0, "IfExp is not part"),
        ("loss > f'{lr}'", 7, "JoinedStr is not part"),
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
