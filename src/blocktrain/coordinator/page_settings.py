"""Who may see the run page, who may operate the run on it, and what its invites contain."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from blocktrain.errors import RefusedError
from blocktrain.protocol.invite import Invite


@dataclass(frozen=True)
class PageSettings:
    is_public: bool = True
    title: str | None = None
    reference: float | None = None  # score of a model to compare with, in nats per byte
    operator_token: Callable[[], str] = str  # the token now; "": there is no operator
    draft: Invite | None = None  # an invite without a secret, with this coordinator's addresses

    def check_operator(self, token: str) -> None:
        expected = self.operator_token()
        if not expected or not hmac.compare_digest(token.encode(), expected.encode()):
            raise RefusedError(
                "unauthorized",
                "the operator's token is wrong; `blocktrain page` on the coordinator's machine"
                " prints the page's address with the token",
            )
