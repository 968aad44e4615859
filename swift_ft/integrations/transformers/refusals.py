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
    engine = "owns the loop and its communication: let the launcher restart it, with the plain Trainer."
    refused = {
        f"DeepSpeed {engine}": trainer.is_deepspeed_enabled,
        f"FSDP {engine}": trainer.is_fsdp_enabled or bool(args.fsdp),
        f"A model that is sharded as it is loaded {engine}": trainer.is_distributed_loading_by_transformers,
        "train(resume_from_checkpoint=...) and the session's store would both say where to go on: leave it "
        "out. `swift-run --resume` goes on from the store.": resume_from_checkpoint not in (None, False),
        "hyperparameter_search() trains several models in one process, and a session protects one: run it "
        "with the plain Trainer.": trial is not None or trainer.hp_search_backend is not None,
        "auto_find_batch_size trains again with fewer samples whenever one machine has no memory, and the "
        "others do not: set per_device_train_batch_size.": args.auto_find_batch_size,
        "nn.DataParallel drives several devices from one process: start one worker per device, with "
        "`swift-run --workers-per-machine`.": args.n_gpu > 1,
        "enable_jit_checkpoint ends training by itself at a signal: leave it out, the session's checkpoints "
        "are in the store.": args.enable_jit_checkpoint,
        f"{args.optim} updates parameters in the backward pass, while others still compute gradients: choose "
        "an optimizer that has a step.": "lomo" in args.optim or "layerwise" in args.optim,
        "train() was called before, and a session protects one training in a process: start another one for "
        "the second.": trainer.session is not None,
    }
    for message, found in refused.items():
        if found:
            raise UsageError(message)


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
