"""The command line, ``vllm-nixl``: puts the commands of `trainer_client.commands` together.

Each command is a call or two of the library. Results go to standard output, errors to standard error as one line, and
the exit status is 0 only when every server did what was asked (`verify`: 0 equal, 1 different, 2 not compared). The
token is read from PUSH_WEIGHTS_TOKEN or a file, never from the command line, where other users could see it.
"""

from __future__ import annotations

import os
import sys

import typer

from trainer_client.commands import (
    bench,
    catch_up,
    doctor,
    fingerprint,
    generation,
    plan,
    push,
    status,
    timeline,
    verify,
)
from vllm_nixl_plugin.errors import PushWeightsError

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False,
    help="Update the weights of running vLLM servers by one-sided NIXL writes.",
)  # fmt: skip

app.command()(push.push)
app.command()(bench.bench)
app.command("catch-up")(catch_up.catch_up)
app.command()(status.status)
app.command()(plan.plan)
app.command()(generation.pause)
app.command()(generation.resume)
app.command()(fingerprint.fingerprint)
app.command()(doctor.doctor)
app.command()(timeline.timeline)
app.command(context_settings={"allow_extra_args": True})(verify.verify)


def main() -> None:
    """The entry point. Errors of this project, and of files (a full disk), end as one line and exit status 1."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except PushWeightsError as error:
        print(f"error: {error.code}: {error.message}", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        os._exit(1)  # an orderly end would try to write once more


if __name__ == "__main__":
    main()
