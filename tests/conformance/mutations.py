"""Mistakes that trainers make, put into the example and into picotron, with the chapter that finds each of them."""

import dataclasses
import functools
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

DDP, ZERO1, PIPELINE, RING = (Path(f"conformance/examples/{name}.py") for name in ("ddp", "zero1", "pipeline", "ring"))
PICOTRON = Path("conformance/adapters/picotron.py")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A mistake in the source of an adapter, or of a function that it calls.

    Args:
        old, new: a piece of the source, which occurs once, and what replaces it.
        chapter, layout: the chapter that finds it, in this layout.
        says: part of the sentence that describes the difference.
        function: function of picotron, such as `picotron.optimizer:clip_grad_norm`; "": the mistake is in the adapter.
        adapter: the adapter.
    """

    old: str
    new: str
    chapter: str
    layout: str
    says: str
    function: str = ""
    adapter: Path = DDP

    def write(self, folder: Path) -> Path:
        """Write an adapter that makes the mistake."""
        path = folder / "mutated.py"
        if self.function:
            call = f"apply({self.function!r}, {self.old!r}, {self.new!r})"
            module = ".".join(self.adapter.with_suffix("").parts)
            path.write_text(f"from tests.conformance.mutations import apply\nfrom {module} import run\n\n{call}\n")
        else:
            path.write_text(replaced(self.adapter.read_text(), self.old, self.new))
        return path


def replaced(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    return source.replace(old, new)


def find(function: str) -> tuple[Any, Any]:
    """Return the module, and the function or method in it, of a name such as `picotron.optimizer:AdamW.step`."""
    module_name, _, name = function.partition(":")
    module = importlib.import_module(module_name)
    return module, functools.reduce(getattr, name.split("."), module)


def apply(function: str, old: str, new: str) -> None:
    """Replace a piece of the source of a function or method in this process, wherever it has been imported."""
    (module, target), name = find(function), function.partition(":")[2]
    source = replaced(textwrap.dedent(inspect.getsource(target)), old, new)
    if "." in name:  # a method may use the class
        source = f"class Wrapped:\n{textwrap.indent(source, '    ')}"
    space = dict(vars(module))
    exec(compile(source, str(module.__file__), "exec"), space)
    changed = space["Wrapped"] if "." in name else space
    changed = inspect.getattr_static(changed, name.split(".")[-1]) if "." in name else changed[name]
    changed = inspect.unwrap(getattr(changed, "__func__", changed))  # without decorators
    inspect.unwrap(target).__code__ = changed.__code__


def picotron(function: str, old: str, new: str, chapter: str, layout: str, says: str = "") -> Mutation:
    return Mutation(old, new, chapter, layout, says, f"picotron.{function}", PICOTRON)


OPTIMIZER = "optimizer = adamw(model.parameters(), case)"
MUTATIONS = {
    # data parallelism in plain torch
    "forgotten all-reduce": Mutation("dist.all_reduce(parameter.grad)", "pass", "step", "dp2", "gradient of"),
    "sum instead of mean": Mutation("dist.all_reduce(total)", "pass", "step", "dp2", "a factor of 2"),
    "mean of the ranks' means": Mutation("dist.all_reduce(total)", "total *= ranks", "masks", "dp2", "step 1: loss"),
    "mean of the micro-batches' means": Mutation(
        "losses.sum() / total",
        "losses.sum() / weights_of(piece).sum() / case.micro_batches / ranks",
        "masks",
        "dp2",
        "step 1: loss",
    ),
    "divided by micro-batches twice": Mutation(
        "losses.sum() / total", "losses.sum() / total / case.micro_batches", "accumulation", "dp2", "a factor of 0.25"
    ),
    "loss of one rank": Mutation("dist.all_reduce(loss)", "pass", "step", "dp2", "loss on rank 0"),
    "same rows on every rank": Mutation("chunk(ranks)[rank]", "chunk(ranks)[0]", "step", "dp2", "step 1: loss"),
    "weights of targets ignored": Mutation(
        'piece["target_ids"]) * weights_of(piece)', 'piece["target_ids"])', "weights", "dp2", "step 1: loss"
    ),
    "stale replica": Mutation(
        "        optimizer.step()", "        rank or optimizer.step()", "step", "dp2", "on rank 1 is"
    ),
    "gradients not set to zero": Mutation("        optimizer.zero_grad()\n", "", "steps", "dp2", "step 2: gradient norm"),
    "no clipping": Mutation("case.max_grad_norm or ", "", "steps", "dp2", "step 2: loss"),
    "learning rate of the step before": Mutation(
        "case.learning_rates[step]", "case.learning_rates[max(0, step - 1)]", "steps", "dp2", "step 3: loss"
    ),
    "weight decay of norms": Mutation(
        OPTIMIZER, f"{OPTIMIZER}\n    optimizer.param_groups[1]['weight_decay'] = 0.1", "steps", "dp2", "step 2: loss"
    ),
    "documents see each other": Mutation(
        "logits_of(model, piece)", "model(input_ids=piece['input_ids']).logits", "packed", "dp2", "step 1: loss"
    ),
    "embedding and head untied": Mutation(
        "ranks = dist.get_rank(), dist.get_world_size()\n    model, result = case.model(), Result()",
        "ranks = dist.get_rank(), dist.get_world_size()\n    model, result = case.model(), Result()\n"
        "    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())",
        "tied",
        "dp2",
        "model.embed_tokens.weight",
    ),
    "loss of the user's own ignored": Mutation(
        "case.token_losses(", "__import__('conformance.case').case.cross_entropy(", "loss", "dp2", "step 1: loss"
    ),
    "logits in bfloat16": Mutation("logits_of(model, piece)", "logits_of(model, piece).bfloat16()", "float32", "dp2", ""),
    "exported in bfloat16": Mutation(
        "model.save_pretrained", "__import__('copy').deepcopy(model).bfloat16().save_pretrained", "export", "dp2", "weight of"
    ),
    "exported without a multiplier": Mutation(
        "        model.save_pretrained", "        model.config.residual_multiplier = 1.0\n        model.save_pretrained",
        "export", "dp2 granite", "residual_multiplier is 1.0",
    ),
    "exported without weights": Mutation(
        "model.save_pretrained", "model.config.save_pretrained", "export", "dp2", "the results cannot be compared"
    ),
    # the other examples
    "slices not gathered": Mutation("matrices.gather()", "pass", "step", "dp2", "step 1: weight of", "", ZERO1),
    "moments of the next slice": Mutation(
        "self.own = nn.Parameter(self.whole.chunk(ranks)[self.rank])",
        "self.own = nn.Parameter(self.whole.chunk(ranks)[self.rank - 1])",
        "step",
        "dp2",
        "step 1: weight of model.embed_tokens.weight",
        "",
        ZERO1,
    ),
    "norm of own parts": Mutation(
        "    dist.all_reduce(square)\n", "", "step", "dp2", "gradient norm on rank 0", "conformance.adapters.loop:sum_norms", ZERO1
    ),
    "tied gradients of one end": Mutation(
        "dist.all_reduce(shared.grad, group=ends)", "pass", "tied", "pp2", "gradient of model.embed_tokens.weight", "", PIPELINE
    ),
    "tied gradients counted twice": Mutation(
        ", uncounted=shared if rank == last > 0 else None", "", "tied", "pp2", "gradient norm", "", PIPELINE
    ),
    "newest micro-batch first": Mutation("waiting.pop(0)", "waiting.pop()", "step", "pp2", "gradient of", "", PIPELINE),
    "shift without its backward": Mutation(
        "return shift(gradients[0], -1)", "return gradients[0]", "step", "cp2", "gradient of", "", RING
    ),
    "keys of the next rank": Mutation("(rank - i) % ranks  #", "(rank + i) % ranks  #", "step", "cp4", "step 1: loss", "", RING),
    "position 0 on every rank": Mutation(
        'position_ids=piece["position_ids"], ', "", "step", "cp2", "step 1: loss", "", RING
    ),
    "output of one block": Mutation("out * (lse - new).exp() + ", "out + ", "step", "cp2", "step 1: loss", "", RING),
    # picotron
    "gradients not divided": picotron("data_parallel.data_parallel:Bucket.launch", "AVG", "SUM", "step", "dp2", "2 times"),
    "norm counts replicas": picotron(
        "optimizer:clip_grad_norm", "grid.tp_world_size if shard is None else shard.replicas", "1", "step", "tp2", "gradient norm"
    ),
    "norm counts the tied embedding twice": picotron(
        "optimizer:clip_grad_norm", " and not is_tied_replica(model, name)", "", "tied", "pp2", "gradient norm"
    ),
    "norm of one stage": picotron(
        "optimizer:clip_grad_norm", "all_reduce(square, grid.pp_group)", "pass", "step", "pp2", "gradient norm on rank 0"
    ),
    "norm of own slices": picotron(
        "optimizer:clip_grad_norm", "all_reduce(square, grid.cp_dp_group)", "pass", "step", "dp2 zero1", "gradient norm"
    ),
    "eps of norms assumed": picotron("model.llama:RMSNorm.forward", "self.weight, self.eps)", "self.weight, 1e-6)", "step", "dp2", "step 1: loss"),
    "theta of rotations assumed": picotron(
        "model.llama:rope_frequencies", 'parameters["rope_theta"]', "1e4", "step", "dp2", "step 1: loss"
    ),
    "tied gradients not summed": picotron(
        "pipeline_parallel.pipeline_parallel:PipelineParallel.sum_tied_gradients",
        "all_reduce(main_grad(weight), self.embedding_group)",
        "pass",
        "tied",
        "pp2",
        "gradient of model.embed_tokens.weight",
    ),
    "loss not divided by micro-batches": picotron(
        "pipeline_parallel.pipeline_parallel:forward_step", "output_tensor / data_loader.grad_acc_steps", "output_tensor", "step", "pp2", "4 times"
    ),
    "partial sums": picotron(
        "tensor_parallel.tp_communications:ReduceFromRanks.forward",
        "start_all_reduce(partial, group)()",
        "partial.clone()",
        "step",
        "tp2",
        "step 1: loss",
    ),
    "gradients of the head not summed": picotron(
        "tensor_parallel.tp_communications:CopyToRanks.backward",
        "start_all_reduce(gradient, ctx.group)()",
        "gradient",
        "step",
        "tp2",
        "gradient of",
    ),
    "gradients of norms not summed": picotron(
        "model.weights:sum_partial_gradients", "all_reduce(total, group)", "pass", "step", "tp2 sp", "layernorm.weight"
    ),
    "shifted mask": picotron(
        "context_parallel.positions:visible_blocks",
        "(slice(half, tokens), full, False)",
        "(slice(half - 1, tokens), full, False)",
        "step",
        "cp2",
        "step 1: loss",
    ),
    "documents see each other over cp ranks": picotron(
        "context_parallel.positions:packed_blocks", "if documents is None", "if True", "packed", "cp2", "step 1: loss"
    ),
    "mean of the dp ranks' means": picotron(
        "batches:normalise_weights", 'grid.cp_dp_group if scope == "global" else grid.cp_group', "grid.cp_group", "masks", "dp2", "step 1"
    ),
    "optimizer begins again": picotron(
        "optimizer:AdamW.restore", "torch.tensor(updates[parameter],", "torch.tensor(0,", "resume", "dp2", "step 4: loss"
    ),
    "moments mixed up": picotron(
        "optimizer:AdamW.restore", "    read(parameter, name, tensor)", '    read(parameter, "exp_avg", tensor)', "elsewhere", "dp2", "step 4"
    ),
    "no master weights": picotron(
        "optimizer:AdamW.step",
        "torch._foreach_copy_([owned_weight(p) for p in rounded], [self.masters[p] for p in rounded])",
        "torch._foreach_copy_([owned_weight(p) for p in rounded], [self.masters[p] for p in rounded])\n"
        "            torch._foreach_copy_([self.masters[p] for p in rounded], [owned_weight(p) for p in rounded])",
        "mixed",
        "dp2",
        "weight of",
    ),
    "evaluation of one rank": Mutation(
        "    all_reduce(total, pgm.process_group_manager.cp_dp_group)\n", "", "evaluation", "dp2", "evaluation", "", PICOTRON
    ),
    "evaluation without targets' weights": Mutation(
        "weights = weights_of(batch)\n", "weights = torch.ones_like(batch['target_ids']).double()\n", "evaluation", "dp2", "evaluation", "", PICOTRON
    ),
    "prompts without their last token": Mutation(
        "case.prompts(), Sampling", "[each[:-1] for each in case.prompts()], Sampling", "generation", "pp2", "token of prompt", "", PICOTRON
    ),
}  # fmt: skip
