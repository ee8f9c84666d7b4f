"""All settings: environment variables that begin with PUSH_WEIGHTS_, of server and trainer, in one catalogue.

    ServerSettings    an API process; the workers' half of it is `WorkerSettings`
    TrainerSettings   a process that pushes, and the command line (read by `trainer_client.environment`)
    problems          what is wrong with the environment: unknown names, values, and what contradicts each other

They are read when used, so that a token can be rotated. A setting is added by a field with a description:
docs/configuration.md is made from these classes (``make docs``). What is wrong with them ends a start with
`InvalidSettings`, which names the variable and the remedy; ``vllm-nixl doctor`` lists it beforehand.
"""

from __future__ import annotations

import difflib
import hmac
import logging
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from vllm_nixl_plugin.errors import Unauthorized

logger = logging.getLogger("vllm.nixl_plugin")

PREFIX = "PUSH_WEIGHTS_"
MIN_TOKEN = 16
MAX_TOKEN_FILE = 64 << 10

Shadow = Literal["auto", "device", "host"]
SelfCheck = Literal["sample", "full", "off"]


class MissingToken(RuntimeError):
    """The server must not start: its weight-update routes would be open to everybody."""


class InvalidSettings(ValueError):
    """Some variable is unknown, has a value that is not understood, or contradicts another. ``problems``: one each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _names(given: Any) -> Any:
    """``a,b`` as a tuple; nothing as None."""
    return tuple(name.strip() for name in given.split(",") if name.strip()) or None if isinstance(given, str) else given


def _pairs(given: Any) -> Any:
    """``a=1,b=2`` as a dict."""
    if not isinstance(given, str):
        return given
    items = [item.strip() for item in given.split(",") if item.strip()]
    if wrong := [item for item in items if "=" not in item]:
        raise ValueError(f"expected name=value,name=value; {wrong[0]!r} has no =")
    return dict(item.split("=", 1) for item in items)


def _address(given: Any) -> Any:
    """``host:port`` as both."""
    if not isinstance(given, str):
        return given
    host, _, port = given.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError("expected host:port, such as 10.0.0.5:8100 or [::1]:8100")
    return host.strip("[]"), int(port)


Names = Annotated[tuple[str, ...] | None, NoDecode, BeforeValidator(_names)]
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)]
Address = Annotated[tuple[str, int] | None, NoDecode, BeforeValidator(_address)]


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, case_sensitive=False, frozen=True, extra="ignore")

    def __init__(self, **values: Any) -> None:
        """Errors: InvalidSettings."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidSettings([_problem(type(self), found) for found in error.errors()]) from None

    @model_validator(mode="before")
    @classmethod
    def _empty_is_unset(cls, values: Any) -> Any:
        """But for the token file: a server whose file has no name must let nobody in."""
        return {name: value for name, value in values.items() if value != "" or name == "token_file"}

    def contradictions(self) -> list[str]:
        """What is set and cannot be meant together."""
        return []


class WorkerSettings(_Settings):
    """The fabric of a worker (NIXL plug-in, its parameters, extra threads, the interfaces it may use), and its shadows.

    Errors: InvalidSettings.
    """

    interfaces: Names = Field(
        default=None, description="network devices for the data, by commas; loopback by default, `all` for any"
    )
    backend: str = Field(default="UCX", description="NIXL's plug-in")
    backend_params: Pairs = Field(default={}, description="its parameters, `name=value,name=value`")
    num_threads: int = Field(default=0, ge=0, description="its extra threads")
    shadow: Shadow = Field(
        default="auto",
        description="where the shadows of a GPU are: `device`, `host` (pinned; installs copy them over PCIe), or "
        "`auto`: on the host if they do not fit on the device",
    )
    shadow_bytes: ByteSize | None = Field(
        default=None,
        description="bytes that mode `streamed` may take in a worker, `2GiB` or a number: its window and the memory to "
        "process one group. Unset: what the largest group takes twice. `GET /plan` shows the smallest",
    )
    self_check: SelfCheck = Field(
        default="sample",
        description="of what a trace is compared with real loads of random data before the first push: `sample` "
        "(layers that are alike, once), `full` or `off`",
    )

    def contradictions(self) -> list[str]:
        """A plug-in that cannot be bound to interfaces; the number of threads given twice."""
        found = super().contradictions()
        if self.backend != "UCX" and self.interfaces != ("all",):
            found.append(
                f"PUSH_WEIGHTS_BACKEND is {self.backend!r}, which cannot be bound to interfaces: accept that with "
                "PUSH_WEIGHTS_INTERFACES=all"
            )
        if self.num_threads and "num_threads" in self.backend_params:
            found.append("PUSH_WEIGHTS_NUM_THREADS and num_threads in PUSH_WEIGHTS_BACKEND_PARAMS: give one of them")
        return found


class ServerSettings(WorkerSettings):
    """Settings of an API process. Errors: InvalidSettings."""

    token: SecretStr = Field(
        default=SecretStr(""),
        description="the bearer token, as good as code execution in the workers. Several, one a line: each is good",
    )
    token_file: Path | None = Field(
        default=None, description="a file that holds it, read at each request; wins over `PUSH_WEIGHTS_TOKEN`"
    )
    allow_anonymous: bool = Field(default=False, description="`1`: start without a token and let everybody in")
    address: Address = Field(default=None, description="`host:port` for our routes alone, apart from vLLM's port")
    ready_after_push: bool = Field(default=False, description="`1`: not ready before the first successful push")

    peers: Names = Field(
        default=None,
        description="other servers of the fleet, by commas: URLs, `dns+http://name:port`, or a file that lists them. "
        "Not ready before the weights of the fleet have been read from one of them, or pushed",
    )

    def contradictions(self) -> list[str]:
        """Everybody is let in, and yet there is a token."""
        found = super().contradictions()
        if self.allow_anonymous and (self.token.get_secret_value() or self.token_file is not None):
            one = "PUSH_WEIGHTS_TOKEN_FILE" if self.token_file is not None else "PUSH_WEIGHTS_TOKEN"
            found.append(
                f"PUSH_WEIGHTS_ALLOW_ANONYMOUS=1 says that no token is needed, and {one} is set: unset one of them"
            )
        return found


class TrainerSettings(_Settings):
    """Settings of a process that pushes, for what it does not say itself. Errors: InvalidSettings."""

    token: SecretStr = Field(default=SecretStr(""), description="the token of the servers")
    token_file: Path | None = Field(
        default=None, description="a file whose first line is the token; wins over `PUSH_WEIGHTS_TOKEN`"
    )
    interfaces: Names = Field(
        default=None, description="network devices for the data, by commas; loopback by default, `all` for any"
    )
    ca_file: Path | None = Field(
        default=None, description="certificates (PEM) of the authorities that servers are checked with"
    )
    cert_file: Path | None = Field(
        default=None, description="the certificate of the trainer, for servers that ask for one"
    )
    key_file: Path | None = Field(default=None, description="its key, where that is in a file of its own")

    def contradictions(self) -> list[str]:
        """A key without its certificate."""
        if self.key_file is not None and self.cert_file is None:
            return ["PUSH_WEIGHTS_KEY_FILE is the key to PUSH_WEIGHTS_CERT_FILE, which is not set"]
        return []


_KUBERNETES = re.compile(r"^\w+(_SERVICE_HOST|_SERVICE_PORT\w*|_PORT_\d+_(TCP|UDP|SCTP)\w*)=|_PORT=(tcp|udp|sctp)://")
"""What Kubernetes puts into pods for a service whose name begins as our settings do (``push-weights``)."""

CATALOGUE: tuple[type[_Settings], ...] = (ServerSettings, TrainerSettings)


def variables(kind: type[_Settings]) -> dict[str, FieldInfo]:
    """The fields of a class by the names of their variables."""
    return {PREFIX + name.upper(): field for name, field in kind.model_fields.items()}


def known() -> set[str]:
    """The names of all variables. One environment may serve a server and a trainer."""
    return {name for kind in CATALOGUE for name in variables(kind)}


def problems(kind: type[_Settings]) -> list[str]:
    """What is wrong in the environment for one kind of process, a sentence each: names, values, contradictions."""
    found = []
    for name in sorted(name for name in os.environ if name.upper().startswith(PREFIX)):
        if name.upper() not in known() and not _KUBERNETES.search(f"{name}={os.environ[name]}"):
            near = difflib.get_close_matches(
                name.upper().removeprefix(PREFIX), [n.removeprefix(PREFIX) for n in known()], 1
            )
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(sorted(known()))}"
            found.append(f"{name} is no setting: {hint}")
    try:
        return found + kind().contradictions()
    except InvalidSettings as error:
        return found + error.problems


def check(kind: type[_Settings]) -> None:
    """Errors: InvalidSettings with everything that `problems` finds."""
    if found := problems(kind):
        raise InvalidSettings(found)


def _problem(kind: type[_Settings], found: Any) -> str:
    """One of pydantic's errors, with the variable, its value unless that is secret, and what is expected."""
    field = str(found["loc"][0]) if found["loc"] else ""
    name = PREFIX + field.upper()
    told = "not understood" if field == "token" else repr(found["input"])
    options = get_args(kind.model_fields[field].annotation) if found["type"] == "literal_error" else ()
    if options:
        *first, last = options
        return f"{name} is {told}: set it to {', '.join(first)} or {last}"
    if found["type"].startswith("bool_"):
        return f"{name} is {told}: set it to 1 or 0"
    return f"{name} is {told}: {found['msg'].removeprefix('Value error, ')}"


@lru_cache(maxsize=4)
def _server(environment: tuple[tuple[str, str], ...]) -> ServerSettings:
    return ServerSettings()


def server() -> ServerSettings:
    """The settings of a server as the environment is now. Errors: InvalidSettings."""
    return _server(tuple(sorted(item for item in os.environ.items() if item[0].upper().startswith(PREFIX))))


def ready_after_push() -> bool:
    """Whether a server that has had no push yet counts as not ready."""
    return server().ready_after_push


def address() -> tuple[str, int] | None:
    """Where the routes have an address of their own. Errors: InvalidSettings."""
    return server().address


def self_check_mode() -> SelfCheck:
    """How much of a trace is compared with real loads: ``sample``, ``full`` or ``off``. Errors: InvalidSettings."""
    return server().self_check


def check_startup() -> None:
    """Errors: InvalidSettings, and those of `check_token`. Warns of weak tokens, and where anonymous use is allowed."""
    check(ServerSettings)
    check_token()
    if any(len(token) < MIN_TOKEN for token in _tokens()):
        logger.warning("the token has less than %d characters: take a random one (openssl rand -hex 32)", MIN_TOKEN)
    if not _tokens():
        logger.warning("PUSH_WEIGHTS_ALLOW_ANONYMOUS=1: whoever reaches this server can take over its workers")


def check_token() -> None:
    """Errors: MissingToken, when no token can be read and anonymous use is not allowed."""
    if not _tokens() and not _anonymous():
        raise MissingToken(
            "weight updates need a token: set PUSH_WEIGHTS_TOKEN or PUSH_WEIGHTS_TOKEN_FILE (a non-empty file), or "
            "PUSH_WEIGHTS_ALLOW_ANONYMOUS=1 where nobody else can reach this server"
        )


def authorize(header: str | None) -> None:
    """Check an Authorization header in constant time. Errors: Unauthorized."""
    tokens = _tokens()
    if not tokens and _anonymous():
        return
    scheme, _, given = (header or "").partition(" ")
    same = [hmac.compare_digest(given.strip().encode(), token.encode()) for token in tokens]
    if not (any(same) and scheme.lower() == "bearer"):
        raise Unauthorized("the bearer token is missing or wrong: send 'Authorization: Bearer <PUSH_WEIGHTS_TOKEN>'")


def own_token() -> str | None:
    """The token that this server shows to its peers: the first of its own."""
    return next(iter(_tokens()), None)


def _anonymous() -> bool:
    """A configured token is required even where anonymous use is allowed; an unreadable token file lets nobody in."""
    now = server()
    return now.allow_anonymous and now.token_file is None


def _tokens() -> list[str]:
    """Every token that is good now."""
    now = server()
    path, text = now.token_file, now.token.get_secret_value()
    if path is not None:
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(MAX_TOKEN_FILE)
        except (OSError, UnicodeDecodeError) as error:
            logger.error("PUSH_WEIGHTS_TOKEN_FILE cannot be read: %s", type(error).__name__)
            return []
    return [line.strip() for line in text.splitlines() if line.strip()]
