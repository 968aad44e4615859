"""torchtitan's own Trainer and loop, protected.

    swift-run FLAGS -m swift_ft.integrations.torchtitan ARGUMENTS

The arguments are those of ``torchtitan.train``, and these:

    --swift.store URL             where logs and checkpoints of swift_ft go (<dump_folder>/swift_ft)
    --swift.checkpoint_every N    iterations between two global checkpoints (100)
    --swift.snapshot_every N      iterations between two memory checkpoints, or auto (auto without pp and
                                  dp_replicate, which need none)

torchtitan's loop stays its own. What it asks before each step (``should_continue_training``) takes the next
one of the session: after a loss the interrupted one again. What communicates between two steps, checkpoints
and validation, is called by the session (``session.between``); the loop's own calls of them do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torchtitan.config import ConfigManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.train import main as torchtitan_main
from torchtitan.trainer import Trainer

from swift_ft.coordination.setup_communication import SetupCommunication
from swift_ft.errors import UsageError
from swift_ft.integrations.torchtitan_batches import StepBatches
from swift_ft.optim import wrap_optimizer
from swift_ft.session import Session
from swift_ft.torch_adapters.lasting_group import LastingGroup

if TYPE_CHECKING:
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.components.validate import BaseValidator


@dataclass(frozen=True)
class Options:
    """Arguments beside torchtitan's.

    Attributes:
        store: of the session; None for a folder below torchtitan's own.
        checkpoint_every: iterations between two global checkpoints.
        snapshot_every: iterations between two memory checkpoints; None for what the mesh needs.
    """

    store: str | None = None
    checkpoint_every: int = 100
    snapshot_every: int | str | None = None


class Protected(Trainer):  # type: ignore[misc]
    """A trainer of torchtitan's whose steps are a session's. :func:`protect` puts it before a class."""

    options: ClassVar[Options] = Options()

    session: Session

    def __init__(self, config: Trainer.Config) -> None:
        spec = config.model_spec
        if spec is not None:
            config.model_spec = replace(spec, parallelize_fn=_given_later(spec.parallelize_fn))
        super().__init__(config)
        for part in self.model_parts:
            for name in _OF_WEIGHTS:
                vars(part).pop(name, None)

    def train(self) -> None:
        """Torchtitan's loop, with the session's steps."""
        check(self.config)
        readers = self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None
        self._batches = StepBatches(
            self.dataloader,
            self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches,
            readers.get_local_rank() if readers is not None else 0,
        )
        self.session = self._protected()
        self._steps = self.session.steps(self.config.training.steps)
        self._loaded_step = 0
        with self._loop_without_others():
            super().train()

    def should_continue_training(self) -> bool:
        """Take the session's next step: after a loss it is the interrupted one again, or an earlier one."""
        self._step = next(self._steps, None)
        if self._step is None:
            return False
        self.step = self._step.index  # the loop adds one
        if self._loaded_step and self.step == 0:
            raise UsageError(
                f"torchtitan has loaded its own checkpoint of step {self._loaded_step}, and under swift-run "
                "a run begins at step 0: go on from swift_ft's checkpoints with swift-run --resume, or "
                "choose another --checkpoint.folder.",
                alike=True,
            )
        return True

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """One step, which a loss may interrupt: then the loop asks for it again."""
        del data_iterator  # it does not go back
        assert self._step is not None
        with self._step as step:
            super().train_step(self.batch_generator(self._batches[step.index]))

    def _protected(self) -> Session:
        """The session of this trainer's state, with all that its mesh offers."""
        dims, options = self.parallel_dims, self.options
        replicas = dims.dp_replicate_enabled and not dims.ep_enabled and len(self.model_parts) == 1
        if replicas:
            for optimizer in self.optimizers:
                wrap_optimizer(optimizer, exact=True)
        snapshots = options.snapshot_every
        if snapshots is None and not (replicas or dims.pp_enabled):
            snapshots = "auto"
        session = Session(
            {
                **{f"model{number}": part for number, part in enumerate(self.model_parts)},
                "optimizers": self.optimizers,
                "lr_schedulers": self.lr_schedulers,
                "train_state": _TrainState(self),
                "data": self._batches,
            },
            store=options.store or f"{self.config.dump_folder}/swift_ft",
            checkpoint_every=options.checkpoint_every,
            snapshot_every=snapshots,
        )
        if dims.pp_enabled:
            session.attach_pipeline(self.pp_schedule)
        if replicas:
            session.attach_fsdp(self.model_parts[0])
        return session

    @contextlib.contextmanager
    def _loop_without_others(self) -> Iterator[None]:
        """Within the block, torchtitan's loop communicates in steps only.

        Its checkpoints and its validation are the session's. The deadlines of its process groups stay: the
        groups are new after each loss, and the session sees a silent machine itself.
        """
        checkpointer: Any = vars(self)["checkpointer"]
        validator: Any = getattr(self, "validator", None)
        total = self.config.training.steps

        def save() -> None:
            checkpointer.save(self.step, last_step=self.step == total)

        def validate() -> None:
            if validator.should_validate(self.step):
                validator.validate(self.model_parts, self.step)

        if self.config.checkpoint.enable:
            self.session.between(save)
        if validator is not None:
            self.session.between(validate)
            self.validator = cast("BaseValidator", _Never())
        self.checkpointer = cast("BaseCheckpointManager", _InLoop(self, checkpointer))
        set_timeouts = dist_utils.set_pg_timeouts
        dist_utils.set_pg_timeouts = lambda **_: None
        try:
            yield
        finally:
            dist_utils.set_pg_timeouts = set_timeouts
            self.checkpointer = checkpointer
            if validator is not None:
                self.validator = validator

    def load_own_checkpoint(self, load: Callable[[], bool]) -> bool:
        """Load torchtitan's checkpoint, unless the others are training already: then a recovery gives it."""
        setup = LastingGroup.interceptor
        if not isinstance(setup, SetupCommunication) or setup.joins:
            return False
        with setup.left_out():  # a replacement does without
            found = load()
        self._loaded_step = self.step
        return found


_OF_WEIGHTS = ("init_weights", "state_dict")
"""Methods of a model that a trainer calls while it is made, for the first weights."""


def _given_later(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    """Parallelizes a model as torchtitan does; what its weights are in a replacement, a recovery says.

    Of what they share, workers make the first weights together, and show them together (fused projections
    gather their parts). A replacement would wait there for others that are in the middle of training.
    """

    @functools.wraps(parallelize)
    def parallelized(model: Any, **rest: Any) -> Any:
        model = parallelize(model, **rest)
        for name in _OF_WEIGHTS:
            setattr(model, name, _without_others(getattr(model, name)))
        return model

    return parallelized


def _without_others(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def alone(*args: Any, **kwargs: Any) -> Any:
        setup = LastingGroup.interceptor
        with setup.given_later() if isinstance(setup, SetupCommunication) else contextlib.nullcontext():
            return method(*args, **kwargs)

    return alone


class _TrainState:
    """A trainer's own state: its counters."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """As torchtitan's checkpoints have it."""
        state: dict[str, Any] = self._trainer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._trainer.load_state_dict(state)


class _InLoop:
    """A checkpointer as the loop sees it: it saves between two steps only, where the session calls it."""

    def __init__(self, trainer: Protected, checkpointer: Any) -> None:
        self._trainer = trainer
        self._checkpointer = checkpointer

    def load(self, step: int = -1) -> bool:
        """Before the first step."""
        return self._trainer.load_own_checkpoint(lambda: self._checkpointer.load(step=step))

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Nothing."""
        return False

    def maybe_wait_for_staging(self) -> None:
        """Nothing is saved in the background."""


class _Never:
    """A validator as the loop sees it."""

    def should_validate(self, step: int) -> bool:
        """The session calls the trainer's own."""
        return False


def check(config: Trainer.Config) -> None:
    """Refuse what could not be protected.

    Raises:
        UsageError: says which argument, and what to do.
    """
    if not config.training.disable_cuda_graphs:
        raise UsageError(
            "A captured CUDA graph holds on to process groups, which are made anew after a loss: add "
            "--training.disable_cuda_graphs.",
            alike=True,
        )
    if config.checkpoint.enable and getattr(config.checkpoint, "async_mode", "disabled") != "disabled":
        raise UsageError(
            "A checkpoint that torchtitan saves in the background communicates there, where no loss is "
            "noticed: add --checkpoint.async_mode disabled.",
            alike=True,
        )


def protect(trainer: type[Trainer], options: Options) -> type[Protected]:
    """A subclass of a trainer of torchtitan's that its own ``Config`` builds from now on.

    Args:
        trainer: torchtitan's, or one of an experiment or of your own.
        options: for its session.
    """
    # By ``Config`` in its body torchtitan knows which class a configuration builds.
    body = {"options": options, "Config": trainer.Config, "__doc__": trainer.__doc__}
    return type(f"Protected{trainer.__name__}", (Protected, trainer), body)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swift_ft.integrations.torchtitan",
        add_help=False,
        allow_abbrev=False,
        usage="%(prog)s ARGUMENTS",
    )
    group = parser.add_argument_group("swift_ft, beside the arguments of torchtitan.train")
    add = group.add_argument
    add("--swift.store", metavar="URL", help="where logs and checkpoints go (<dump_folder>/swift_ft)")
    add(
        "--swift.checkpoint_every",
        type=int,
        default=100,
        metavar="N",
        help="steps between two global checkpoints (100)",
    )
    add(
        "--swift.snapshot_every",
        type=lambda text: text if text == "auto" else int(text),
        metavar="N|auto",
        help="steps between two memory checkpoints (auto, where there is neither pp nor dp_replicate)",
    )
    return parser


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Our arguments, and torchtitan's."""
    ours, theirs = _parser().parse_known_args([*arguments])
    values = {name.partition(".")[2]: value for name, value in vars(ours).items()}
    return Options(**values), [argument for argument in theirs if argument != "--"]


def main() -> None:
    """``torchtitan.train``, protected."""
    options, arguments = parse(sys.argv[1:])
    if {"-h", "--help"} & {*arguments}:
        _parser().print_help()
    sys.argv[1:] = arguments
    # Asks once more what torchtitan will ask: only then is known which trainer the configuration builds.
    config = ConfigManager().parse_args()
    protect(type(config)._owner or Trainer, options)
    torchtitan_main()


if __name__ == "__main__":
    main()
