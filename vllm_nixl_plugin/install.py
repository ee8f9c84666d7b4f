"""Put new weights in place with first-load semantics (the stage: install).

    prepare   in slices, while the engine serves: see `preparation`. Nothing that serves is touched.
    install   carry out what was prepared, the engine being paused: the point of no return

In mode ``streamed`` both are done for one group after the other (`streaming`), and `install` only ends the update.

Called by `plane`, in the worker's main thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_nixl_plugin.binding import Binder
from vllm_nixl_plugin.composition import Held
from vllm_nixl_plugin.errors import InstallFailed, PushWeightsError, said
from vllm_nixl_plugin.model import state_of
from vllm_nixl_plugin.preparation import Preparation
from vllm_nixl_plugin.streaming import Streaming
from vllm_nixl_plugin.wire import Mode

logger = logging.getLogger("vllm.nixl_plugin")


class Installer:
    """See the module. ``preparation``: what has been begun or is ready to be installed; ``streaming``: how far the
    groups of an update are."""

    def __init__(self, worker: Any, number: int, binder: Binder) -> None:
        self.worker = worker
        self.number = number
        self.binder = binder
        self.preparation: Preparation | None = None
        self.streaming: Streaming | None = None
        self._left: list[Preparation | Streaming] = []

    @property
    def idle(self) -> bool:
        """Whether no update uses the twins."""
        return self.preparation is None and self.streaming is None

    def stream(self, held: Held, number: int, hand_back: Callable[[], None]) -> None:
        """Install group ``number``, if it is not; those before it are. ``hand_back``: see `Streaming.install`.

        Errors: NeedsRestart, InstallFailed.
        """
        try:
            work = self.streaming
            if work is None or work.held is not held:
                self.release()
                work = self.streaming = Streaming(self.worker, self.binder, held)
            if work.installed == number:
                work.install(hand_back)
        except Exception as error:
            self.release()
            if isinstance(error, PushWeightsError):
                error.details["untouched"] = False
                raise
            logger.exception("worker %s could not install group %d", self.number, number)
            raise InstallFailed(f"worker {self.number}, group {number}: {said(error)}") from error

    def prepare(self, held: Held, mode: Mode, *, whole: bool) -> bool:
        """Do a slice of what makes an install ready, or all that is left. Returns whether it is ready.

        Errors: NeedsRestart, InstallFailed; always ``untouched`` in shadow mode.
        """
        if mode == "streamed":
            return self.streaming is not None and self.streaming.held is held and self.streaming.done
        try:
            work = self.preparation
            if work is None or work.held is not held or work.mode != mode:
                self.release()
                work = self.preparation = Preparation(self.worker, self.binder, held, mode)
            if not work.done and work.advance(whole=whole):
                self._synchronize()
            return work.done
        except Exception as error:
            self.release()
            if isinstance(error, PushWeightsError):
                error.details["untouched"] = mode == "shadow"
                raise
            logger.exception("worker %s could not prepare an install", self.number)
            raise InstallFailed(
                f"worker {self.number}: {type(error).__name__}: {error}", untouched=mode == "shadow"
            ) from error

    def install(self, held: Held, mode: Mode) -> dict[str, float]:
        """Put the prepared weights in place; seconds by stage (those of `prepare` among them).

        Errors: those of `prepare`, and InstallFailed without ``untouched`` when a copy failed half-way.
        """
        if mode == "streamed":
            return self._end_streaming(held)
        self.prepare(held, mode, whole=True)
        work = self.preparation
        assert work is not None
        start = time.perf_counter()
        try:
            work.note_late()
            for served, shadow in zip(work.live.served, work.live.shadows, strict=True):
                served.copy_(shadow, non_blocking=True)
            for _, change in work.changes:
                change.apply()
            self._synchronize()
        except Exception as error:
            logger.exception("worker %s could not finish an install", self.number)
            raise InstallFailed(f"worker {self.number}: {type(error).__name__}: {error}") from error
        finally:
            copied = time.perf_counter()
            for model, change in work.changes:
                for path, _, value in change.rebinds:
                    model.record.state[path] = state_of(value)
            self.preparation = None
            self._left.append(work)
        self.binder.remainder.installed(held, mode)
        return work.seconds | {"copy": copied - start}

    def _end_streaming(self, held: Held) -> dict[str, float]:
        work = self.streaming
        if work is None or work.held is not held or not work.done:
            raise InstallFailed(f"worker {self.number} has not installed all groups of this update")
        self.streaming = None
        self._left.append(work)
        self.binder.remainder.installed(held, "streamed")
        return work.seconds

    def release(self) -> None:
        """Forget what was prepared; the twins go back to their state at creation."""
        self._left += [work for work in (self.streaming, self.preparation) if work is not None]
        self.streaming = self.preparation = None
        self.tidy()

    @property
    def untidy(self) -> bool:
        """Whether twins still hold what was installed."""
        return bool(self._left)

    def tidy(self) -> None:
        """After an install the twins go back to their state at creation. Who is about to use them calls it first."""
        while self._left:
            self._left.pop().release()

    def _synchronize(self) -> None:
        device = self.binder.device()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
