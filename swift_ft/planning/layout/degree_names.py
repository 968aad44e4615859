"""Degrees of parallelism from what other frameworks are configured with. Pure.

torchtitan's configuration (TOML, JSON, or fields of its dataclass), Megatron-LM's arguments (a command line,
or JSON with their names), DeepSpeed's JSON, Tenplex's T, P and D, and short text as ``dp=2,tp=2``. Names that
say nothing of degrees are skipped. One that looks like a degree and is unknown is an error, and so is one
that asks for stages that a layout cannot have.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.degrees import (
    PP_SLOWEST,
    Degrees,
    as_number,
    from_names,
    parse_degrees,
    unknown,
)

_Pairs = Sequence[tuple[str, object]]

TORCHTITAN = {
    "data_parallel_replicate_degree": "dp",
    "data_parallel_shard_degree": "dp_shard",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep",
}
MEGATRON = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "data_parallel_size": "dp",
}
DEEPSPEED = {
    "tensor_parallel.autotp_size": "tp",
    "pipeline.stages": "pp",
    "sequence_parallel_size": "cp",
    "data_parallel_size": "dp",
}
TENPLEX = {"T": "tp", "P": "pp", "D": "dp"}

_MEGATRON_STAGES = {
    "num_layers": "layers",
    "num_layers_per_virtual_pipeline_stage": "virtual",
    "num_virtual_stages_per_pipeline_rank": "per_worker",
    "virtual_pipeline_model_parallel_size": "per_worker",
    "decoder_first_pipeline_num_layers": "first",
    "num_layers_in_first_pipeline_stage": "first",
    "decoder_last_pipeline_num_layers": "last",
    "num_layers_in_last_pipeline_stage": "last",
}
_NO_AXIS = ("expert_tensor_parallel_size",)  # cuts experts only, which no profile of layers tells apart
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_OWN_CUTS: dict[str, tuple[object, ...]] = {
    "pipeline_parallel_module_fqns_per_model_part": (None, []),
    "module_fqns_per_model_part": (None, []),
    "pipeline_parallel_layers_per_stage": (None,),
    "pipeline_parallel_first_stage_less_layers": (1,),
    "pipeline_parallel_last_stage_less_layers": (1,),
    "pipeline_model_parallel_layout": (None,),
    "account_for_embedding_in_pipeline_split": (None, False),
    "account_for_loss_in_pipeline_split": (None, False),
}
"""Names that ask for other stages than are read here, and the values that do not."""

_DEEPSPEED_SIGNS = {
    "zero_optimization",
    "tensor_parallel",
    "pipeline",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
}
_DEGREE = re.compile(r"\w*para\w*_(degree|size)|(tensor|pipeline|context|expert|data)_parallel")


def degrees_of(text: str, workers: int | None = None) -> Degrees:
    """Degrees from any text that is understood.

    Args:
        text: the contents of a file, or short text.
        workers: all of them; needed where a degree is what is left of them. None if they follow.

    Raises:
        UsageError: if nothing in it is a degree, a name is unknown or there twice, or a value does not fit.
    """
    stripped = text.strip()
    if stripped.startswith("{"):
        return degrees_from_mapping(_json(stripped), workers)
    if re.search(r"(?m)^\s*\[", stripped):
        try:
            return degrees_from_mapping(tomllib.loads(stripped), workers)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"not valid TOML: {error}") from None
    if re.search(r"(^|\s)--\w", stripped):
        return _of_arguments(stripped, workers)
    return parse_degrees(stripped, workers)


def degrees_from_mapping(data: Mapping[str, object], workers: int | None = None) -> Degrees:
    """Degrees from names and values, as from JSON or ``dataclasses.asdict``; sections may be nested.

    Raises:
        UsageError: as for :func:`degrees_of`.
    """
    pairs = [(name.replace("-", "_"), value) for name, value in _leaves(data)]
    plain = [(name.rpartition(".")[2], value) for name, value in pairs]
    workers = _all_workers(plain, workers)
    if data.keys() and data.keys() <= TENPLEX.keys():
        return from_names([(n, as_number(n, v)) for n, v in pairs], TENPLEX, workers, order=PP_SLOWEST)
    if any(name in TORCHTITAN for name, _ in plain):
        return _torchtitan(plain, workers)
    if any(name in MEGATRON for name, _ in plain):
        return _megatron(plain, workers)
    if _DEEPSPEED_SIGNS & data.keys() or any(name in DEEPSPEED for name, _ in pairs):
        return _deepspeed(pairs, workers)
    for name, _ in plain:
        if _DEGREE.fullmatch(name):
            raise unknown(name, [*TORCHTITAN, *MEGATRON, *DEEPSPEED, *TENPLEX])
    raise UsageError(
        "no degree of parallelism is in it: give names of torchtitan, Megatron-LM or DeepSpeed, or dp=2,tp=2"
    )


def _all_workers(pairs: _Pairs, workers: int | None) -> int | None:
    """All workers, where a configuration says how many there are."""
    said = dict(pairs).get("world_size")
    if said is None:
        return workers
    found = as_number("world_size", said)
    if workers not in (None, found):
        raise UsageError(f"world_size={found}, and {workers} workers were given: give one of them")
    return found


def _of_arguments(text: str, workers: int | None) -> Degrees:
    """From a command line: Megatron's names, or torchtitan's with their section before them."""
    pairs: list[tuple[str, object]] = []
    try:
        tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"the arguments cannot be read: {error}") from None
    for token, following in zip(tokens, [*tokens[1:], "--"], strict=True):
        if not token.startswith("--"):
            continue
        name, equals, value = token[2:].partition("=")
        given: object = value if equals else True if following.startswith("--") else following
        pairs.append((name.rpartition(".")[2].replace("-", "_"), given))
    workers = _all_workers(pairs, workers)
    is_torchtitan = any(name in TORCHTITAN for name, _ in pairs)
    return (_torchtitan if is_torchtitan else _megatron)(pairs, workers)


def _torchtitan(pairs: _Pairs, workers: int | None) -> Degrees:
    """Of FSDP's workers, expert parallelism takes some; what is not said is left to FSDP."""
    _refuse_own_cuts(pairs)
    given = _degrees_in(pairs, TORCHTITAN, lambda name: name.endswith("_degree"))
    experts, rest = _experts(given, "expert_parallel_degree")
    # Degrees of all workers first: that is what they must fit. Experts take theirs from them afterwards.
    degrees = from_names(rest, TORCHTITAN, workers, rest="dp_shard", order=PP_SLOWEST)
    return _deal_experts(replace(degrees, first_more=True), experts)


def _megatron(pairs: _Pairs, workers: int | None) -> Degrees:
    """Data parallelism is what is left."""
    _refuse_own_cuts(pairs)
    looks = re.compile(r"\w*parallel_size|\w*pipeline_(num_layers|stage|rank)|data_parallel_degree")
    known = dict.fromkeys((*MEGATRON, *_MEGATRON_STAGES, *_NO_AXIS))
    given = _degrees_in(pairs, known, lambda name: bool(looks.fullmatch(name)))
    if not any(name in MEGATRON for name, _ in given):
        raise UsageError(f"no degree of parallelism is in it: give one of {', '.join(MEGATRON)}")
    experts, rest = _experts([(n, v) for n, v in given if n in MEGATRON], "expert_model_parallel_size")
    degrees = from_names(rest, MEGATRON, workers, rest="dp", order=PP_SLOWEST)
    flags = {name: value for name, value in pairs if value not in (None, False, "false", "False")}
    if "use_tp_pp_dp_mapping" in flags:
        degrees = replace(degrees, order=("dp", "dp_shard", "pp", "ep", "cp", "tp"))
    per_worker, cut = _megatron_stages([(n, v) for n, v in given if n in _MEGATRON_STAGES], degrees.pp)
    degrees = replace(degrees, stages_per_worker=per_worker, cut=cut)
    return _deal_experts(_share(degrees, _megatron_zero(flags)), experts)


def _megatron_zero(flags: Mapping[str, object]) -> int:
    """The stage of ZeRO that shares as much."""
    if "use_torch_fsdp2" in flags:
        return 3
    if "use_megatron_fsdp" in flags or "use_custom_fsdp" in flags:
        strategy = flags.get("data_parallel_sharding_strategy", "no_shard")
        if strategy not in _STRATEGIES:
            raise UsageError(
                f"data_parallel_sharding_strategy is {strategy!r}: known are {', '.join(_STRATEGIES)}"
            )
        return _STRATEGIES[str(strategy)]
    return int("use_distributed_optimizer" in flags)


def _megatron_stages(pairs: Sequence[tuple[str, int]], pp: int) -> tuple[int, tuple[int, ...]]:
    """Stages per worker, and the layers of each stage; none if the number of layers is not there."""
    given: dict[str, int] = {}
    for name, value in pairs:
        if value < 1:
            raise UsageError(f"{name}={value}: it must be at least 1")
        if _MEGATRON_STAGES[name] in given:
            raise UsageError(f"{name!r} is given twice, or by two names: give it once")
        given[_MEGATRON_STAGES[name]] = value
    layers, virtual, per_worker = given.get("layers"), given.get("virtual"), given.get("per_worker", 1)
    ends = [given[end] for end in ("first", "last") if end in given]
    if virtual is not None and "per_worker" in given:
        raise UsageError(
            "layers of a virtual stage and virtual stages per worker say the same: give one of them"
        )
    if layers is None:
        if virtual is not None or ends:
            raise UsageError("layers of a stage are given without num_layers: give both")
        return per_worker, ()
    if virtual is not None:
        if layers % (virtual * pp):
            raise UsageError(
                f"{layers} layers are no whole number of stages of {virtual} on {pp} workers each"
            )
        per_worker = layers // (virtual * pp)
    left, stages = layers - sum(ends), (pp - len(ends)) * per_worker
    if left < 0 or stages < 0 or (left % stages if stages else left):
        raise UsageError(
            f"{left} of {layers} layers do not divide into {stages} stages of equal length: choose others "
            "for the first or the last stage"
        )
    if per_worker > 1:
        return per_worker, ()  # a layout refuses them in any case
    middle = (left // stages,) * stages if stages else ()
    first = (given["first"],) if "first" in given else ()
    last = (given["last"],) if "last" in given else ()
    return 1, (*first, *middle, *last)


def _deepspeed(pairs: _Pairs, workers: int | None) -> Degrees:
    """Data parallelism is what is left; ZeRO shares the state of these workers."""
    known = {**DEEPSPEED, "zero_optimization.stage": None}
    said = [(name, value) for name, value in pairs if name in known and value != "auto"]
    looks = re.compile(r"tensor_parallel\.\w*tp_\w*|\w+_parallel_(degree|size)|pipeline\.\w*stage\w*")
    others = [pair for pair in pairs if pair[0] not in known and pair[0] != "tensor_parallel.tp_grain_size"]
    given = _degrees_in([*said, *others], known, lambda name: bool(looks.fullmatch(name)))
    zero = dict(given).get("zero_optimization.stage", 0)
    if zero not in (0, 1, 2, 3):
        raise UsageError(f"zero_optimization.stage is {zero}: DeepSpeed has stages 0 to 3")
    axes = [
        (name, value)
        for name, value in given
        if name in DEEPSPEED and not (name == "tensor_parallel.autotp_size" and value == 0)
    ]
    degrees = from_names(axes, DEEPSPEED, workers, rest="dp", order=PP_SLOWEST)
    return _share(replace(degrees, first_more=True), zero)


def _degrees_in(
    pairs: _Pairs, known: Mapping[str, object], looks: Callable[[str], bool]
) -> list[tuple[str, int]]:
    """The known names with their numbers.

    Raises:
        UsageError: if another name looks like a degree.
    """
    for name, _ in pairs:
        if name not in known and name not in _OWN_CUTS and looks(name):
            raise unknown(name, known)
    return [(name, as_number(name, value)) for name, value in pairs if name in known and value is not None]


def _refuse_own_cuts(pairs: _Pairs) -> None:
    for name, value in pairs:
        unchanged = _OWN_CUTS.get(name, (value,))
        if value not in unchanged and str(value) not in map(str, unchanged):
            raise UsageError(
                f"{name} asks for a cut of its own, which is not read: leave it out for an even cut"
            )


def _experts(given: Sequence[tuple[str, int]], name: str) -> tuple[int, list[tuple[str, int]]]:
    """The degree of expert parallelism, and all others."""
    found = [value for one, value in given if one == name]
    if len(found) > 1:
        raise UsageError(f"{name!r} is given twice: give it once")
    if found and found[0] < 1:
        raise UsageError(f"{name}={found[0]} is no degree: it must be 1 or more")
    return found[0] if found else 1, [pair for pair in given if pair[0] != name]


def _share(degrees: Degrees, zero: int) -> Degrees:
    """Lets all workers of data parallelism share state."""
    return replace(degrees, dp=1, dp_shard=degrees.dp, zero=zero) if zero else degrees


def _deal_experts(degrees: Degrees, experts: int) -> Degrees:
    """Takes the workers of expert parallelism from those of data parallelism."""
    of = degrees.dp_shard if degrees.zero else degrees.dp
    if of % experts:
        raise UsageError(
            f"experts are dealt to {experts} workers, and data parallelism has {of}: here the one must "
            "divide the other"
        )
    if degrees.zero:
        return replace(degrees, dp_shard=of // experts, ep=experts)
    return replace(degrees, dp=of // experts, ep=experts)


def _leaves(data: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _json(text: str) -> dict[str, object]:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"{twice!r} is given twice: give it once")
        return found

    try:
        data = json.loads(text, object_pairs_hook=once)
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError("expected a JSON object at the top")
    return data
