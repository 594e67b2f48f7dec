"""Random cases: a model, a layout, data and events of a training, as plain JSON that a command line can repeat."""

import math
import random
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from conformance.models import FAMILIES, WITH_EXPERTS
from picotron.config import Training, default_of
from tests.fuzz.chat_templates import TEMPLATES
from tests.fuzz.pipelines import Case, draw_modules
from tests.fuzz.programs import draw_program
from tests.fuzz.tokenizer_kinds import KINDS
from workbench.schedules.schedules import SCHEDULES

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 19, 23)
LONG_LENGTHS = (17, 29, 37, 47, 48, 59, 61, 64)  # of rows for samples, of which a short row holds the prompt only
DATA = ("own", "own", "text", "samples", "conversations")
LOSSES = ("cross_entropy", "cross_entropy", "focal", "preference", "logits", "local_logits")
FROZEN = ("embed_tokens", "lm_head", "model.norm", "layers.0.", "layers.1.", "q_proj", "mlp", "layernorm")
BATCH = ("distributed.dp_size", "training.gradient_accumulation_steps", "training.micro_batch_size")
PROGRAMS = 0.25  # share of the programs among the cases
EXPERTS = 0.25  # share of the models with experts among the models
STEPS = 3
SIMPLE: Case = {
    "resume": None,
    "frozen": [],
    "between": False,
    "looks": False,
    "calls": False,
    "bucket_mb": None,
    "fails": False,
}
SECTIONS: Case = {  # what the sections of a case are simplified to
    "config": {f"distributed.{axis}_size": 1 for axis in ("ep", "dp", "pp", "cp", "tp")},
    "model": {
        "family": "llama", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-6,
    },
    "data": {"weights": False, "ignored": 0.0, "documents": False, "scope": "global", "loss": "cross_entropy", "packed": False},
    "modules": {"copied": False, "dp": 1, "frozen": [], "dp_engine": "bucket", "engine": "1f1b"},
    "program": {"ranks": 1, "frozen": [], "engine": "bucket", "net": "inside", "optimizer": "wrapper"},
}  # fmt: skip
NUMBERS = (  # that are made smaller
    *("training.seq_length", "training.gradient_accumulation_steps", "training.micro_batch_size"),
    *("num_hidden_layers", "num_attention_heads", "m"),
)
SEED, CASES = 30, 15  # in `make test`; five times as many in `make slow`


def draw_case(seed: int, number: int) -> Case:
    """Return case `number` of a seed: {"modules": see `draw_modules`}, or the training of a Llama. Its keys:

    - model: family, sizes and options of a model;
    - config: dotted keys of the config;
    - resume: steps before a checkpoint, and the changed keys of the layout that continues, or None. Each part begins
      with a checkpoint, too: that of the second part exists already;
    - data: kind of the data, seed, and what this kind needs;
    - frozen: parts of the names of parameters that are frozen;
    - between: whether there is a forward or an evaluation between backward and the optimizer's step;
    - looks: whether forward hooks read the inputs of linear layers;
    - calls: whether projections call their linear layers, as those of float8 do;
    - bucket_mb: least size of a bucket of gradients in MiB; by default, a stage of these models fits into one bucket;
    - fails: whether the last backward of the second step fails, which is then repeated.
    """

    def dice_of(name: str) -> random.Random:
        """Return dice of their own, so that a new draw leaves the others as they are."""
        return random.Random(f"{seed} {number} {name}")

    programs = dice_of("program")
    if programs.random() < PROGRAMS:
        return {"program": draw_program(programs)}
    others = dice_of("modules")
    if others.random() < 0.1:
        return {"modules": draw_modules(others)}
    dice = random.Random(f"{seed} {number}")
    layouts = [draw_layout(dice)]
    if dice.random() < 0.35:
        layouts.append(draw_layout(dice))
    kind = dice.choice(DATA)
    length = draw_length(dice, layouts, LENGTHS if kind in ("own", "text") else LONG_LENGTHS)
    set_batch(dice, layouts, is_paired=kind == "own")
    model = draw_model(dice, layouts) | draw_family(dice_of("family"))
    experts = dice_of("experts")
    if experts.random() < EXPERTS:
        model |= draw_experts(experts, layouts, model)
    config = {**draw_training(dice), **layouts[0], "training.seq_length": length}
    if kind != "own":
        config["dataset.shuffle"] = dice.random() < 0.5
        if dice.random() < 0.5:
            config |= {"training.eval_frequency": 1, "training.eval_steps": dice.randint(1, 2)}
    if kind == "text":
        config["dataset.mask_documents"] = dice.random() < 0.5
        if model["family"] == "dots1" and not config["dataset.mask_documents"]:  # the reference pads documents
            config["training.router_bias_rate"] = experts.choice((0.0, 0.1))
    if kind in ("samples", "conversations"):
        config["dataset.long_samples"] = "cut" if length < 60 else dice.choice(("cut", "drop"))
        if dice.random() < 0.3:
            config["dataset.mask_documents"] = False
    if all(layout.get("distributed.cp_engine", "ulysses") == "ulysses" for layout in layouts) and dice.random() < 0.2:
        config["model.use_flash_attention"] = False
    if config["training.activation_checkpointing"] != "full":
        for keys in (config, *layouts):
            keys.pop("schedule.pp_keep_activations", None)
    resume = {"after": dice.randint(1, STEPS - 1), "config": NO_LAYOUT | layouts[1]} if len(layouts) == 2 else None
    if resume and dice_of("first").random() < 0.2:
        resume["after"] = 0
    data = {"kind": kind, "seed": dice.randrange(1000), **draw_data(dice, kind)}
    if "training.eval_frequency" in config and dice_of("evaluation").random() < 0.4:
        data["evaluated"] = dice_of("evaluated").randint(1, 9)
    if data.get("loss") == "focal":
        data["weights"] = dice_of("weights").random() < 0.4
    data["packed"] = is_packable(data) and dice_of("packed").random() < 0.4
    if dice.random() < 0.05 and data.get("loss") != "preference":  # a number that need not fit the others
        kept = {"training.seed", *(BATCH if resume else ())}  # a run with another batch begins its data again
        numbers = [key for key, value in config.items() if type(value) is int and key not in kept]
        config[dice.choice(numbers)] = dice.randint(0, 7)
    is_one_stage = all(
        each["distributed.pp_size"] == 1 for each in (config, *layouts)
    )  # stages wait for one that fails
    return {
        "model": model,
        "config": config,
        "resume": resume,
        "data": data,
        "frozen": dice.sample(FROZEN, dice.randint(1, 2)) if dice.random() < 0.2 else [],
        "between": dice.random() < 0.3,
        "looks": dice_of("looks").random() < 0.2,
        "calls": dice_of("calls").random() < 0.2,
        "bucket_mb": dice_of("bucket").choice((None, 0.0, 0.001)),
        "fails": kind == "own" and is_one_stage and dice_of("fails").random() < 0.3,
    }


NO_LAYOUT = {
    key: default_of(key)
    for key in (
        *("distributed.pp_engine", "schedule.pp_chunks", "schedule.pp_group_size", "schedule.pp_layout"),
        *("schedule.pp_keep_activations", "distributed.sequence_parallel", "distributed.cp_engine"),
        *("distributed.cp_sharding", "distributed.dp_engine", "distributed.ep_size"),
    )
}


def draw_layout(dice: random.Random) -> dict[str, Any]:
    """Draw the keys of a layout of at most 4 ranks, with the number of micro-batches."""
    world = dice.choice((1, 2, 2, 2, 3, 4, 4, 4))
    sizes = dict.fromkeys(("dp", "pp", "cp", "tp"), 1)
    while math.prod(sizes.values()) < world:
        axis = dice.choice(list(sizes))
        sizes[axis] *= 3 if world == 3 else 2
    layout: dict[str, Any] = {f"distributed.{axis}_size": size for axis, size in sizes.items()}
    layout["training.gradient_accumulation_steps"] = dice.randint(1, 5)
    layout["distributed.dp_engine"] = dice.choice(("naive", "bucket", "zero1", "zero3"))
    if sizes["tp"] > 1:
        layout["distributed.sequence_parallel"] = dice.random() < 0.5
    layout["distributed.cp_sharding"] = dice.choice(("zigzag", "zigzag", "contiguous"))
    if sizes["cp"] > 1:
        layout["distributed.cp_engine"] = dice.choice(("ring", "all_gather", "ulysses"))
    if (pp := sizes["pp"]) > 1:
        engine = dice.choice((*SCHEDULES, "auto"))
        layout["distributed.pp_engine"] = engine
        recipe = SCHEDULES.get(engine)
        chunks = recipe.chunks if recipe else 1
        if recipe and recipe.any_chunks and dice.random() < 0.4:
            chunks = layout["schedule.pp_chunks"] = dice.randint(1, 3 if pp == 2 else 2)
        if recipe and recipe.has_groups and dice.random() < 0.2:
            layout["schedule.pp_group_size"] = pp
        if engine != "auto" and dice.random() < 0.3:
            layout["schedule.pp_layout"] = draw_stages(dice, pp, chunks)
        if dice.random() < 0.2:
            layout["schedule.pp_keep_activations"] = 1  # with recomputation, see `draw_training`
    return layout


def draw_stages(dice: random.Random, pp: int, chunks: int) -> str:
    """Draw a pp_layout with few layers per stage, some of them empty."""
    stages = ["t" * dice.choice((0, 1, 1, 2)) for _ in range(pp * chunks)]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    for i in range(pp):  # a rank without any layer is refused
        if not any(stages[i::pp]):
            stages[i] = "t"
    if "t" not in "".join(stages):
        stages[0] = "Et"
    return "|".join(stages)


def layers_of(layout: dict[str, Any]) -> int | None:
    """Return the number of layers that a layout's stages ask for; None: any from the number of stages on."""
    stages = layout.get("schedule.pp_layout")
    return stages.count("t") if stages else None


def least_layers(layout: dict[str, Any]) -> int:
    pp, engine = layout["distributed.pp_size"], layout.get("distributed.pp_engine", "1f1b")
    if pp == 1:
        return 1
    default = SCHEDULES[engine].chunks if engine in SCHEDULES else 1
    return pp * layout.get("schedule.pp_chunks", default)


def draw_length(dice: random.Random, layouts: list[dict[str, Any]], lengths: tuple[int, ...]) -> int:
    """Draw the length of a row: often odd, and divisible as the layouts require."""
    multiple = 1
    for layout in layouts:
        cp, tp = layout["distributed.cp_size"], layout["distributed.tp_size"]
        zigzag = layout["distributed.cp_sharding"] == "zigzag" and cp > 1
        multiple = math.lcm(
            multiple, cp * (2 if zigzag else 1), cp * tp if layout.get("distributed.sequence_parallel") else 1
        )
    return -(-dice.choice(lengths) // multiple) * multiple


def set_batch(dice: random.Random, layouts: list[dict[str, Any]], is_paired: bool) -> None:
    """Set the size of the layouts' micro-batches, such that a global batch has as many sequences in all layouts. Rows
    of a pair, of which a loss needs both, are in the same micro-batch.
    """
    parts = [layout["distributed.dp_size"] * layout["training.gradient_accumulation_steps"] for layout in layouts]
    if math.lcm(*parts) > 12:
        for layout in layouts:
            layout["training.gradient_accumulation_steps"] = 2
        parts = [2 * layout["distributed.dp_size"] for layout in layouts]
    sequences = math.lcm(*parts) * (2 if is_paired else dice.choice((1, 1, 2)))
    for layout, part in zip(layouts, parts, strict=True):
        layout["training.micro_batch_size"] = sequences // part


def draw_model(dice: random.Random, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Draw a model that all layouts can split."""
    tp = math.lcm(*(layout["distributed.tp_size"] for layout in layouts))
    cps = [
        (layout["distributed.tp_size"], layout["distributed.cp_size"])
        for layout in layouts
        if layout.get("distributed.cp_engine") == "ulysses"
    ]
    heads = tp * dice.choice((1, 2, 3)) * math.lcm(*(cp for _, cp in cps))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]

    def fits(kv: int) -> bool:
        sizes = [layout["distributed.tp_size"] for layout in layouts]
        return all(kv % size == 0 or size % kv == 0 for size in sizes) and all(max(1, kv // t) % c == 0 for t, c in cps)

    fixed = [count for layout in layouts if (count := layers_of(layout)) is not None]
    least = max(map(least_layers, [each for each in layouts if layers_of(each) is None]), default=1)
    if fixed and (min(fixed) != max(fixed) or least > fixed[0]):
        for layout in layouts:
            layout.pop("schedule.pp_layout", None)
        fixed, least = [], max(map(least_layers, layouts))
    vocab = dice.choice((5, 31, 61, 64, 97))
    tied = dice.random() < 0.4
    return {
        "vocab_size": vocab,
        "hidden_size": heads * dice.choice((2, 3, 4, 6)),
        "intermediate_size": tp * dice.choice((1, 3, 5, 8)),
        "num_hidden_layers": fixed[0] if fixed else least + dice.choice((0, 0, 1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([n for n in divisors if fits(n)]),
        "head_dim": dice.choice((2, 4, 6, 8)),
        "tie_word_embeddings": tied,
        "attention_bias": dice.random() < 0.2,
        "mlp_bias": dice.random() < 0.2,
        "pad_token_id": dice.choice((None, None, None, vocab - 2)),
        "rms_norm_eps": dice.choice((1e-6, 1e-3)),
        "rope_parameters": dice.choice((
            {"rope_type": "default", "rope_theta": 10000.0},
            {"rope_type": "default", "rope_theta": 50.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
            {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 16},
        )),
    }  # fmt: skip


def draw_family(dice: random.Random) -> dict[str, Any]:
    """Draw a family, with the options that only this family has."""
    family = dice.choice(("llama", "llama", *(name for name in FAMILIES if name not in WITH_EXPERTS)))
    return {"family": family, **dice.choice(FAMILIES[family])}


def draw_experts(dice: random.Random, layouts: list[dict[str, Any]], model: dict[str, Any]) -> dict[str, Any]:
    """Draw a family with experts, and over how many ranks the layouts split them."""
    family = dice.choice(WITH_EXPERTS)
    for layout in layouts:
        ranks = layout["distributed.dp_size"] * layout["distributed.cp_size"]
        layout["distributed.ep_size"] = dice.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    size = {"hidden_size": model["num_attention_heads"] * model["head_dim"]} if family == "olmoe" else {}
    return {"family": family, **dice.choice(FAMILIES[family]), **size}


def draw_training(dice: random.Random) -> dict[str, Any]:
    share = dice.random()
    return {
        "training.activation_checkpointing": "full" if share < 0.4 else "selective" if share < 0.7 else "none",
        "training.max_grad_norm": dice.choice((None, 0.1, 1.0)),
        "training.weight_decay": dice.choice((0.0, 0.1)),
        "training.adam_eps": dice.choice((1e-4, 1e-3)),  # larger than rounding errors of gradients that should be 0
        "training.lr_scheduler": dice.choice(get_args(Training.model_fields["lr_scheduler"].annotation)),
        "training.warmup_steps": dice.choice((0, 0, 1)),
        "training.seed": dice.randrange(100),
        "model.use_fused_adam": dice.random() < 0.5,
        "checkpoint.async_save": dice.random() < 0.3,
    }


def draw_data(dice: random.Random, kind: str) -> dict[str, Any]:
    if kind != "own":
        tokenizer = {"tokenizer": dice.choice(KINDS)}
        if kind != "conversations":
            return tokenizer
        shapes, turns = ("messages", "messages", "ShareGPT", "pairs"), ("all", "all", "last")
        draws = {"template": list(TEMPLATES), "shape": shapes, "turns": turns}
        return tokenizer | {name: dice.choice(values) for name, values in draws.items()}
    loss = dice.choice(LOSSES)
    has_targets = loss in ("cross_entropy", "focal", "preference")
    return {
        "loss": loss,
        "documents": dice.random() < 0.3 and loss != "preference",
        "weights": dice.random() < 0.4 and loss == "cross_entropy",
        "ignored": dice.choice((0.0, 0.0, 0.3, 0.9)) if has_targets else 0.0,
        "scope": dice.choice(("global", "global", "dp_rank")) if loss == "cross_entropy" else "global",
    }


def is_packable(data: dict[str, Any]) -> bool:
    """Whether rows can be cut to different lengths, which are then packed: the loss must not count other tokens."""
    losses = ("cross_entropy", "focal")
    return data["kind"] == "own" and data["loss"] in losses and data["scope"] == "global" and not data["documents"]


def smaller(case: Case, section: str = "") -> Iterator[Case]:
    """Yield simpler variants of a case, or of a section of it."""
    for key, value in case.items():
        variants: Iterable[Any] = ()
        simple = SECTIONS.get(section, SIMPLE).get(key, value)
        if simple != value:
            variants = [simple]
        elif key in SECTIONS:
            variants = smaller(value, key)
        elif key == "operations":
            variants = (value[:i] + value[i + 1 :] for i in range(len(value)))
        elif key in NUMBERS:
            variants = (less for less in (1, value // 2, value - 1) if 1 <= less < value)
        elif "." in key and not key.endswith("_size"):
            yield {other: each for other, each in case.items() if other != key}
        yield from (case | {key: each} for each in variants)
