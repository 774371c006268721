"""Find a number in two guesses with a language model: an ordinary program of OpenAI's client.

It can be run on its own:

echo '{"input": "guess", "metadata": {"number": 3}}' | OPENAI_API_KEY=… python agent.py
"""

from __future__ import annotations

import json
import os
import sys

from openai import OpenAI

GUESSES = 2


def reply(guess: str, number: int) -> str:
    """Return the reply to a wrong guess."""
    if not guess.isdecimal():
        return "digit"
    return "higher" if int(guess) < number else "lower"


def main() -> None:
    """Read the task, talk to the model, and print the outcome."""
    task = json.load(sys.stdin)
    number = task["metadata"]["number"]
    client = OpenAI()
    messages = [{"role": "user", "content": task["input"]}]
    for _ in range(GUESSES):
        model = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=1, temperature=0.7)
        guess = answer.choices[0].message.content or ""
        if guess == str(number):
            print("found")
            return
        messages.append({"role": "assistant", "content": guess})
        messages.append({"role": "user", "content": reply(guess, number)})
    print("not found")


if __name__ == "__main__":
    main()
