"""Every error as OpenAI says it: a status, and {"error": {message, type, param, code}}."""

import math
from dataclasses import dataclass, field
from typing import Any

from blocktrain.errors import (
    ConfigError,
    OverloadedError,
    RefusedError,
    RequestError,
    UnavailableError,
)

REFUSED = {
    "invalid_api_key": 401, "model_not_found": 404, "not_found": 404, "method_not_allowed": 405,
    "timeout": 408, "too_large": 413,
}  # fmt: skip
SOON = {"retry-after": "1"}
CODE_OF = {404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def refusal(error: Exception) -> Refusal:
    """What concerns the client is said; anything else stays in the log."""
    match error:
        case RequestError():
            return Refusal(400, str(error), "invalid_request_error", error.code, error.field)
        case ConfigError():
            return Refusal(400, str(error), "invalid_request_error")
        case RefusedError():
            status = REFUSED.get(error.code, 400)
            return Refusal(status, str(error), "invalid_request_error", error.code)
        case OverloadedError():
            later = {"retry-after": str(math.ceil(error.seconds))}
            code = "rate_limit_exceeded"
            return Refusal(429, str(error), "rate_limit_error", code, headers=later)
        case UnavailableError():
            return Refusal(503, str(error), "server_error", "unavailable", headers=SOON)
    return Refusal(500, "the server failed; its log tells more", "server_error", "internal")
