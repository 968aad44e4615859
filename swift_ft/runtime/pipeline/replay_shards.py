"""The number of workers among which a replay of this worker's stages can be divided."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from swift_ft.config import store_keys
from swift_ft.config.run_config import RunConfig
from swift_ft.runtime.pipeline.script_communication import ScriptCommunication
from swift_ft.runtime.pipeline.shared_replay import Helping
from swift_ft.torch_adapters.fsdp import is_sharded
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore


@dataclass(frozen=True, slots=True)
class ReplayShards:
    """The ways in which a replay of this worker's stages can be divided.

    Attributes:
        config: the run's.
        helping: how survivors help.
        hook: on this worker's schedule and stages.
        stack: has the layers of its stages; None if the script divides its model itself.
        script: what the script communicates.
        rendezvous: says whether any worker calls its schedule several times in a step.
    """

    config: RunConfig
    helping: Helping
    hook: PipelineHook
    stack: LayerStack | None
    script: ScriptCommunication
    rendezvous: RendezvousStore

    @property
    def why_no_helpers(self) -> str:
        """Why no survivor can help in a replay of this worker's stages; empty if they can."""
        if self.config.helpers == 0:
            return "swift-run was given --helpers 0"
        if self.stack is not None and self.stack.pipelines > 1:
            return "nothing is replayed: each layer has replicas"
        if self.stack is not None and self.stack.exact:
            return "gradients are added up by a tree, which helpers do not know (exact=True)"
        if self.helping.build is None and self.stack is None:
            return "attach_pipeline() was given no build"
        if any(is_sharded(stage.submod) for stage in self.hook.stages):
            return "a stage is sharded by fully_shard"
        if self.script.together:
            return "the script communicates what only a replay of all members can repeat"
        if self.rendezvous.check([store_keys.several_calls()]):
            return "the script calls its schedule several times in a step"
        return self.hook.why_not_apart()

    @property
    def most(self) -> int:
        """Among how many workers a replay can be divided; 1 if it cannot be."""
        if self.why_no_helpers:
            return 1
        return most_shards(self.config, self.hook.microbatches, self.hook.device)


def note_several_calls(rendezvous: RendezvousStore) -> None:
    """The script calls its schedule more than once in a step, here at least."""
    rendezvous.set(store_keys.several_calls(), "1")


def most_shards(config: RunConfig, microbatches: int, device: torch.device) -> int:
    """The most workers that a replay is divided among, the replaced one and its helpers.

    Helpers cost bytes and copies, and pay only where each computes at the same time as the others. So workers
    that compute on the cores of one host are no more than these cores, but two at least: one waits while the
    other updates. On two cores, three helpers took 1.15 times as long as one.

    Args:
        config: the run's; ``helpers`` is the user's word.
        microbatches: in an iteration; no worker has less than one.
        device: of the stages.
    """
    if config.helpers is not None:
        return min(microbatches, 1 + config.helpers)
    if not config.on_one_host or device.type != "cpu":  # cores or devices of their own
        return microbatches
    return min(microbatches, max(2, len(os.sched_getaffinity(0)) // torch.get_num_threads()))
