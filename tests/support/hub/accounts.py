"""Who the tokens of the loopback Hub belong to, and what they may do."""

from dataclasses import dataclass, field
from typing import Literal

from tests.support.hub.wire import HubError, Request


@dataclass(frozen=True)
class Account:
    """Holder of a token.

    Attributes:
        name: User name, as ``whoami`` tells it.
        role: Role of the token.
        member: Whether the user may see private repositories and, with a write token, write to all.
        gate_passed: Whether the user was let through the gate of gated repositories.
    """

    name: str
    role: Literal["read", "write"]
    member: bool = True
    gate_passed: bool = True

    @property
    def may_write(self) -> bool:
        """Whether the token may change repositories."""
        return self.member and self.role == "write"


@dataclass
class Accounts:
    """Tokens known to the Hub."""

    by_token: dict[str, Account] = field(default_factory=dict)

    def identify(self, request: Request) -> Account | None:
        """Account of the request, None for an anonymous one.

        Raises:
            HubError: 401, a token that does not exist; so answered for public repositories too.
        """
        header = request.headers.get("authorization")
        if header is None:
            return None
        account = self.by_token.get(header.removeprefix("Bearer "))
        if account is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return account

    def require_read(self, request: Request, *, private: bool, gated: bool = False) -> None:
        """Lets a reader pass, or answers as if the repository did not exist.

        Raises:
            HubError: 401/404 RepoNotFound, or 401/403 GatedRepo.
        """
        account = self.identify(request)
        if private and not (account and account.member):
            raise repository_not_found(request)
        if gated and account is None:
            raise HubError(
                401, "Access to this dataset is restricted. You must be authenticated.", code="GatedRepo"
            )
        if gated and account is not None and not account.gate_passed:
            raise HubError(
                403, "Access to this dataset is restricted and you are not in the list.", code="GatedRepo"
            )

    def require_write(self, request: Request, *, private: bool) -> Account:
        """Lets a writer pass.

        Raises:
            HubError: 401 without a token, 404 for who must not know of it, else 403.
        """
        account = self.identify(request)
        if private and not (account and account.member):
            raise repository_not_found(request)
        if account is None:
            raise HubError(401, "Invalid username or password.")
        if account.role != "write":
            raise HubError(403, "Forbidden: you must use a write token to upload to a repository.")
        if not account.may_write:
            raise HubError(403, "Forbidden: you don't have permission to write to this repository.")
        return account


def repository_not_found(request: Request) -> HubError:
    """The answer for a repository that is absent or hidden: 401 to the anonymous, 404 to others."""
    status = 404 if "authorization" in request.headers else 401
    return HubError(status, "Repository not found", code="RepoNotFound")
