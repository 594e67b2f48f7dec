"""steps/: every step trains like transformers on one process, with what it adds to the model and to the optimizer."""

import contextlib
import functools
import importlib
import itertools
import math
import runpy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from conformance.worker_pool import WorkerPool
from steps import clip, communication, llama, s9_cp
from tests.support.oracle import assert_close, with_exact_norms

LAYOUTS = [
    "s1_one_process",
    "only_dp dp2",
    "only_tp tp2",
    "only_pp pp3",
    "only_cp cp4",
    "s2_tp tp2",
    "s3_sp tp2",
    "s4_dp dp2 tp2",
    "s5_buckets dp2 tp2",
    "s6_zero dp2 tp2",
    "s7_pp dp1 pp2 tp2",
    "s8_1f1b dp1 pp4 tp1",
    "s9_cp dp1 pp2 cp2 tp1",
    "s10_ep dp2 pp2 cp1 tp1",
    "s10_ep dp2 pp1 cp2 tp1",
    pytest.param("s10_ep dp2 pp1 cp1 tp2", marks=pytest.mark.slow),
    pytest.param("s11_muon dp2 pp1 cp2 tp1", marks=pytest.mark.slow),
    "s11_muon dp2 pp1 cp1 tp2",
    "clip dp1 pp2 cp1 tp2",
]  # a program, and its sizes
STEPS = 2  # of training: the second one has moments, and gradients that were set to zero
MORE_THAN_LLAMA = {"s10_ep", "s11_muon"}  # with experts, and the second one with Muon
Result = tuple[list[float], dict[str, Tensor]]


def train(step: str, sizes: dict[str, int]) -> Result:
    """Run a step on this rank. Returns the losses and this rank's weights."""
    with mock.patch.object(llama, "STEPS", STEPS):
        module = importlib.import_module(f"steps.{step}")
        model, losses = module.train() if step.startswith("only") else module.train(**sizes)
    communication.group.clear()  # the threads of a group end with its last reference
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def transformers_names(name: str) -> str:
    """Translate the name of a parameter, such as `1.q_proj.weight`."""
    index, rest = name.split(".", 1)
    ends = {0: "model.embed_tokens", llama.LAYERS + 1: "model.norm", llama.LAYERS + 2: "lm_head"}
    part = "self_attn." if rest[:2] in ("q_", "k_", "v_", "o_") else ""
    return f"{ends[int(index)]}.{rest}" if int(index) in ends else f"model.layers.{int(index) - 1}.{part}{rest}"


class DenseMixture(nn.Module):
    """Mixture of eight MLPs that all compute all tokens; the weights of all but the two best are 0."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden_size, 8, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        second = scores.sort(dim=-1, descending=True).values[..., 1:2]
        weights = scores.masked_fill(scores < second, -torch.inf).softmax(-1)
        return torch.einsum("bte,ebtd->btd", weights, torch.stack([expert(x) for expert in self.experts]))


@contextlib.contextmanager
def without_bfloat16() -> Iterator[None]:
    """Keep the dtype where torch.optim.Muon rounds to bfloat16."""
    with mock.patch.object(Tensor, "bfloat16", Tensor.clone), mock.patch.object(torch, "bfloat16", llama.DTYPE):
        yield


@functools.cache
def expected(step: str) -> Result:
    """Train transformers' Llama from a step's initial weights. Returns losses, and weights by their names there."""
    module = importlib.import_module(f"steps.{step}") if step in MORE_THAN_LLAMA else llama
    config = LlamaConfig(
        vocab_size=len(llama.VOCABULARY), hidden_size=llama.HIDDEN, intermediate_size=llama.INTERMEDIATE,
        num_hidden_layers=llama.LAYERS, num_attention_heads=llama.HEADS, num_key_value_heads=llama.KV_HEADS,
        rms_norm_eps=1e-6, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if module is not llama:
        for layer in model.model.layers:
            layer.mlp = DenseMixture(config)
    initial = module.make_model().state_dict()
    model.to(llama.DTYPE).load_state_dict({transformers_names(name): w for name, w in initial.items()}, strict=True)
    model = with_exact_norms(model)
    of_muon = [w for name, w in model.named_parameters() if step == "s11_muon" and "_proj" in name]
    others = [w for name, w in model.named_parameters() if not (step == "s11_muon" and "_proj" in name)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, llama.LEARNING_RATE)]
    if of_muon:
        rate = {"lr": llama.LEARNING_RATE, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(of_muon, **rate))
    losses = []
    for batch in llama.make_batches()[:STEPS]:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if step == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), clip.MAX_NORM)
        with without_bfloat16():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: model.get_parameter(transformers_names(name)).detach() for name in initial}


def global_name(name: str, held: int, dp_rank: int) -> str:
    """Return the name of a parameter among all experts, of which a dp rank holds this many."""
    before, experts, after = name.partition(".experts.")
    index, _, rest = after.partition(".")
    return f"{before}.experts.{dp_rank * held + int(index)}.{rest}" if experts else name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_trains_like_transformers(pool: WorkerPool, layout: str) -> None:
    """All ranks have the losses of one process, and its weights or the shards of their index in the tp group."""
    step, *words = layout.split()
    sizes = {word[:2]: int(word[2:]) for word in words}
    losses, weights = expected(step if step in {*MORE_THAN_LLAMA, "clip"} else "s1_one_process")
    ranks = math.prod(sizes.values())
    results, tp, dp = pool.run(train, ranks, step, sizes), sizes.get("tp", 1), sizes.get("dp", 1)
    seen = set()
    for rank, (rank_losses, rank_weights) in enumerate(results):
        assert_close(rank_losses, losses, what="losses")
        for local_name, weight in rank_weights.items():
            name = global_name(local_name, 8 // dp, rank * dp // ranks)
            dim = next((d for d in range(weight.ndim) if weight.size(d) != weights[name].size(d)), None)
            shard = weights[name] if dim is None else weights[name].chunk(tp, dim)[rank % tp]
            assert_close(weight, shard, what=name)
            assert (dim is None) == (tp == 1 or "_proj" not in name)
            seen.add(name)
    assert seen == weights.keys()


def test_any_combination_of_the_sizes_works() -> None:
    """In each of them, rank 0 of step 9 makes its part of the model and its buckets, without a message."""
    for sizes in itertools.product(*communication.SIZES.values()):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes))
        try:
            named = dict(zip(communication.SIZES, sizes, strict=True))
            communication.check_sizes(**named)
            communication.make_groups("dp", "pp", "cp", "tp", "cp_dp", "cp_dp_tp", **named)
            s9_cp.make_buckets(s9_cp.parallelize(llama.make_model()))
        finally:
            dist.destroy_process_group()
            communication.group.clear()


@pytest.mark.parametrize(
    ("program", "options", "ranks", "sentence"),
    [
        ("s8_1f1b", "--pp 6", 6, "pp 6 does not work; use one of [1, 2, 3, 4, 5]"),
        ("s9_cp", "--dp 3 --cp 3", 9, "dp 3 does not work; use one of [1, 2, 4]\ncp 3 does not work; use one of [1, 2, 4]"),
        ("s9_cp", "--tp 1", 2, "the sizes {'dp': 1, 'pp': 1, 'cp': 1, 'tp': 1} need --nproc_per_node 1, not 2"),
    ],
)  # fmt: skip
def test_wrong_sizes_end_in_a_sentence(
    program: str, options: str, ranks: int, sentence: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr("sys.argv", [program, *options.split()])
    for rank, printed in enumerate([sentence + "\n", ""]):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"steps.{program}", run_name="__main__")
        assert (end.value.code, capsys.readouterr().out) == (None, printed)
