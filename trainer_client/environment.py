"""What the environment says to a process that pushes: `TrainerSettings`, checked, and the token.

`client`, `control` and the commands ask here for what they are not told by their caller.
"""

from __future__ import annotations

from pathlib import Path

from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.settings import InvalidSettings, TrainerSettings, check


def trainer_settings() -> TrainerSettings:
    """The settings as the environment is now. Errors: InvalidRequest, with everything that is wrong in it."""
    try:
        check(TrainerSettings)
        return TrainerSettings()
    except InvalidSettings as error:
        raise InvalidRequest(f"the environment of this process: {error}", problems=error.problems) from None


def read_token(file: Path | None = None) -> str | None:
    """The token: the first line of ``file``, or of the file that the environment names, or the environment's own.

    Errors: InvalidRequest, for a file without one.
    """
    settings = trainer_settings()
    file = file or settings.token_file
    if file is None:
        return settings.token.get_secret_value().strip() or None
    try:
        token = next((line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()), "")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the token file {file} cannot be read ({type(error).__name__})") from None
    if not token:
        raise InvalidRequest(f"the token file {file} is empty")
    return token
