"""The tools of this run and its reward: half for a call, half for the answer. ``python reward.py`` tests it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from miles.tasks.environments.base import ToolEnvironment
from miles.types.sample import Prompt


class Calculator(ToolEnvironment):
    """One trajectory: the model calls its tools, and answers."""

    def functions(self) -> Sequence[Callable[..., Any]]:
        """Return the tools."""
        return [self.multiply]

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b

    async def reward(self) -> float:
        """Return half for a call without an error, and half for the right number in the last answer."""
        results = [message["content"] for message in self.messages if message["role"] == "tool"]
        has_called = any(not result.startswith("error") for result in results)
        return 0.5 * has_called + 0.5 * (str(self.prompt.label) in self.answer)


def test_reward() -> None:
    """Play a trajectory."""
    played = Calculator(Prompt("", (), label="4042"))
    call = {"id": "1", "function": {"name": "multiply", "arguments": '{"a": 47, "b": 86}'}}
    asyncio.run(played.step({"role": "assistant", "content": "", "tool_calls": [call]}))
    assert asyncio.run(played.reward()) == 0.5
    asyncio.run(played.step({"role": "assistant", "content": "It is 4042."}))
    assert asyncio.run(played.reward()) == 1


if __name__ == "__main__":
    test_reward()
    print("test_reward passed")
