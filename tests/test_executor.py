"""The executor: every schedule computes what one process does, and does it in the order and memory that it promises."""

import itertools
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from picotron import config as config_module
from picotron import process_group_manager as pgm
from picotron.config import Config, UserError
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket
from picotron.pipeline_parallel import draw
from picotron.pipeline_parallel.actions import Action
from picotron.pipeline_parallel.checker import add_communication
from picotron.pipeline_parallel.executor import UNDERWAY, Executor
from picotron.pipeline_parallel.pipeline_parallel import hidden_states_shape
from picotron.pipeline_parallel.plan import make_plan, training_schedule
from picotron.pipeline_parallel.recorder import record_steps
from picotron.pipeline_parallel.schedule_csv import write_csv
from picotron.pipeline_parallel.schedules import SCHEDULES, build
from picotron.pipeline_parallel.simulate import peak_activations
from picotron.pipeline_parallel.trace import read_trace
from picotron.utils import all_reduce
from tests.oracle import (
    assert_close,
    assert_equals_training,
    make_config,
    tiny_llama,
)
from tests.test_pipeline_parallel import (
    CPU,
    Loader,
    all_stages,
    batches,
    check_evaluations,
    expected_step,
    expected_training,
    layout_name,
    stage_of,
    train,
)
from tests.worker_pool import WorkerPool
from train import pick_train_step

BY_PROGRAM = ("interleaved_1f1b", "looped_bfs", "zb_h1", "zbv", "dualpipev")  # not by a hand-written loop


def run_config(engine: str, pp: int, micro_batches: int = 3, **changes: Any) -> Config:
    """Keys without a section are those of `distributed`."""
    keys = {key if "__" in key else f"distributed__{key}": value for key, value in changes.items()}
    return make_config(
        distributed__pp_engine=engine,
        distributed__pp_size=pp,
        training__gradient_accumulation_steps=micro_batches,
        dataset__shuffle=False,
        **keys,
    )


# ------------------------------------------------------------------------------------------------- the right numbers

MORE: list[dict[str, Any]] = [{}, {"dp_size": 2}, {"tp_size": 2}, {"cp_size": 2}]
LAYERS = {2: 5, 4: 9}
# One micro-batch; fewer than stages; not a multiple of them; enough for a steady state.
MICRO_BATCHES = (1, 3, 5, 8)
EVERYTHING = list(itertools.product(SCHEDULES, (2, 4), MORE, MICRO_BATCHES, (False, True), ("none", "full")))
# Of all combinations `make test` has some: each schedule on two ranks with more parallelism, on four without.
SOME = [
    (
        engine,
        pp,
        MORE[1 + i % 3] if pp == 2 else {},
        MICRO_BATCHES[3 - (i + pp) % 4],
        (i + pp // 2) % 2 == 0,
        ("none", "full")[i % 2],
    )
    for i, engine in enumerate(BY_PROGRAM)
    for pp in (2, 4)
]


@pytest.mark.parametrize(
    ("engine", "pp", "more", "micro_batches", "tied", "checkpointing"),
    [pytest.param(*case, marks=[] if case in SOME else pytest.mark.parity) for case in EVERYTHING],
    ids=layout_name,
)
def test_ten_steps_equal_one_process(
    pool: WorkerPool, engine: str, pp: int, more: dict[str, Any], micro_batches: int, tied: bool, checkpointing: str
) -> None:
    config = run_config(
        engine,
        pp,
        micro_batches,
        training__activation_checkpointing=checkpointing,
        training__warmup_steps=3,
        training__max_grad_norm=0.5,
        **more,
    )
    model_config = tiny_llama(num_hidden_layers=LAYERS[pp], tie_word_embeddings=tied)
    expected = expected_training(more.get("dp_size", 1) * micro_batches, model_config.num_hidden_layers, tied)
    for result in pool.run(train, config.distributed.world_size, config, model_config):
        assert_equals_training(result, expected)


def wrapped(config: Config, model_config: LlamaConfig, dtype: torch.dtype = torch.float64) -> DataParallel:
    stage = stage_of(config, model_config, dtype)
    return DataParallelBucket(stage, groups=stage.parameters_by_stage())


def step_of(config: Config, model_config: LlamaConfig, dtype: torch.dtype = torch.float64) -> Any:
    return pick_train_step(
        config, make_plan(config, model_config), hidden_states_shape(config, model_config), CPU, dtype
    )


def one_step(config: Config, model_config: LlamaConfig, dtype: torch.dtype, compiled: bool) -> dict[str, Any]:
    """Loss and gradients of the whole model."""
    model = wrapped(config, model_config, dtype)
    if compiled:
        for layer in model.module.module.model.layers.values():
            layer.compile(backend="aot_eager")
    items = batches(config.training.gradient_accumulation_steps)
    loss = step_of(config, model_config, dtype)(model, Loader(items)).double()
    all_reduce(loss, pgm.process_group_manager.pp_group)
    return {"loss": loss, "gradients": all_stages(model.module.module, "main_grad")}


def check_step(pool: WorkerPool, config: Config, compiled: bool = False, **changes: Any) -> None:
    expected = expected_step(**changes)
    arguments = (config, tiny_llama(**changes), torch.float64, compiled)
    for result in pool.run(one_step, config.distributed.world_size, *arguments):
        assert_close(result["loss"], expected["loss"], what="loss")
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert_close(result["gradients"][name], gradient, what=name)


BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "pad_token_id": 3}


SEQUENCE_PARALLEL = {"tp_size": 4, "sequence_parallel": True}
SPLIT = list(itertools.product(("zb_h1", "zbv"), ({}, {"tp_size": 4}, SEQUENCE_PARALLEL), ("none", "full")))
SOME_SPLIT = [("zb_h1", {}, "full"), ("zbv", {"tp_size": 4}, "none"), ("zb_h1", SEQUENCE_PARALLEL, "none")]


@pytest.mark.parametrize(
    ("engine", "tensor_parallel", "checkpointing"),
    [pytest.param(*case, marks=[] if case in SOME_SPLIT else pytest.mark.parity) for case in SPLIT],
    ids=layout_name,
)
def test_split_backward_of_every_layer(
    pool: WorkerPool, engine: str, tensor_parallel: dict[str, Any], checkpointing: str
) -> None:
    """With biases, and with more ranks than key/value heads, whose weights' gradients are summed over two ranks."""
    tied = engine == "zbv"  # both ends on the first rank
    config = run_config(engine, 2, training__activation_checkpointing=checkpointing, **tensor_parallel)
    check_step(pool, config, num_hidden_layers=4, tie_word_embeddings=tied, **BIASES)


@pytest.mark.parity
@pytest.mark.parametrize("engine", ["zbv", "looped_bfs"])
def test_compiled_layers(pool: WorkerPool, engine: str) -> None:
    check_step(pool, run_config(engine, 2), compiled=True, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("engine", "pp", "layout"),
    [
        ("1f1b", 4, "E|t*2|t*2|L"),
        ("afab", 3, "E|t*4|L"),
        ("zb_h1", 3, "Et|ttt|L"),
        ("interleaved_1f1b", 2, "E|tt||ttL"),
        ("zbv", 2, "Ett||tt|L"),
        ("dualpipev", 2, "E|t|ttt|L"),
    ],
)
def test_layouts(pool: WorkerPool, engine: str, pp: int, layout: str) -> None:
    check_step(pool, run_config(engine, pp, pp_layout=layout), num_hidden_layers=4, tie_word_embeddings=True)


def test_several_chunks(pool: WorkerPool) -> None:
    check_step(pool, run_config("interleaved_1f1b", 2, pp_chunks=3), num_hidden_layers=6)
    check_step(pool, run_config("looped_bfs", 3, pp_chunks=1), num_hidden_layers=3)


def test_a_schedule_from_a_file(pool: WorkerPool, tmp_path: Path) -> None:
    """In a V of three chunks, some backwards are split and one is not, and a pair overlaps."""
    path = tmp_path / "own.csv"
    path.write_text(
        "0F0,0F1,,3F0,4F0,3F1,4F1,0F2,4I0,3B0,(3F2;4B1),4W0,3I1,0B0,4F2,3W1,4B2,3B2,0B1,0B2\n"
        "1F0,2F0,1F1,2F1,5F0,5B0,5F1,5B1,2B0,1B0,1F2,2F2,5F2,5I2,2B1,5W2,1B1,2B2,1I2,1W2\n"
    )
    config = run_config(f"csv:{path}", 2)
    assert training_schedule(config).placement == "V"
    check_step(pool, config, num_hidden_layers=6, tie_word_embeddings=True)
    write_csv(build("1f1b", 2, 3).programs, path)  # which also has a hand-written loop
    check_step(pool, config, num_hidden_layers=6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("engine", ["interleaved_1f1b", "looped_bfs"])
def test_whole_backwards_compute_bit_for_bit_what_one_process_does(
    pool: WorkerPool, engine: str, dtype: torch.dtype
) -> None:
    model_config = tiny_llama(num_hidden_layers=6)
    (whole,) = pool.run(one_step, 1, run_config("1f1b", 1), model_config, dtype, False)
    for result in pool.run(one_step, 3, run_config(engine, 3), model_config, dtype, False):
        assert result["loss"].float() == whole["loss"].float()
        for name, gradient in whole["gradients"].items():
            assert torch.equal(result["gradients"][name], gradient), name


def test_split_backward_in_bfloat16(pool: WorkerPool) -> None:
    """Also where a weight's gradient passes through a wider dtype on its way."""
    model_config = tiny_llama(num_hidden_layers=4, **BIASES)
    results = [
        pool.run(one_step, 8, run_config(engine, 2, tp_size=4), model_config, torch.bfloat16, False)[0]
        for engine in ("1f1b", "zb_h1")
    ]
    for name, gradient in results[0]["gradients"].items():
        assert_close(results[1]["gradients"][name], gradient, relative=0.02, what=name)


@pytest.mark.parametrize("engine", SCHEDULES)
def test_evaluation(pool: WorkerPool, engine: str) -> None:
    more = {"zbv": {"dp_size": 2}, "looped_bfs": {"tp_size": 2}, "dualpipev": {"cp_size": 2}}.get(engine, {})
    config = run_config(
        engine, 2, 4 // more.get("dp_size", 1), training__eval_frequency=1, training__eval_steps=3, **more
    )
    check_evaluations(pool, config, tiny_llama(num_hidden_layers=4, tie_word_embeddings=True))


# --------------------------------------------------------------------------------------------- what a step really does


def run_observed(executor: Executor, model: DataParallel, observe: Any) -> None:
    """A step, with `observe(action)` after each action."""
    do = executor.do

    def observed(action: Any) -> None:
        do(action)
        observe(action)

    executor.do = observed
    items = batches(executor.schedule.microbatches)
    executor(model, Loader(items), (2, 16, 32), CPU, torch.float64)


def alive(storages: list[Any]) -> int:
    return sum(storage() is not None for storage in storages)


def live_activations(config: Config, model_config: LlamaConfig, deallocate: bool) -> tuple[Any, Any]:
    """After each action: of which (stage, micro-batch) autograd, or a W to come, still keeps anything; and how many
    outputs that another rank takes are in memory.
    """
    model, executor = wrapped(config, model_config), Executor(training_schedule(config))
    model.module.deallocate_outputs = deallocate
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[tuple[int, int], list[Any]] = {}
    outputs: list[Any] = []
    forward, rank = executor.F, pgm.process_group_manager.pp_rank

    def observed_forward(action: Action) -> None:
        key = action.stage, action.microbatch
        kept[key] = []

        def pack(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in weights:
                kept[key].append(weakref.ref(tensor.untyped_storage()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(action)
        if action in executor.results and executor.schedule.rank_of(action.stage + 1) != rank:
            outputs.append(weakref.ref(executor.results[action].untyped_storage()))

    executor.F = observed_forward
    seen = []

    def observe(action: Any) -> None:
        seen.append(({key for key, storages in kept.items() if alive(storages)}, alive(outputs)))

    run_observed(executor, model, observe)
    return seen, executor.program


@pytest.mark.parametrize("engine", ["afab", "1f1b", *BY_PROGRAM])
def test_activations_live_as_long_as_the_schedule_says(pool: WorkerPool, engine: str) -> None:
    model_config, config = tiny_llama(num_hidden_layers=6), run_config(engine, 3, 7)
    programs = training_schedule(config).programs
    for rank, (seen, program) in enumerate(pool.run(live_activations, 3, config, model_config, True)):
        live: set[tuple[int, int]] = set()
        peak, receivers = 0, 2 if engine in ("zbv", "dualpipev") else 1  # one down, one up the V
        for action, (really, outputs) in zip(program, seen, strict=True):
            for part in action.parts:
                if part.kind in "FBW":
                    (live.add if part.kind == "F" else live.discard)((part.stage, part.microbatch))
            assert really == live, f"after {action} on rank {rank}"
            assert outputs <= 1 + UNDERWAY * receivers
            peak = max(peak, len(live))
        pairs = any(len(action.parts) == 2 for action in program)  # of which one is done after the other
        assert peak in (peak_activations(programs[rank]), peak_activations(programs[rank]) - pairs)


def test_outputs_can_be_kept(pool: WorkerPool) -> None:
    """What the test above counts as freed is there if nobody frees it."""
    arguments = (run_config("looped_bfs", 3, 7), tiny_llama(num_hidden_layers=6), False)
    most = [max(outputs for _, outputs in seen) for seen, _ in pool.run(live_activations, 3, *arguments)]
    assert most == [14, 14, 7]  # of two stages; the last one has none


def reductions(config: Config, model_config: LlamaConfig) -> tuple[list[str], int]:
    """Actions and launches of buckets in the order in which they end, and how many buckets there are."""
    model, executor = wrapped(config, model_config), Executor(training_schedule(config))
    events: list[str] = []
    for stage, buckets in model.buckets_of.items():
        for bucket in buckets:
            launch = bucket.launch
            bucket.launch = lambda launch=launch, stage=stage: (events.append(f"launch {stage}"), launch())
    run_observed(executor, model, lambda action: events.append(str(action)))
    return events, len(model.buckets)


@pytest.mark.parametrize("engine", BY_PROGRAM)
def test_each_stage_reduces_once_when_the_schedule_says_so(pool: WorkerPool, engine: str) -> None:
    config = run_config(engine, 2, 4, dp_size=2)
    programs = add_communication(training_schedule(config))
    for rank, (events, buckets) in enumerate(
        pool.run(reductions, 4, config, tiny_llama(num_hidden_layers=4, tie_word_embeddings=True))
    ):
        assert [event for event in events if "launch" not in event] == list(map(str, programs[rank % 2]))
        stages = [event[:-1] for event in events if event.endswith("R")]
        assert [event for event in events if "launch" in event] == [f"launch {stage}" for stage in stages]
        assert buckets == len(stages) == len(set(stages))
        for stage in stages:
            assert events[events.index(f"{stage}R") - 1] == f"launch {stage}"
        if len(stages) == 2:
            assert events.index(f"{stages[0]}R") < len(events) - 3  # while others compute


# ------------------------------------------------------------------------------------------------- what a step tells


def recorded(config: Config, model_config: LlamaConfig) -> list[str]:
    """Two steps, the second of which is step 5; and the names of its actions in a profile."""
    model = wrapped(config, model_config)
    step = record_steps(step_of(config, model_config), config, CPU, done=3)
    step(model, Loader(batches(4)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, Loader(batches(4)))
    path = Path(config.checkpoint.save_dir, f"profile_{dist.get_rank()}.json")
    profile.export_chrome_trace(str(path))  # (`profile.events()` takes 2F0 for a mangled name of C++)
    found = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    names = sorted((event["ts"], event["name"]) for event in found if event.get("cat") == "user_annotation")
    return [name for _, name in names if re.fullmatch(r"\(?[0-9]*[FBIW][0-9].*", name)]


@pytest.mark.parametrize(
    ("engine", "more"), [("1f1b", {}), ("zbv", {"dp_size": 2}), ("dualpipev", {}), ("interleaved_1f1b", {"tp_size": 2})]
)
def test_the_trace_of_a_step(
    pool: WorkerPool, engine: str, more: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(engine, 2, 4, logging__trace_steps=[5], checkpoint__save_dir=str(tmp_path), **more)
    names = pool.run(recorded, config.distributed.world_size, config, tiny_llama(num_hidden_layers=4))
    assert [path.name for path in tmp_path.iterdir()] == ["trace_step_00000005.jsonl"]
    step, timeline = read_trace(tmp_path)
    assert step == 5
    schedule = training_schedule(config)
    assert timeline.programs == list(map(list, schedule.programs))
    if engine != "1f1b":
        assert [[span.action for span in rank] for rank in timeline.spans] == add_communication(schedule)
    for rank in timeline.spans:  # a rank does one thing at a time
        assert all(first.end <= second.start for first, second in itertools.pairwise(rank))
    ranks = [0, 2] if "tp_size" in more else [0, 1]  # of the first pipeline
    for rank, program in zip(ranks, schedule.programs, strict=True):
        assert names[rank] == [str(action).lstrip("01") if engine == "1f1b" else str(action) for action in program]
    draw.main(["--measured", str(tmp_path), "--step", "5"])
    assert f"{tmp_path}, step 5, in seconds" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp_chunks": 2}, "zb_h1 has 1 chunk(s) per rank, not 2; for 2 use looped_bfs or interleaved_1f1b"),
        ({"pp_chunks": 3, "pp_engine": "zbv"}, "zbv has 2 chunk(s) per rank, not 3"),
        ({"pp_engine": "looped_bfs", "pp_chunks": 4}, "8 stages, which need a layer each, but num_hidden_layers=6"),
        ({"pp_layout": "Ettt|tttx"}, "the layout 'Ettt|tttx' makes no sense at character 9"),
        ({"pp_layout": "Ettt|tttt|L"}, "has 3 stages, but ranks times chunks are 2"),
        ({"pp_layout": "Ettt|ttL"}, "has 5 layers (t), but the model has 6"),
        (
            {"pp_engine": "zbv", "pp_layout": "Et|||tttttL"},
            "pp_layout='Et|||tttttL' leaves rank 1 of the pipeline without anything to do",
        ),
        ({"pp_engine": "csv:nowhere.csv"}, "cannot read the schedule 'nowhere.csv'"),
        ({"pp_engine": "csv:FILE", "pp_size": 3}, "is for distributed.pp_size=2, but the config says 3"),
        (
            {"pp_engine": "csv:FILE", "training__gradient_accumulation_steps": 8},
            "is for training.gradient_accumulation_steps=4, but the config says 8",
        ),
        ({"pp_engine": "csv:FILE", "pp_chunks": 2}, "is for distributed.pp_chunks=1, but the config says 2"),
        ({"pp_size": 1, "pp_chunks": 2}, "pp_chunks=2 is about pipelines, but pp_size=1; leave it out"),
        ({"pp_size": 1, "pp_layout": "Ettt|tttL"}, "has 2 stages, but ranks times chunks are 1"),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_csv(build("1f1b", 2, 4).programs, tmp_path / "1f1b.csv")
    keys: dict[str, Any] = {"pp_engine": "zb_h1", "pp_size": 2, "training__gradient_accumulation_steps": 4, **changes}
    keys["pp_engine"] = keys["pp_engine"].replace("FILE", f"{tmp_path}/1f1b.csv")
    config = make_config(**{key if "__" in key else f"distributed__{key}": value for key, value in keys.items()})
    with pytest.raises(UserError, match=re.escape(message)) as error:
        make_plan(config, tiny_llama(num_hidden_layers=6))
    assert len(str(error.value).splitlines()) == 1


def test_the_config_knows_every_schedule() -> None:
    assert tuple(SCHEDULES) == config_module.SCHEDULES


def test_one_process_needs_no_schedule() -> None:
    for engine in (*SCHEDULES, "csv:nowhere.csv"):
        plan = make_plan(make_config(distributed__pp_engine=engine), tiny_llama())
        assert list(map(str, plan.stages)) == ["EtttL"]
        assert not plan.splits_backward
