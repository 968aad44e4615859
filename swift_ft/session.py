"""The session that a script puts around its training loop.

session = swift_ft.Session({"model": model, "optimizer": optimizer}, store="s3://bucket/run7")
session.attach_pipeline(schedule)           # or session.attach_ddp(model)
for step in session.steps(10_000):
    with step:
        ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch import nn

from swift_ft.checkpoint.library_state import library_state
from swift_ft.checkpoint.step.rollback import CheckStep
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config.worker_context import WorkerContext
from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.errors import (
    NotAttachedError,
    SessionInUseError,
    UnsupportedError,
    UsageError,
)
from swift_ft.host.heap import keep_freed_memory
from swift_ft.logging import Compress, LogBudget, Ship
from swift_ft.runtime.checkpoints.housekeeping import KeepLogs
from swift_ft.runtime.compose import assemble
from swift_ft.runtime.data.iterators import refuse_counted_steps
from swift_ft.runtime.helpers.member import GradientReduction
from swift_ft.runtime.hooks.between import Hook, OnLoss
from swift_ft.runtime.metrics import SessionMetrics, serve_worker_metrics
from swift_ft.runtime.pipeline.script_communication import LIMIT_BYTES
from swift_ft.runtime.pipeline.shared_replay import Helping
from swift_ft.runtime.script.unprotected import UnprotectedSteps, refuse_loaders_that_communicate
from swift_ft.runtime.settings import (
    Settings,
    check_at_least_one,
    check_state,
    check_store,
    choice,
    log_options,
    recovery_groups,
    script_log_limit,
    snapshot_interval,
    with_named_arguments,
)
from swift_ft.runtime.state_proof import Verify
from swift_ft.runtime.steps import Loop, Step
from swift_ft.runtime.verify.part import OnCorruption
from swift_ft.runtime.worker.part import Part
from swift_ft.torch_adapters.pipelining.tied_parameters import TiedParameters

if TYPE_CHECKING:
    from swift_ft.planning.forecast import Forecast

__all__ = ["Session"]

_active: Session | None = None

_BUDGET = LogBudget()


class Session:
    """Protects a training run against the loss of machines.

    Args: the first day
        state: the objects to protect, by name: modules, optimizers, and small objects with ``state_dict()``
            and ``load_state_dict()`` (learning rate schedulers, gradient scalers, a data position).
        store: URL or path for logs and checkpoints. Every machine must reach it.

    Args: checkpoints and logs
        checkpoint_every: iterations between two global checkpoints. Logs are kept that long.
        snapshot_every: iterations between two memory checkpoints, or ``"auto"`` to choose them from what they
            cost. After each, a copy of this worker's state goes to the memory of another machine, in the
            background. A loss that neither replicas nor logs make good then costs at most these iterations,
            and no access to the store. With it a script may attach nothing, and models may be sharded by
            ``fully_shard()``. Takes four copies of each worker's state in its host's memory.
        keep_checkpoints: committed checkpoints to keep. If the newest is damaged, all workers return to the
            one before it.
        keep_logs: ``"newest"`` keeps the logs since the newest checkpoint, which is all that a recovery
            needs. ``"all"`` keeps them since the oldest checkpoint that is kept, so that ``swift-recover
            replay`` can rebuild any stage at any iteration since then. They count towards the budget.
        log_budget_bytes: the memory and the disk that the log of one machine may take. A plain number, or a
            text like ``"4GB"``, holds for each of the two.
        local: folder on the local disk for segments that are not in the store yet, and for copies of the
            newest checkpoint's files that this machine has written. A worker that loads it reads its
            own machine's copies, then those of other machines, and the rest from the store. For a store
            behind a network the default is a temporary folder, without such copies.
        ship: ``"always"``, or ``"on-failure"`` to keep segments on the local disk until a machine is lost.
        compress: ``"auto"`` packs messages while the store takes fewer bytes per second than a core can pack;
            ``"never"``; ``"always"``.
        groups: machines that recover together (paper §5.3), by slot: ``[[0], [1, 2], [3]]``, or the file that
            ``swift-group --out`` wrote. Messages inside a group are not logged. When one of its machines is
            lost, the whole group loads the checkpoint and replays. By default each machine is a group.
        script_log_limit_bytes: what a group of the script may give to a worker in one iteration and still be
            logged. Where it is more, or something else for each member, the members are rebuilt and replay
            together: after a loss, all of them go back. A number, or a text like ``"1MiB"``.

    Args: checks, and random numbers
        check_data: compare the batches of a repeated or replayed iteration with those that it had, and raise
            an error if they differ. False for data that is meant to differ.
        check_step: in which steps all bits of parameters are compared before and after each optimizer's step,
            to find those that the script changes elsewhere (a momentum encoder, weight noise, a clamp): they
            are copied at the beginning of each step then. ``"first"``: in the first three, and in the 16th,
            the 32nd, the 64th and so on; after a loss, a sample of elements is compared. ``"always"``;
            ``"never"``: only after a loss.
        verify: ``"digest"`` compares digests of parameters and optimizer state at each checkpoint boundary:
            of replicas with each other's, of a rebuilt worker with the lost one's, and wherever state is
            loaded or received. If replicas differ, the job ends with an error that names them and the
            tensors. ``"replay"`` does all that, and also computes some steps twice and compares what comes
            out, bit for bit: that finds what a machine computes wrong without any error. Such a step takes
            twice as long, and a copy of the worker's state in the memory of its device. ``"none"`` compares
            nothing. ``swift-run --verify`` overrides it, as ``--verify-every`` and ``--on-corruption`` do the
            next two.
        verify_every: with ``"replay"``, iterations between two steps that are computed twice.
        on_corruption: what follows when a machine has computed something wrong. ``"warn"``: the journal and
            the log name it. ``"drain"``: it is asked to leave as well. ``"stop"``: the job ends.
        seed: of the random state inside steps, which is derived from (seed, iteration, stage, microbatch).

    Raises:
        NotLaunchedError: outside of ``swift-run``.
        SessionInUseError: if this process has a session already.
        StoreNotWritableError: if the store cannot be written.
        UsageError: for invalid arguments.
    """

    @with_named_arguments
    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        store: str,
        checkpoint_every: int = 100,
        snapshot_every: int | str | None = None,
        keep_checkpoints: int = 2,
        keep_logs: str = KeepLogs.NEWEST,
        seed: int = 0,
        log_budget_bytes: int | str | LogBudget = _BUDGET,
        ship: str = Ship.ALWAYS,
        local: str | os.PathLike[str] | None = None,
        compress: str = Compress.AUTO,
        script_log_limit_bytes: int | str = LIMIT_BYTES,
        groups: str | os.PathLike[str] | Sequence[Sequence[int]] | None = None,
        check_data: bool = True,
        check_step: str = CheckStep.FIRST,
        verify: str = Verify.DIGEST,
        verify_every: int = 100,
        on_corruption: str = OnCorruption.WARN,
    ) -> None:
        global _active
        # One in a process, since its hooks on torch's groups and operations are the process's.
        if _active is not None:
            raise SessionInUseError("This process has a session already: use that one, or close() it first.")
        check_state(state)
        check_store(store)
        check_at_least_one(checkpoint_every=checkpoint_every, keep_checkpoints=keep_checkpoints)
        check_at_least_one(verify_every=verify_every)
        context = WorkerContext.from_env()
        run = context.config  # whose flags come before what the script says
        verifies = choice("verify", run.verify or verify, Verify)
        if not dist.is_initialized():
            raise UsageError("Call dist.init_process_group(backend) before the session is made.")
        settings = Settings(
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            seed=seed,
            log=log_options(log_budget_bytes, ship, local, compress, context.workers_per_machine),
            recovery_groups=recovery_groups(groups, context.world_size // context.workers_per_machine),
            check_data=check_data,
            check_step=choice("check_step", check_step, CheckStep),
            snapshot_every=snapshot_interval(snapshot_every),
            script_log_limit_bytes=script_log_limit(script_log_limit_bytes),
            verify=verifies,
            verify_every=(run.verify_every or verify_every) if verifies == Verify.REPLAY else 0,
            on_corruption=choice("on_corruption", run.on_corruption or on_corruption, OnCorruption),
            keep_logs=choice("keep_logs", keep_logs, KeepLogs),
        )
        # A script passes no counters of libraries (accelerate's), and they belong to the state.
        protected = TrainingState({**state, **library_state()})
        # Otherwise the memory of each step would cost page faults again (decision 45).
        keep_freed_memory()
        self._assembly = assemble(context, store, protected, settings)
        self._loop: Loop | None = None  # from the first step on
        self._in_epochs = False
        self._local = Path(local) if local is not None else None
        self._attached: set[str] = set()
        self._has_groups = groups is not None
        self._has_snapshots = snapshot_every is not None
        self._steps_begun = self._steps_asked_for = False
        self._unprotected = UnprotectedSteps(protected.optimizers.values())
        if port := context.config.worker_metrics_port:
            address = context.config.metrics_listen_address(context.address)
            serve_worker_metrics(address, port, context.rank, self.metrics)
        _active = self

    @with_named_arguments
    def attach_pipeline(
        self,
        schedule: Any,
        *,
        build: Callable[[int], nn.Module] | None = None,
        mode: str = GradientReduction.ORDERED,
        helper_memory_bytes: int | None = None,
    ) -> None:
        """Protect a pipeline by logging (paper §5), and let survivors help in a replay (§5.2).

        Args:
            schedule: any schedule of ``torch.distributed.pipelining``.
            build: makes the module of a stage, by its index, as the script itself does. With it survivors
                compute microbatches of a lost stage, which shortens the replay. They receive the stage's
                parameters and inputs, and derive the same random numbers.
            mode: ``"ordered"`` adds gradients up one by one, in the original order: the rebuilt state is
                bit-identical. ``"allreduce"`` adds up each helper's own sum: it takes less memory and time,
                but rounds differently.
            helper_memory_bytes: host memory that a helper's own state may take while it helps. The rest of
                that state goes to the local disk. No limit by default.
        """
        self._attach_once("pipeline")
        helping = Helping(build, choice("mode", mode, GradientReduction), helper_memory_bytes, self._local)
        self._assembly.attached.attach_pipeline(schedule, helping)

    def tie(self, parameter: nn.Parameter, stages: Sequence[int]) -> None:
        """Declare that stages share a parameter, such as an embedding that is also the head.

        Call it after :meth:`attach_pipeline`, on each worker of these stages, in the same order if several
        parameters are shared. Values must be equal at the start; :meth:`sum_tied_gradients` keeps them so.

        Args:
            parameter: this worker's copy.
            stages: the indices of the stages that share it.

        Raises:
            UsageError: this worker does not hold exactly one of the stages, or layers of a LayerStack are on
                them, which move (:meth:`tie_layers`).
        """
        tied = self._tied()
        if self._assembly.attached.layered is not None:
            raise UsageError("Layers of a LayerStack move: name them, as in session.tie_layers(...).")
        tied.tie(parameter, stages)

    def tie_layers(self, first: str, second: str) -> None:
        """Declare that two layers of a :class:`LayerStack` share a parameter, wherever they are.

        Call it after :meth:`attach_pipeline`, on all workers, in the same order if several parameters are
        shared. Values must be equal at the start; :meth:`sum_tied_gradients` keeps them so.

            session.tie_layers("0.token.weight", "9.logits.weight")

        Args:
            first: the number of a layer, and the name of the parameter in it.
            second: the same in another layer.

        Raises:
            UsageError: ``first`` and ``second`` do not name parameters of two layers, or the model is not a
                LayerStack.
        """
        self._tied()
        layered = self._assembly.attached.layered
        if layered is None or layered.tied_layers is None:
            raise UsageError("tie_layers() is for a LayerStack: for other stages there is session.tie().")
        layered.tied_layers.tie(first, second)

    def sum_tied_gradients(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Give tied parameters the sum of all stages' gradients, in each step, before the optimizer's.

        It replaces an all-reduce in a group of the script's own, in which a replay could not take part. All
        workers that share a parameter call it in the same order.

        Args:
            parameters: only these, each once in a step. By default all that this worker has tied.
        """
        self._tied().sum_gradients(parameters)

    def _tied(self) -> TiedParameters:
        if (tied := self._assembly.attached.tied) is None:
            raise NotAttachedError("Call session.attach_pipeline(schedule) before tying its parameters.")
        return tied

    @with_named_arguments
    def attach_ddp(self, model: Any) -> None:
        """Protect a data-parallel model by its replicas (paper §4).

        Random numbers in steps (torch, Python, NumPy) are derived from (seed, iteration, rank). A replacement
        receives its state from a replica, including running statistics (BatchNorm). Where DDP keeps buffers
        equal (``forward_sync_buffers=True``), each step ends with the first replica's on all replicas.

        Args:
            model: a stock ``DistributedDataParallel`` without a communication hook, or what Lightning Fabric
                or ``torch.compile`` has wrapped around one. In a pipeline it is the stage's module, on the
                group of the replicas of this stage: attach both, the pipeline first.
        """
        self._attach_once("DDP model")
        if self._has_groups:
            raise UnsupportedError(
                "groups= is only for pipelines: replicas need no groups. Remove groups= or attach_ddp()."
            )
        self._assembly.attached.attach_ddp(model)

    @with_named_arguments
    def attach_fsdp(self, model: Any) -> None:
        """Protect a model that ``fully_shard`` has sharded within replicas (HSDP), by these replicas.

        The mesh has two dimensions, replicas and shards. A lost worker's shards come from a replica's worker
        with the same shards. Lay the mesh out so that a machine does not hold all copies of a shard. Random
        numbers in steps are derived from (seed, iteration, rank). In a pipeline the model is the module of
        this worker's only stage: attach both, the pipeline first.

        A loss can leave some workers one step ahead of others: :func:`wrap_optimizer` says what that costs.

        Args:
            model: the root module that ``fully_shard`` was applied to.
        """
        self._attach_once("FSDP model")
        self._assembly.attached.attach_fsdp(model)

    @with_named_arguments
    def between(
        self,
        function: Callable[[], Any],
        *,
        every: int = 1,
        then: Callable[[Any], object] | None = None,
        on_loss: str = OnLoss.REPEAT,
    ) -> None:
        """Do something between two steps: validate, save a checkpoint of the script's own, log.

        ``function()`` is called after each iteration whose number, counted from 1, is a multiple of
        ``every``. It may communicate in any way, and call ``schedule.eval()``. A replay does not call it. So
        it must not change what the session protects; ``then`` may:

            session.between(validate, every=100, then=plateau.step)

        All workers call this for the same functions in the same order, before the first step.
        ``session.iteration`` says how many iterations are complete.

        Args:
            function: called without arguments.
            every: iterations between two calls.
            then: called with the result, in a replay too: schedulers, early stopping (:meth:`stop`), the best
                loss so far. It must not communicate. The result must be the same on all workers, and consist
                of numbers, texts, lists and dictionaries.
            on_loss: if a machine is lost in it, ``"repeat"`` it on all workers, or ``"skip"`` it.

        Raises:
            UsageError: for invalid arguments, or after the first step.
        """
        check_at_least_one(every=every)
        if self._loop is not None:
            raise UsageError("Call session.between() before the first step.")
        if not callable(function) or not (then is None or callable(then)):
            raise UsageError(
                "session.between(function, then=...) takes functions: write the name, without calling it."
            )
        hook = Hook(function, every, then, choice("on_loss", on_loss, OnLoss))
        self._assembly.attached.add_hook(hook)

    @with_named_arguments
    def attach_part(self, part: Part) -> None:
        """Have a part of your own called at each moment of this worker's training: see docs/how-to/extend.md.

        Its methods are called after those of swift_ft's parts, in the training thread, on each worker that
        attaches it. ``swift_ft.testing.PartConformanceTests`` says whether it bears what a worker goes
        through.

        Args:
            part: an instance of a subclass of :class:`swift_ft.extend.Part`, with a ``name`` of its own.

        Raises:
            UsageError: it is something else, its name is taken, or the first step has begun.
        """
        if self._loop is not None:
            raise UsageError("Call session.attach_part() before the first step.")
        self._assembly.attached.add_part(part)

    def stop(self) -> None:
        """End training before the next step, in what ``session.between(..., then=...)`` calls.

        Raises:
            UsageError: anywhere else: the workers might not agree.
        """
        if not self._assembly.between.applying:
            raise UsageError(
                "Call session.stop() in what session.between(..., then=...) calls: there all workers agree."
            )
        self._assembly.between.stop.at = self.iteration

    def _attach_once(self, what: str) -> None:
        if what in self._attached:
            raise UsageError(f"A session protects one {what}, and this one has one already.")
        if self._loop is not None:
            raise UsageError(f"Attach the {what} before the first step.")
        self._attached.add(what)

    def _check_attached(self) -> None:
        if not self._attached and not self._has_snapshots:
            raise NotAttachedError(
                "Call session.attach_pipeline(schedule), session.attach_ddp(model) or "
                "session.attach_fsdp(model) before the first step. Session(snapshot_every=...) protects any "
                "other script."
            )

    def __iter__(self) -> NoReturn:
        """Say how to iterate."""
        raise UsageError("Write `for step in session.steps(iterations):`: a session is no loop by itself.")

    @with_named_arguments
    def steps(self, iterations: int) -> Iterator[Step]:
        """Yield the iterations up to ``iterations``. An interrupted one is yielded again.

        After a loss, a replaced worker gets the iterations since its checkpoint as replayed steps, and the
        others get the interrupted one. Ends when every worker has completed the last iteration.

        Args:
            iterations: of the whole run; in an epoch of :meth:`epochs`, of this epoch.

        Raises:
            UsageError: it is called a second time, outside of :meth:`epochs`, or the loop counts its steps.
        """
        if not self._steps_asked_for:
            refuse_counted_steps()
            self._steps_asked_for = True
        if self._in_epochs:
            assert self._loop is not None
            yield from self._loop.steps_of_epoch(iterations)
            return
        yield from self._begin_loop(iterations).steps(iterations)

    @with_named_arguments
    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, from 0. In each, :meth:`steps` yields its steps.

            for epoch in session.epochs(10):
                sampler.set_epoch(epoch)
                for step in session.steps(len(loader)):
                    with step:
                        ...
                scheduler.step()

        A replacement begins in the epoch that the others are in. What the script does before and after the
        steps of an epoch must not communicate. What is before them is done again by a replacement, with the
        variables, rates and generators of then; random numbers there are derived from (seed, epoch). What is
        after them is put back and done again with the last step. An epoch that a loss leads back to is
        yielded again.

        Args:
            count: of epochs in the whole run.

        Raises:
            UsageError: it is called a second time, an epoch does not take all of its steps, or the script
                counts epochs by ``enumerate()``.
        """
        refuse_counted_steps()
        loop = self._begin_loop(None)
        self._in_epochs = True
        yield from loop.epochs(count)

    def _begin_loop(self, iterations: int | None) -> Loop:
        """Begin to train, for so many iterations in all; None in a loop over epochs."""
        self._check_attached()
        if self._steps_begun:
            raise UsageError(
                "session.steps() yields the iterations of the whole run, and the script calls it a second "
                "time. For epochs write `for epoch in session.epochs(epochs):` and, in it, "
                "`for step in session.steps(len(loader)):`.",
                alike=True,
            )
        self._steps_begun = True
        self._unprotected.close()
        # Reported, so that a replacement with another number is refused.
        self._assembly.status.steps = iterations
        if self._loop is None:
            refuse_loaders_that_communicate()
            # Not in the constructor: what is attached until now decides which parts there are.
            self._loop = self._assembly.start(epochs=iterations is None)
        return self._loop

    @property
    def iteration(self) -> int:
        """Iterations that the state has completed."""
        return self._assembly.status.iteration

    @property
    def replica(self) -> int:
        """The number of this worker among its replicas, from 0; 0 without a DDP model."""
        return self._assembly.attached.replica[0]

    @property
    def replicas(self) -> int:
        """Replicas of this worker's model, itself included; 1 without a DDP model."""
        return self._assembly.attached.replica[1]

    def metrics(self) -> SessionMetrics:
        """The activity of this worker, and what logging costs it. May be called from any thread."""
        return self._assembly.metrics()

    def profile(self) -> ChainProfile:
        """The computation and messages measured in the first iterations, as ``swift-group`` reads them.

        Raises:
            UsageError: if there were too few iterations, or the machines are not a chain of pipeline stages.
        """
        return self._assembly.profiler.read()

    def plan(self) -> Forecast:
        """The forecast of each machine's recovery, if it were lost, and its cost (paper §3, §5.4).

        Before the first step the forecast has the ways and the reasons for them, but no costs: these come
        from what all workers measure in the first ten iterations, and from the first part of a checkpoint.
        Print it for a table; ``to_dict()`` is for programs.

        Any worker may call this, after all is attached or between two steps. It waits until all workers have
        either called it too or begun their first step.

        Raises:
            NotAttachedError: if nothing is attached.
            UsageError: if not all workers came that far in time.
        """
        self._check_attached()
        return self._assembly.forecast()

    @property
    def bytes_logged(self) -> int:
        """Payload of the messages that this worker has logged."""
        return self._assembly.log.bytes_logged

    def close(self) -> None:
        """Release the session, so that another one can be made in this process."""
        global _active
        self._unprotected.close()
        if _active is self:
            _active = None
