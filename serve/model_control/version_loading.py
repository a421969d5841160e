"""Load model versions on a thread beside the event loop: check, load and try out each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from halfserve.protos.certificate_signature import VerifyingKey
from halfserve.serve.engine.backend import CPU_PROVIDERS, ENSEMBLE, Backend, DevicePlacement, ModelKind, Runtime
from halfserve.serve.engine.background_threads import Worker, pause, pausing, sched_batch
from halfserve.serve.engine.config.model_config import DeclaredConfig, Defaults
from halfserve.serve.engine.config.parameters import ignored_settings
from halfserve.serve.engine.ensembles.graph import is_ensemble
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_ensemble, load_version, started
from halfserve.serve.engine.repository.model_repository import ModelFiles
from halfserve.serve.model_control.certificate_check import check_certificate
from halfserve.serve.model_control.memory_check import require_memory
from halfserve.serve.trials.at_load import try_out
from halfserve.serve.trials.recorded_samples import VERDICT_KEY
from halfserve.serve.trials.tried_version import TriedVersion
from halfserve.serve.trials.warm_up import settle

logger = logging.getLogger(__name__)


T = TypeVar("T")
AGAIN_S = 1.0  # seconds until the next attempt to start a thread


class GivenUp:
    """Whether the result of a function is wanted no longer, and what ends it early. Used on both threads."""

    def __init__(self) -> None:
        self._is_set = False
        self._enders: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for end in list(self._enders):
            end()

    def when_set(self, end: Callable[[], None]) -> None:
        """Call `end`, on any thread, once the result is wanted no longer; at once if that is so already. It may come twice."""
        self._enders.append(end)
        if self._is_set:
            end()


_GIVEN_UP: ContextVar[GivenUp | None] = ContextVar("given_up", default=None)  # set while a function runs on a LoaderThread


class _Run(Generic[T]):
    """One function's run on the thread. All methods but `tell` are called on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float | None, leave_behind: Callable[[], None]) -> None:
        self.done: asyncio.Future[T] = loop.create_future()
        self._loop = loop
        self._limit_s = limit_s
        self._leave_behind = leave_behind
        self._overdue: asyncio.TimerHandle | None = None
        self.given_up = GivenUp()
        self.has_started = self.has_ended = False  # set on the thread

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def begin(self) -> None:
        if self._limit_s is not None:
            self._overdue = self._loop.call_later(self._limit_s, self._give_up)

    def end(self, result: T | None, error: BaseException | None) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(result)  # type: ignore[arg-type]  # (None only where T is)
        else:
            self.done.set_exception(error)

    def abandon(self) -> None:
        """End the function early, or skip it, because its caller has gone."""
        self.given_up.set()
        if self.has_started and not self.has_ended:
            self._give_up()

    def _give_up(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        self.given_up.set()
        try:
            self._leave_behind()  # even if its caller has gone, because the function blocks those behind it
        except RuntimeError:  # the process may start no more threads, so the functions behind it wait
            self._overdue = self._loop.call_later(AGAIN_S, self._give_up)
        if not self.done.done():
            self.done.set_exception(TimeoutError(f"not done within {self._limit_s:g} s"))


class LoaderThread:
    """Runs one function after the other beside the event loop, and can abandon one that takes too long.

    Attributes:
        in_service: whether the server takes requests, for which the functions then pause.
    """

    def __init__(self, name: str = "loader", *, works_long: bool = True) -> None:
        """`works_long`: whether its functions take long, and should leave the core to threads that answer requests."""
        self._name = name
        self._worker = Worker(name)
        self._works_long = works_long
        self._is_stopped = False
        self.in_service = False

    async def run(self, function: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
        """Run `function(*arguments)` on the thread; its errors pass through.

        A function that takes longer than `limit_s` seconds, or whose caller is cancelled, is abandoned: a thread cannot be
        killed, so a new one runs the following functions. `GivenUp.when_set` ends it early.

        Raises:
            TimeoutError: it takes longer than `limit_s` seconds.
        """
        run: _Run[T] = _Run(asyncio.get_running_loop(), limit_s, self._leave_behind)

        def work() -> None:
            result, failure = None, None
            run.has_started = True
            if run.given_up:
                return
            token = _GIVEN_UP.set(run.given_up)
            try:
                run.tell(run.begin)
                with self._manners():
                    pause()
                    result = function(*arguments)
            except BaseException as error:  # noqa: BLE001  (the caller gets every error)
                failure = error
            _GIVEN_UP.reset(token)
            run.has_ended = True
            run.tell(run.end, result, failure)

        self._worker.submit(work)
        try:
            return await run.done
        except asyncio.CancelledError:
            run.abandon()
            raise

    def step_aside(self) -> None:
        """Run the following functions on another thread, because the running function waits for one of them.

        Raises RuntimeError if the process may start no more threads.
        """
        self._leave_behind()

    def _leave_behind(self) -> None:
        if self._is_stopped:
            return
        after = Worker(self._name)
        before, self._worker = self._worker, after
        before.hand_over(after)

    @contextlib.contextmanager
    def _manners(self) -> Iterator[None]:
        if not self._works_long:
            yield
            return
        with sched_batch(), pausing(pauses=self.in_service):
            yield

    def stop(self) -> None:
        """End the thread after the running function. Does not wait for it."""
        self._is_stopped = True
        self._worker.stop()


@dataclass(frozen=True, kw_only=True)
class VersionLoader:
    """Makes model versions ready to serve.

    Attributes:
        runtime: reads and loads the model files.
        placement: device and precision for models.
        defaults: settings that a model's configuration leaves open.
        warm_up_budget_s: see `ControlOptions`.
        certificate_key: public key that must have signed the models' certificates; None requires no signature.
    """

    runtime: Runtime
    placement: DevicePlacement
    defaults: Defaults
    warm_up_budget_s: float
    certificate_key: VerifyingKey | None = None

    def load(self, files: ModelFiles) -> Model:
        """Check, load and try out one version, which is not started yet. May be called on any thread.

        Raises:
            ModelLoadError: the version cannot be served; the message gives the reason.
        """
        try:
            verdict = check_certificate(files.model, files.config, self.certificate_key)
            require_memory(files.model, sum(max(1, group.count) for group in files.config.message.instance_group))
            pause()
            model = load_version(files, self.runtime, self.placement, self.defaults)
            if (given_up := _GIVEN_UP.get()) is not None:
                for backend in model.backends:
                    given_up.when_set(backend.give_up)
            _report_ignored(model)
            _report_certificate(model, verdict)
            pause()
            try_out(TriedVersion(model, self.warm_up_budget_s))
        except MemoryError:
            raise ModelLoadError(f"{files.model}: not enough memory to load it; unload another model first") from None
        return model

    def model(self, files: ModelFiles) -> Model:
        """Load and start one version; an ensemble is not yet connected to its steps. May be called on any thread.

        The copies of a device's model run on their own threads first, as those that replace broken ones later do.

        Raises:
            ModelLoadError: the version cannot be served; the message gives the reason.
        """
        if is_ensemble(files.config.message):
            _warn_of_ignored(files.config, ENSEMBLE, on_device=False)
            return load_ensemble(files, self.defaults)
        loaded = self.load(files)
        again = None if loaded.reload is None else partial(self._reloaded, loaded, loaded.reload)
        model = started(replace(loaded, reload=again))  # a copy: `again` must not refer to the model that has it
        tried = TriedVersion(loaded, self.warm_up_budget_s)
        try:
            for instance, backend in zip(model.batcher.instances, model.backends, strict=True):
                instance.settle(partial(settle, tried, backend))
        except BaseException:
            for instance in model.batcher.instances:
                instance.stop()
            raise
        return model

    def _reloaded(self, model: Model, again: Callable[[int], Backend], number: int) -> Backend:
        backend = again(number)
        settle(TriedVersion(model, self.warm_up_budget_s), backend)
        return backend


def _report_ignored(model: Model) -> None:
    on_device = any(backend.provider not in CPU_PROVIDERS for backend in model.backends)
    _warn_of_ignored(model.declared, model.interface.kind, on_device=on_device)


def _warn_of_ignored(declared: DeclaredConfig, kind: ModelKind, *, on_device: bool) -> None:
    ignored = ignored_settings(declared.message, kind, on_device=on_device)
    if ignored:
        logger.warning("%s: no effect here: %s", declared.source, ", ".join(ignored))


def _report_certificate(model: Model, verdict: str | None) -> None:
    if verdict is None:
        return
    model.config.parameters[VERDICT_KEY].string_value = verdict
    if verdict == "failed":
        logger.warning("%s: its certificate says that it is less accurate than its budget allows", model.path)
