"""An answer that is an error, in OpenAI's form."""

from __future__ import annotations

from typing import Any

OUT_OF_ROOM = "context_length_exceeded"  # OpenAI's code, by which agent programs know that they must shorten


class ApiError(Exception):
    """Say what is wrong with a call.

    Attributes:
        status: The status of the HTTP response.
        param: The field of the call that is wrong.
        code: OpenAI's short name of the fault, if it has one.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
