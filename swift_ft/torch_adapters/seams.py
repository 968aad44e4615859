"""The private parts of torch that must be there, and what is not protected without them.

A torch that is newer than the tested ones may have changed any of them. So at the start of a run on such a
torch all are looked for (:func:`unprotected`), and one line says what would be lost, before it is. Parts that
only objects have, such as those of a stage, are looked for in the code of their class.

Names are looked for, and of functions that are replaced or called by position, their arguments. What a part
does is shown by the tests of the files in the table of the package ``swift_ft.torch_adapters`` (tested on
torch 2.11 to 2.14).
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.torch_version import TorchVersion

_logger = logging.getLogger(__name__)

TESTED = ("2.11", "2.14")
"""The first and the last release of torch that all tests were run on."""


@dataclass(frozen=True)
class Seam:
    """Private parts of torch that one purpose needs.

    Attributes:
        purpose: what is not protected without them; completes "torch 9.9 lacks what is needed for".
        parts: ``module:attributes``; after a second colon, names in the code of a class. Where ``|`` stands
            between two, which are of different releases, one is enough. In parentheses, the arguments of a
            function that any tested release has: one more is a change.
    """

    purpose: str
    parts: tuple[str, ...]


_C10D = "torch.distributed.distributed_c10d"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_STAGE = "torch.distributed.pipelining.stage"
_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
_FSDP = "torch.distributed.fsdp._fully_shard"
_OF_STEP = "arg_mbs kwarg_mbs target_mbs losses return_outputs loss_kwargs"

SEAMS = (
    Seam(
        "the undo of an update",
        (
            *("torch:Tensor._version", "torch:Tensor._indices", "torch:Tensor._values"),
            "torch:UntypedStorage._cdata",
            "torch.optim.optimizer:Optimizer.profile_hook_step",
            "torch.optim.optimizer:_default_to_fused_or_foreach",
            *("torch.optim:AdamW._init_group", "torch.optim:SGD._init_group"),
            "torch.optim._muon:_zeropower_via_newtonschulz",
            "torch.optim._muon:_adjust_lr",
        ),
    ),
    Seam(
        "what a step changes",
        (
            "torch.nn:Module:_buffers",
            "torch.nn:Module:_modules",
            "torch.nn:Module:_parameters",
            "torch.nn:Module:_load_state_dict_post_hooks",
        ),
    ),
    Seam(
        "the communication of a script",
        (
            f"{_C10D}:_new_process_group_helper(group_size group_rank global_ranks_in_group backend store "
            "group_name backend_options timeout pg_tag device_id group_desc enable_reconfigure)",
            "torch.distributed:batch_isend_irecv(p2p_op_list)",
            f"{_C10D}:_world",
            f"{_C10D}:_register_process_group",
            f"{_C10D}:_unregister_process_group",
            f"{_C10D}:ProcessGroupGloo",
            f"{_C10D}:ProcessGroup._device_types",
        ),
    ),
    Seam(
        "replicas by DistributedDataParallel",
        (
            f"{_DDP}._ddp_init_helper(parameters expect_sparse_gradient param_to_name_mapping static_graph)",
            f"{_DDP}._sync_buffers()",
            f"{_DDP}._pre_forward",
            f"{_DDP}._build_debug_param_to_name_mapping(parameters)",
            f"{_DDP}._build_params_for_reducer",
            f"{_DDP}:parameters_to_ignore",
            f"{_DDP}:_comm_hooks",
            f"{_DDP}:require_forward_param_sync",
            "torch.distributed:_compute_bucket_assignment_by_size",
        ),
    ),
    Seam(
        "shards of fully_shard",
        (
            "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
            f"{_FSDP}._fsdp_state:FSDPState:_is_root",
            f"{_FSDP}._fsdp_state:FSDPState:_state_ctx",
            f"{_FSDP}._fsdp_param_group:FSDPParamGroup._to_sharded",
            f"{_FSDP}._fsdp_param_group:FSDPParamGroup.is_sharded",
            f"{_FSDP}._fsdp_param_group:FSDPParamGroup:fsdp_params",
            f"{_FSDP}._fsdp_param_group:FSDPParamGroup:_all_gather_result",
            f"{_FSDP}._fsdp_param:FSDPParam:unsharded_accumulated_grad",
        ),
    ),
    Seam(
        "distributed tensors",
        (
            "torch.distributed.tensor:DTensor:_local_tensor",
            "torch.distributed.tensor._dtensor_spec:DTensorSpec",
            "torch.distributed.tensor._dtensor_spec:TensorMeta",
            "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
            "torch.distributed.tensor.placement_types:_StridedShard",
            "torch.distributed.tensor:Shard._shard_tensor",
            "torch.distributed.tensor:Replicate._make_replicate_tensor",
        ),
    ),
    Seam(
        "pipelines",
        (
            f"{_SCHEDULES}:_batch_p2p(p2p_ops desc)",
            f"{_SCHEDULES}:_wait_batch_p2p(work)",
            f"{_SCHEDULES}:_ComputationType",
            f"{_SCHEDULES}:PipelineScheduleSingle._step_microbatches({_OF_STEP})",
            f"{_SCHEDULES}:PipelineScheduleMulti._step_microbatches({_OF_STEP})",
            f"{_SCHEDULES}:PipelineScheduleSingle._check_inputs",
            f"{_SCHEDULES}:PipelineScheduleSingle._compute_loss",
            f"{_SCHEDULES}:PipelineScheduleSingle._update_losses",
            f"{_SCHEDULES}:PipelineScheduleSingle._initialize_stage(args kwargs target loss_kwargs)",
            f"{_SCHEDULES}:PipelineScheduleMulti._initialize_stages(args kwargs target loss_kwargs)",
            f"{_SCHEDULES}:PipelineScheduleSingle:_stage",
            f"{_SCHEDULES}:PipelineScheduleMulti:_stages",
            f"{_SCHEDULES}:PipelineScheduleMulti:pipeline_order",
            f"{_SCHEDULES}:_PipelineSchedule:_n_microbatches",
            f"{_SCHEDULES}:_PipelineSchedule:_internal_losses",
            f"{_SCHEDULES}:_PipelineSchedule:_args_chunk_spec",
            f"{_STAGE}:_PipelineStageBase:stage_index_to_group_rank",
            f"{_STAGE}:_PipelineStageBase:bwd_cache",
            f"{_STAGE}:_PipelineStageBase:args_recv_info",
            f"{_STAGE}:_PipelineStageBase:act_send_info",
            f"{_STAGE}:_PipelineStageBase.get_fwd_send_ops(fwd_chunk_id)",
            f"{_STAGE}:_PipelineStageBase.get_bwd_send_ops(bwd_chunk_id)",
            f"{_STAGE}:_PipelineStageBase.forward_one_chunk(fwd_chunk_id args kwargs save_forward_output)",
            f"{_STAGE}:_PipelineStageBase.backward_one_chunk(bwd_chunk_id loss full_backward last_backward)",
            f"{_STAGE}:_PipelineStageBase.set_local_fwd_input",
            f"{_STAGE}:_PipelineStageBase.set_local_bwd_input",
            f"{_STAGE}:_PipelineStageBase.scale_grads",
            f"{_STAGE}:PipelineStage._prepare_forward_infra(num_microbatches args kwargs has_backward)",
        ),
    ),
    Seam(
        "checkpoints",
        (
            "torch.distributed.checkpoint._fsspec_filesystem:FileSystem.init_path",
            "torch.distributed.checkpoint:FileSystemReader._slice_file",
            "torch.distributed.checkpoint:FileSystemWriter._write_data",
            "torch.distributed.checkpoint._traverse:set_element",
            "torch.distributed._shard._utils:narrow_tensor_by_index",
            "torch._C:PyTorchFileReader",
            "torch._utils:_rebuild_tensor_v2",
            "torch.storage:_dtype_to_storage_type_map",
        ),
    ),
    Seam(
        "the launcher",
        (
            "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._shutdown("
            "death_sig timeout)",
            "torch.distributed.elastic.agent.server.api:SimpleElasticAgent._initialize_workers(worker_group)",
            "torch.distributed.elastic.multiprocessing.api:PContext._poll",
        ),
    ),
)


def is_newer_than_tested(version: str = torch.__version__) -> bool:
    """Whether a torch is of a later release than the last tested one."""
    major, minor = map(int, TESTED[1].split("."))
    return bool(TorchVersion(version) >= f"{major}.{minor + 1}.0.dev0")


def warn_if_newer(version: str = torch.__version__) -> None:
    """Say, at the start, what a torch that nobody has tested this with lacks."""
    if not is_newer_than_tested(version):
        return
    lacking = unprotected()
    lacks = [f"{purpose} ({', '.join(parts)})" for purpose, parts in lacking.items()]
    found = (
        f"it lacks what is needed for {'; '.join(lacks)}" if lacks else "all parts that are used are there"
    )
    _logger.warning(
        "torch %s is newer than those that all tests were run on (%s to %s): %s",
        version,
        *TESTED,
        found,
        extra={"event": "torch_is_newer", "lacks": [*lacking]},
    )


def unprotected() -> dict[str, list[str]]:
    """By purpose, the parts that the installed torch lacks. Empty if all are there."""
    found = {seam.purpose: missing(seam) for seam in SEAMS}
    return {purpose: parts for purpose, parts in found.items() if parts}


def missing(seam: Seam) -> list[str]:
    """Those of its parts that the installed torch lacks."""
    return [_said(part) for part in seam.parts if not any(_is_there(one.strip()) for one in part.split("|"))]


def _said(part: str) -> str:
    name, _, arguments = part.partition("(")
    return f"{name} without further arguments" if arguments and _is_there(name) else name


def _is_there(part: str) -> bool:
    part, _, arguments = part.partition("(")
    module, attributes, *of_objects = part.split(":")
    try:
        owner: Any = importlib.import_module(module)
        for name in attributes.split("."):
            owner = getattr(owner, name)
    except (ImportError, AttributeError):
        return False
    if arguments and not {*inspect.signature(owner).parameters} <= {"self", *arguments.rstrip(")").split()}:
        return False
    return all(_is_named(owner, name) for name in of_objects)


def _is_named(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute, as far as its code, or that of a base, tells."""
    if hasattr(kind, name):
        return True
    return any(
        name in inspect.get_annotations(one) or name in function.__code__.co_names
        for one in kind.__mro__
        for function in [*filter(inspect.isfunction, vars(one).values())]
    )
