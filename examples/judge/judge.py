"""A judge for the example: an OpenAI-compatible server whose "model" compares answers by rule. Prints its URL.

It grades spelling from 0 to 10: 10 for the reference, else at most 9, by the share of letters in their place. A real
judge is a language model; everything between the run and the server is the same.
"""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLACES = re.compile(r"^Reference: (.*?)$.*?^Answer: (.*)$\s*^Grade", re.MULTILINE | re.DOTALL)  # as in template.txt


def grade(text: str) -> str:
    """Return the judge's reply to a filled template."""
    match = PLACES.search(text)
    if match is None:
        return "The template shows no reference and answer."
    reference, answer = match[1].strip(), match[2].strip()
    if answer == reference:
        return "It is the reference.\nScore: 10"
    letters = max(len(reference), len(answer))
    right = sum(a == b for a, b in zip(reference, answer, strict=False))
    return f"{right} of {letters} letters are in their place.\nScore: {9 * right / letters:.1f}"


class Judge(BaseHTTPRequestHandler):
    """Answer ``POST …/chat/completions``."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Grade the last message."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = {"role": "assistant", "content": grade(request["messages"][-1]["content"])}
        body = json.dumps({"model": request["model"], "choices": [{"index": 0, "message": reply}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Write no line per request."""


def main() -> None:
    """Serve on a free port of the loopback address until the process ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
