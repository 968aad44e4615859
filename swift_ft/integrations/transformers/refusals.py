"""The trainings of a Trainer that a session does not protect, each refused in one line at its beginning."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from swift_ft.errors import UsageError


def refuse_arguments(trainer: Any, resume_from_checkpoint: Any, trial: Any) -> None:
    """Look at what train() and the Trainer were given.

    Raises:
        UsageError: for the first of them that does not work; says what to do instead.
    """
    args = trainer.args
    sharded = (
        "is no replica of another worker's: shard with fully_shard() in a loop of your own, with "
        "session.attach_fsdp(), or with Session(snapshot_every=...)."
    )
    refused = {
        "DeepSpeed's engine owns the update and its communication, which a session can neither abort nor "
        "repeat: train with the plain Trainer, which `swift-run` restarts as torchrun does.": (
            trainer.is_deepspeed_enabled
        ),
        f"A model that the Trainer shards by FSDP {sharded}": trainer.is_fsdp_enabled or bool(args.fsdp),
        f"A model that is sharded as it is loaded {sharded}": trainer.is_distributed_loading_by_transformers,
        f"A model with a parallelism_config {sharded}": bool(getattr(args, "parallelism_config", None)),
        "train(resume_from_checkpoint=...) and the session's store would both say where to go on: leave it "
        "out. `swift-run --resume` goes on from the store.": resume_from_checkpoint not in (None, False),
        "hyperparameter_search() trains several models in one process, and a session protects one: run it "
        "with the plain Trainer.": trial is not None or trainer.hp_search_backend is not None,
        "auto_find_batch_size trains again with fewer samples whenever one machine has no memory, and the "
        "others do not: set per_device_train_batch_size.": args.auto_find_batch_size,
        "nn.DataParallel drives several devices from one process: start one worker per device, with "
        "`swift-run --nproc-per-node`.": args.n_gpu > 1,
        "enable_jit_checkpoint ends training by itself at a signal: leave it out, the session's checkpoints "
        "are in the store.": args.enable_jit_checkpoint,
        f"optim={args.optim.value!r} updates parameters in the backward pass, while others still compute "
        "gradients: choose an optimizer that has a step.": (
            any(kind in args.optim.value for kind in ("lomo", "layerwise"))
        ),
        "train() was called before, and a session protects one training in a process: start another one for "
        "the second.": trainer.session is not None,
    }
    for message, found in refused.items():
        if found:
            raise UsageError(message)


def refuse_ends(over: bool) -> None:
    """Look at how training has ended.

    Raises:
        UsageError: the session's steps were used up before the Trainer was done.
    """
    if not over:
        raise UsageError(
            "A callback has stopped epochs between two backward passes of an update, so that there were more "
            "steps than updates: stop them in on_step_end."
        )


def refuse_models(model: Any) -> None:
    """Look at what the Trainer has made of the model.

    Raises:
        UsageError: no other worker holds a replica of it.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        raise UsageError(
            f"The Trainer trains a {type(inner).__name__} and no DistributedDataParallel model, so no other "
            "worker holds the same: start the script with `swift-run`, on at least two machines."
        )


def refuse_loaders(loader: Any) -> None:
    """Look at the loader of its training data, which each worker must be able to read alone.

    Raises:
        UsageError: it communicates, or its batches cannot be found again; says what to change.
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise UsageError(
            "The Trainer's loader reads on worker 0 and sends batches to all others, in which a replacement "
            "would wait for ever: set TrainingArguments(accelerator_config={'dispatch_batches': False})."
        )
    if isinstance(loader, DataLoaderShard) and loader.rng_types:
        raise UsageError(
            "The Trainer's loader broadcasts its random state as each epoch begins, in which a replacement "
            "would wait for ever: set TrainingArguments(accelerator_config={'use_seedable_sampler': True})."
        )
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"get_train_dataloader() returned {type(loader).__name__}, whose batches cannot be found again: "
            "return a torch.utils.data.DataLoader."
        )
