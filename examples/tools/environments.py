"""Two environments with a tool: a shop whose prices only the tool knows, and problems with a calculator."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

from miles.tasks.environments.base import ToolEnvironment

OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Shop(ToolEnvironment):
    """Asks what something costs. The row's metadata has the price, and the model sees it only through the tool."""

    max_turns = 3

    def functions(self) -> Sequence[Callable[..., Any]]:
        """Return the one tool."""
        return [self.price]

    def price(self, item: str) -> int:
        """Look up what something costs.

        Args:
            item: The item whose price the model asks for.
        """
        price: int = self.prompt.metadata["prices"][item]
        return price

    async def reward(self) -> float:
        """Return 1 for the price, else 0."""
        return float(self.answer.strip() == str(self.prompt.label))


class Calculator(ToolEnvironment):
    """Problems with a calculator, for a model that knows tools. ``--rm-type math`` scores the last message."""

    def functions(self) -> Sequence[Callable[..., Any]]:
        """Return the one tool."""
        return [self.calculate]

    def calculate(self, expression: str) -> float:
        """Compute a sum, a difference, a product or a quotient, also nested in brackets.

        Args:
            expression: The expression to compute, such as (2 + 3) * 4.
        """
        return _value(ast.parse(expression[:500], mode="eval").body)

    async def reward(self) -> float:
        """Return 1 for the label itself, else 0."""
        return float(self.answer.strip() == str(self.prompt.label))


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.unparse(node)} is none of numbers, + - * / and brackets")
