"""Errors that a person reads: one line of cause, one line of remedy.

Three families, told apart by who has to act:

* `UserError` and its children: the user's input or machine. The front door prints
  ``cause`` and ``remedy``, never a traceback, and exits with `exit_code`.
* `RequestError`: one request of a running server is bad. Maps to one HTTP status
  and OpenAI error body; the server goes on.
* `InternalError`: our bug. A traceback is welcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metainfer.core.verdict import Reason


class MetaInferError(Exception):
    """Base of every error raised on purpose.

    `code` is a stable machine-readable word; tests and scripts match on it, people
    read `cause` and `remedy`.
    """

    exit_code = 1
    default_code = "error"

    def __init__(self, cause: str, remedy: str = "", *, code: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy
        self.code = code or self.default_code

    def __str__(self) -> str:
        return f"{self.cause} {self.remedy}".strip()

    def to_json(self) -> dict[str, object]:
        """The error as the one document that ``--json`` prints."""
        return {"error": {"code": self.code, "cause": self.cause, "remedy": self.remedy}}


class UserError(MetaInferError):
    """The answer is no: something the user asked for cannot be done here (exit 1)."""

    default_code = "user_error"


class UsageError(UserError):
    """The command, flag, environment variable or file is malformed (exit 2)."""

    exit_code = 2
    default_code = "bad_usage"


class ModelError(UserError):
    """A model reference or checkpoint cannot be used."""

    default_code = "bad_model"


class RefusedError(UserError):
    """An explicit request cannot run. Carries every reason, not only the first."""

    default_code = "refused"

    def __init__(
        self,
        cause: str,
        remedy: str = "",
        *,
        reasons: Sequence[Reason] = (),
        code: str = "",
    ) -> None:
        super().__init__(cause, remedy, code=code)
        self.reasons = tuple(reasons)

    def __str__(self) -> str:
        untold = [reason.message for reason in self.reasons if reason.message not in self.cause]
        listed = "; ".join(untold)
        parts = [self.cause, f"Reasons: {listed}." if listed else "", self.remedy]
        return " ".join(part for part in parts if part)

    def to_json(self) -> dict[str, object]:
        body = super().to_json()
        body["reasons"] = [reason.to_json() for reason in self.reasons]
        return body


class RequestError(MetaInferError):
    """One request is refused; `status` is the HTTP status, `param` the offending field."""

    default_code = "invalid_value"

    def __init__(
        self,
        cause: str,
        remedy: str = "",
        *,
        status: int = 400,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(cause, remedy, code=code)
        self.status = status
        self.error_type = error_type
        self.param = param
        self.retry_after_s = retry_after_s

    def openai_body(self) -> dict[str, object]:
        """The body of the HTTP answer, in OpenAI's form."""
        return {
            "error": {
                "message": str(self),
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }


class InternalError(MetaInferError):
    """An invariant of ours broke. Not the user's fault; a bug report is welcome."""

    default_code = "internal_error"
