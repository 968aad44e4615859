"""Degrees from torchtitan's configuration, Megatron-LM's arguments, DeepSpeed's JSON, Tenplex's letters."""

from __future__ import annotations

import dataclasses
import json

import pytest

from swift_ft.errors import UsageError
from swift_ft.planning.layout.degree_names import TORCHTITAN, degrees_from_mapping, degrees_of
from swift_ft.recovery.layout.degrees import PP_SLOWEST, Degrees

TITAN = """
[training]
steps = 1000

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_first_stage_less_layers = 1
"""
MEGATRON = r"""
# as in a shell script
MODEL_ARGS=(
    --num-layers 26 --hidden-size 4096 --sequence-parallel
    --tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size=2
    --decoder-first-pipeline-num-layers 11
)
"""
DEEPSPEED = {
    "train_batch_size": 64,
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "tensor_parallel": {"autotp_size": 4, "tp_grain_size": 64},
    "sequence_parallel_size": 2,
}


def ranked(**degrees: object) -> Degrees:
    """Degrees of a framework, whose ranks count stages slowest."""
    return dataclasses.replace(Degrees(order=PP_SLOWEST), **degrees)  # type: ignore[arg-type]


def filled(**degrees: object) -> Degrees:
    """Those of torchtitan and DeepSpeed, which give a layer that is left over to the first stages."""
    return dataclasses.replace(ranked(**degrees), first_more=True)


@pytest.mark.parametrize(
    ("text", "workers", "degrees"),
    [
        pytest.param(TITAN, 64, filled(dp=2, dp_shard=8, tp=2, pp=2, zero=3), id="torchtitan"),
        pytest.param(
            '{"parallelism": {"tensor_parallel_degree": 2}}',
            8,
            filled(dp_shard=4, tp=2, zero=3),
            id="its JSON",
        ),
        pytest.param(
            "--parallelism.tensor_parallel_degree 4 --parallelism.data_parallel_shard_degree=1",
            4,
            filled(tp=4),
            id="its command line",
        ),
        pytest.param(
            "[parallelism]\nexpert_parallel_degree = 4\ncontext_parallel_degree = 2\n",
            32,
            filled(cp=2, dp_shard=4, ep=4, zero=3),
            id="its experts are FSDP's workers",
        ),
        pytest.param(
            "[training]\ntensor_parallel_degree = 2\n[experimental]\npipeline_parallel_degree = 2\n",
            4,
            filled(tp=2, pp=2),
            id="its older sections",
        ),
        pytest.param(MEGATRON, 32, ranked(dp=4, tp=4, pp=2, cut=(11, 15)), id="Megatron-LM"),
        pytest.param(
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers 27 "
            "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 7",
            8,
            ranked(tp=2, pp=4, cut=(6, 7, 7, 7)),
            id="its first and last stage",
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --num-layers 24 --num-layers-per-virtual-pipeline-stage 3",
            2,
            ranked(pp=2, stages_per_worker=4),
            id="its virtual stages",
        ),
        pytest.param(
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --use-distributed-optimizer",
            16,
            ranked(tp=2, ep=4, dp_shard=2, zero=1),
            id="its experts and its distributed optimizer",
        ),
        pytest.param(
            "--context-parallel-size 2 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            8,
            ranked(cp=2, dp_shard=4, zero=2),
            id="its FSDP",
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping",
            4,
            ranked(dp=2, pp=2, order=("dp", "dp_shard", "pp", "ep", "cp", "tp")),
            id="its other order of ranks",
        ),
        pytest.param(
            '{"world_size": 8, "tensor_model_parallel_size": 2}',
            None,
            ranked(dp=4, tp=2),
            id="its JSON with all",
        ),
        pytest.param(json.dumps(DEEPSPEED), 64, filled(dp_shard=8, tp=4, cp=2, zero=3), id="DeepSpeed"),
        pytest.param(
            '{"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 4}}',
            16,
            filled(dp=4, pp=4),
            id="stages",
        ),
        pytest.param(
            '{"zero_optimization": {"stage": 0}, "pipeline": {"stages": "auto"}}', 4, filled(dp=4), id="auto"
        ),
        pytest.param('{"T": 4, "P": 2, "D": 2}', None, ranked(tp=4, pp=2, dp=2), id="Tenplex"),
        pytest.param("tp=2,pp=2", 4, Degrees(tp=2, pp=2), id="short text"),
    ],
)
def test_what_is_read(text: str, workers: int | None, degrees: Degrees) -> None:
    assert degrees_of(text, workers) == degrees


@pytest.mark.parametrize(
    ("text", "workers", "words"),
    [
        ("[parallelism]\ntensor_paralel_degree = 2\n", 8, "nearest name is 'tensor_parallel_degree'"),
        ("[parallelism]\ntensor_parallel_degree = 3\n", 32, "tensor_parallel_degree=3 do not fit 32 workers"),
        (
            "[parallelism]\ntensor_parallel_degree = 2\n",
            None,
            "data_parallel_shard_degree is what is left of all",
        ),
        ("[parallelism]\ntensor_parallel_degree = 0\n", 8, "tensor_parallel_degree=0 is no degree"),
        ("[parallelism]\ntensor_parallel_degree = 2.5\n", 8, "must be a whole number"),
        ("[parallelism]\ntensor_parallel_degree = 2\ntensor_parallel_degree = 2\n", 8, "not valid TOML"),
        (
            "[training]\ntensor_parallel_degree = 2\n[parallelism]\ntensor_parallel_degree = 2\n",
            8,
            "'tensor_parallel_degree' is given twice",
        ),
        (
            "[parallelism]\ntensor_parallel_degree = 2\npipeline_parallel_layers_per_stage = 3\n",
            8,
            "pipeline_parallel_layers_per_stage asks for a cut of its own",
        ),
        (
            "[parallelism]\nexpert_parallel_degree = 3\n",
            8,
            "data parallelism has 8: here the one must divide",
        ),
        (
            "--tensor-parallel-size 4",
            8,
            "'tensor_parallel_size' is no degree: the nearest name is 'tensor_model_",
        ),
        ("--tensor-model-parallel-size", 8, "must be a whole number"),
        ("--tensor-model-parallel-size 2 --tensor-model-parallel-size 4", 8, "is given twice"),
        ("--tensor-model-parallel-size '2", 8, "the arguments cannot be read"),
        ("--lr 0.1", 8, "no degree of parallelism is in it"),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
            2,
            "without num_layers: give both",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers 25 --decoder-first-pipeline-num-layers 6",
            4,
            "19 of 25 layers do not divide into 3 stages",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers 25 --num-layers-per-virtual-pipeline-stage 3",
            2,
            "25 layers are no whole number of stages of 3 on 2 workers each",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|t*4L'",
            2,
            "pipeline_model_parallel_layout asks for a cut of its own",
        ),
        ('{"world_size": 8, "tensor_model_parallel_size": 2}', 16, "world_size=8, and 16 workers were given"),
        ('{"tensor_parallel": {"autotp_sise": 4}}', 8, "nearest name is 'tensor_parallel.autotp_size'"),
        (
            '{"zero_optimization": {"stage": 7}}',
            8,
            "zero_optimization.stage is 7: DeepSpeed has stages 0 to 3",
        ),
        ('{"tensor_parallel": {}, "tensor_parallel": {}}', 8, "'tensor_parallel' is given twice"),
        ('{"tensor_parallel_degree": true}', 8, "must be a whole number"),
        ('{"T": 4, "P": 0}', None, "P=0 is no degree"),
        (
            '{"tensor_parallel_sise": 4, "pipeline_parallel_size": 2}',
            8,
            "'pipeline_parallel_size' is no degree",
        ),
        ("{", 8, "not valid JSON"),
        ("[1, 2]", 8, "not valid TOML"),
        ("tp=2,qp=2", None, "'qp' is no degree"),
    ],
)
def test_what_is_refused_in_one_line(text: str, workers: int | None, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        degrees_of(text, workers)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_torchtitan_has_these_names_and_gives_what_is_left_to_the_same_degree() -> None:
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims")
    config = pytest.importorskip("torchtitan.config.configs").ParallelismConfig
    names = {field.name for field in dataclasses.fields(config)}
    assert {name for name in names if name.endswith("_degree")} == set(TORCHTITAN)
    for changed in (
        {},
        {"tensor_parallel_degree": 4, "data_parallel_replicate_degree": 2, "context_parallel_degree": 2},
    ):
        given = config(**changed)
        theirs = dims.ParallelDims.from_config(given, 64)
        ours = degrees_from_mapping(dataclasses.asdict(given), 64)
        for axis, name in (
            ("dp", "dp_replicate"),
            ("dp_shard", "dp_shard"),
            ("pp", "pp"),
            ("cp", "cp"),
            ("tp", "tp"),
        ):
            assert getattr(ours, axis) == getattr(theirs, name)
