"""Mistakes to plant: in picotron, and in the examples of trainers that `conformance` checks. `mutants` plants them.

A mistake is worth an entry if it ends no run with an error, and somebody has made it, or could. Add one for a new kind
of code. Pages show those that have a `page`.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """A mistake.

    Args:
        file: the file in which it is made.
        old, new: a text that occurs once in the file, and its replacement.
        found_by: the checks that find it, the first of which `make test` has, if any: `fuzz` for the random cases of
            fixed seeds, a file of tests (FILE::TEST may be slow), or a chapter and a layout of `conformance`, in front
            of them perhaps an adapter (by default picotron's, or `file` if that is an adapter).
        page, text: a page of docs/ that shows it, and the mistake in one sentence.
        thread: a thread of a public tracker that reports such a mistake: OWNER/REPOSITORY#NUMBER.
        place: a regular expression of the first wrong tensor, which `--trace` names, see `trace_faults`.
    """

    file: str
    old: str
    new: str
    found_by: tuple[str, ...]
    page: str = ""
    text: str = ""
    thread: str = ""
    place: str = ""


FUZZ = ("fuzz",)
DATA_PARALLEL = "picotron/data_parallel/data_parallel.py"
VARIANTS = "workbench/variants/choose.py"
ZERO1, ZERO3 = "workbench/variants/zero1.py", "workbench/variants/zero3.py"
FLOAT16, FLOAT16_TESTS = "workbench/variants/float16.py", ("tests/workbench/variants/test_float16.py",)
BFLOAT16, BFLOAT16_TESTS = (
    "workbench/variants/bfloat16_states.py",
    ("tests/workbench/variants/test_bfloat16_states.py",),
)
OPTIMIZER, PLACEMENT = "picotron/optimizer.py", "picotron/model/placement.py"
TENSOR_PARALLEL = "picotron/tensor_parallel/tensor_parallel.py"
TP_COMMUNICATIONS = "picotron/tensor_parallel/tp_communications.py"
CROSS_ENTROPY = "picotron/model/cross_entropy.py"
PIPELINE = "picotron/pipeline_parallel/pipeline_parallel.py"
EXECUTOR = "workbench/pipelines/executor.py"
CONTEXT_PARALLEL = "picotron/context_parallel/context_parallel.py"
BLOCKS = "picotron/context_parallel/block_attention.py"
LLAMA, BATCHES, LOADER = "picotron/model/llama.py", "workbench/own_loops/batches.py", "picotron/data/loader.py"
CHECKPOINT, WRITER = "workbench/run/checkpoint/checkpoint.py", "workbench/run/checkpoint/writer.py"
SAFETENSORS = "workbench/run/checkpoint/safetensors_folder.py"
EXPERTS, EXPERT_PARALLEL = "workbench/variants/experts.py", "workbench/variants/expert_parallel.py"
EXPERT_TESTS = "tests/workbench/variants/test_experts.py"
CACHE, SAMPLING = "workbench/generation/kv_cache.py", "workbench/generation/sampling.py"
ROTATION, SCHEDULES = "workbench/generation/rotation.py", "workbench/schedules/schedules.py"
CONFIG_CHECKS, RUN_FOLDER = "workbench/run/config_conflicts.py", "workbench/run/run_folder.py"
LOCAL_JOBS, JOBS = "workbench/sweep/local_jobs.py", "workbench/sweep/jobs.py"
ADAPTER = "conformance/adapters/picotron.py"
PLAIN_TP, TORCH_FSDP = "conformance/adapters/plain_tp.py", "conformance/adapters/torch_fsdp.py"
DDP, OWN_ZERO1, OWN_TENSOR, OWN_PIPELINE, OWN_RING = (
    f"conformance/examples/{name}.py" for name in ("ddp", "zero1", "tensor", "pipeline", "ring")
)
ADAMW = "optimizer = adamw(model.parameters(), case)"

MISTAKES: dict[str, Mistake] = {
    # ------------------------------------------------------------------------------------------------ training step
    "loss_not_divided": Mistake(
        PIPELINE,
        "loss = model(**next(data_loader)) / data_loader.grad_acc_steps\n        loss.backward()\n",
        "loss = model(**next(data_loader))\n        loss.backward()\n        loss = loss / data_loader.grad_acc_steps\n",
        ("fuzz", "run dp2"), "training_step",
        "train_step divides the logged loss by the number of micro-batches, but not the loss that backward starts at.",
    ),
    "clipped_by_own_norm": Mistake(
        OPTIMIZER, "    all_reduce(square, None)\n", "    all_reduce(square, pgm.process_group_manager.pp_group)\n", ("fuzz", "step tp2"), "training_step",
        "Each tp rank clips by the norm of its own gradients.",
    ),
    "decay_of_norms": Mistake(
        OPTIMIZER, '"weight_decay": 0.0}', '"weight_decay": training.weight_decay}', ("fuzz", "run dp2"), "training_step",
        "Weight decay applies to norms and biases as well as to matrices.",
    ),
    "schedule_one_step_late": Mistake(
        OPTIMIZER, "    def factor(step: int) -> float:\n", "    def factor(step: int) -> float:\n        step -= 1\n",
        ("fuzz", "tests/picotron/test_optimizer.py"), "training_step",
        "The learning-rate schedule is one step late, so the first step has a learning rate of 0.",
    ),
    "same_sequences": Mistake(
        LOADER, "for micro_batch in numbers[:, dp_rank])", "for micro_batch in numbers[:, 0])",
        FUZZ, "training_step", "All data-parallel ranks read the sequences of dp rank 0.",
    ),
    "loss_read_in_each_micro_batch": Mistake(
        PIPELINE, "total_loss = total_loss + loss.detach()", "total_loss = total_loss + loss.item()", ("tests/workbench/explain/test_explain.py",)
    ),
    "decay_begins_after_warmup": Mistake(
        OPTIMIZER, 'total - training.decay if training.lr_scheduler == "wsd" else warmup', "warmup", FUZZ
    ),
    "cosine_decays_to_zero": Mistake(
        OPTIMIZER, "low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))", "0.5 * (1 + math.cos(math.pi * progress))", FUZZ
    ),
    "each_rank_rounds_otherwise": Mistake(
        BFLOAT16, 'f"{seed} {self.name} {update}"', "f\"{seed} {self.name} {update} {__import__('os').getpid()}\"", BFLOAT16_TESTS
    ),
    "slices_round_alike": Mistake(
        BFLOAT16, "torch.arange(self.offset + start, self.offset + start + count", "torch.arange(start, start + count", BFLOAT16_TESTS
    ),
    "shards_round_alike": Mistake(BFLOAT16, "self.first + j + skipped", "j + skipped", BFLOAT16_TESTS),
    "rounded_to_nearest": Mistake(BFLOAT16, "round_stochastically(weight, w, bits)", "weight.copy_(w)", BFLOAT16_TESTS),
    "second_moment_to_nearest": Mistake(
        BFLOAT16, "round_stochastically(exp_avg_sq, v, bits >> 16)", "exp_avg_sq.copy_(v)", BFLOAT16_TESTS
    ),
    "scale_not_divided": Mistake(FLOAT16, "clip / scale.value", "clip", FLOAT16_TESTS),
    "overflow_seen_on_own_rank_only": Mistake(
        FLOAT16, "bool(norm.isfinite())", "all(each.isfinite().all() for each in model.gradient_buffers())", FLOAT16_TESTS
    ),
    "scale_not_resumed": Mistake(
        "workbench/run/checkpoint/checkpoint.py", "vars(scale).update(self.state.loss_scale)", "pass", FLOAT16_TESTS
    ),
    "nan_becomes_zero": Mistake(BFLOAT16, "torch.where(values.isfinite(), rounded, values)", "rounded", BFLOAT16_TESTS),
    "norm_of_one_stage": Mistake(OPTIMIZER, "all_reduce(square, None)", "all_reduce(square, pgm.process_group_manager.tp_group)", ("fuzz", "step pp2")),
    "norm_counts_replicas": Mistake(
        OPTIMIZER, "pgm.process_group_manager.tp_world_size if shard is None else shard.replicas", "1",
        ("fuzz", "step tp2"),
    ),
    "norm_counts_tied_embedding_twice": Mistake(
        OPTIMIZER, " and not placement(parameter).is_replica", "", ("fuzz", "run pp2 tied")
    ),
    "no_master_weights": Mistake(
        OPTIMIZER,
        "torch._foreach_copy_([owned_weight(p) for p in rounded], [self.masters[p] for p in rounded])",
        "torch._foreach_copy_([owned_weight(p) for p in rounded], [self.masters[p] for p in rounded])\n"
        "            torch._foreach_copy_([self.masters[p] for p in rounded], [owned_weight(p) for p in rounded])",
        ("tests/picotron/test_optimizer.py", "mixed dp2"),
    ),
    "moments_in_bfloat16": Mistake(
        OPTIMIZER,
        "        UPDATE(self)  # skips",
        "        for each in self.state.values() if next(iter(self.masters.values())).dtype == torch.float32 else ():\n"
        '            _ = [each[n].copy_(each[n].bfloat16()) for n in ("exp_avg", "exp_avg_sq") if n in each]\n'
        "        UPDATE(self)  # skips",
        ("tests/picotron/test_optimizer.py",),
    ),
    # ---------------------------------------------------------------------------------------------- data parallelism
    "gradients_not_divided": Mistake(
        DATA_PARALLEL, "dist.ReduceOp.AVG, async_op=True)", "dist.ReduceOp.SUM, async_op=True)", ("fuzz", "step dp2"), "data_parallel",
        "Bucket.launch sums the gradients over the ranks, but does not divide by the number of ranks.",
    ),
    "loss_averaged_twice": Mistake(
        PIPELINE, "loss = model(**next(data_loader)) / data_loader.grad_acc_steps",
        "loss = model(**next(data_loader)) / data_loader.grad_acc_steps / torch.distributed.get_world_size()",
        ("fuzz", "step dp2"), "data_parallel",
        "The loss is divided by the number of ranks, although the gradients are averaged over the ranks as well.",
    ),
    "reduced_every_time": Mistake(
        PIPELINE, "model.require_backward_grad_sync = i == data_loader.grad_acc_steps - 1", "pass",
        ("fuzz", "run dp2"), "data_parallel",
        "train_step never sets require_backward_grad_sync, so the backward of every micro-batch averages the gradients.",
    ),
    "only_last_micro_batch": Mistake(
        DATA_PARALLEL, ".gradients[parameter].add_(gradient)", ".gradients[parameter].copy_(gradient)", FUZZ
    ),
    # ------------------------------------------------------------------------------------------------------------ ZeRO
    "norm_of_own_slices": Mistake(
        OPTIMIZER, "return on_tp_ranks if owned else on_tp_ranks *", "return on_tp_ranks *", ("fuzz", "run dp2 zero1"), "zero",
        "Each rank clips by the norm of its own slices of the gradients.",
    ),
    "decay_by_shape_of_slice": Mistake(
        OPTIMIZER,
        "self.masters.items() if p.ndim >= 2]\n        vectors = [master for p, master in self.masters.items() if p.ndim < 2]",
        "self.masters.items() if master.ndim >= 2]\n        vectors = [m for m in self.masters.values() if m.ndim < 2]",
        ("fuzz", "run dp2 zero1"), "zero", "Weight decay applies to what has two dimensions, but slices are flat.",
    ),
    "weights_not_gathered": Mistake(
        ZERO1, "self.work = start_gather_of_slices(self.weights, self.group)", "self.work = None", ("fuzz", "run dp2 zero1"), "zero",
        "After the optimizer's step, the ranks do not gather the updated weights.",
    ),
    "gradients_overwritten": Mistake(
        ZERO3, "self.gradient_shard.add_(buffer[self.own])", "self.gradient_shard.copy_(buffer[self.own])",
        ("fuzz", "run dp2 zero3"), "zero",
        "The reduction of each micro-batch replaces the slice of the gradients, instead of adding to it.",
    ),
    "weights_outlive_update": Mistake(ZERO3, "unit.free()  # its full weights", "pass  # its full weights", ("tests/workbench/variants/test_zero3_any_module.py",)),
    # -------------------------------------------------------------------------------------------- tensor parallelism
    "partial_sums": Mistake(
        TP_COMMUNICATIONS,
        "reduce_from_ranks = pair(start_all_reduce,", "reduce_from_ranks = pair(identity,", ("fuzz", "step tp2"), "tensor_parallel",
        "The forward of reduce_from_ranks returns the rank's own term instead of the sum over the ranks.",
    ),
    "partial_gradients": Mistake(
        TENSOR_PARALLEL,
        "finish_dx = start_sum(dx, ctx.group, ctx.sequence_parallel)", "finish_dx = dx.clone", ("fuzz", "step tp2"), "tensor_parallel",
        "ColumnParallel.backward does not sum the gradient of x over the ranks.",
    ),
    "copy_not_summed": Mistake(
        TP_COMMUNICATIONS,
        "= pair(identity,             start_all_reduce)", "= pair(identity, identity)", ("fuzz", "step tp2"), "tensor_parallel",
        "The backward of copy_to_ranks does not sum: each rank continues with the contribution of its own shard of the head.",
    ),
    "norms_not_summed": Mistake(
        PLACEMENT, "        all_reduce(total, group)\n", "", ("fuzz", "step tp2 sp"), "tensor_parallel",
        "With sequence parallelism, the gradients of the norms' weights are not summed over the ranks.",
    ),
    "largest_logit_of_own_shard": Mistake(
        CROSS_ENTROPY, "all_reduce(top, shard.group, dist.ReduceOp.MAX)", "pass", FUZZ
    ),
    "log_softmax_in_bfloat16": Mistake(
        CROSS_ENTROPY, "        wide = accumulation_dtype(logits)\n        logits", "        wide = logits.dtype\n        logits",
        ("tests/picotron/model/test_cross_entropy.py",),
    ),
    # ------------------------------------------------------------------------------------------------------- families
    "head_norms_not_summed": Mistake(
        TENSOR_PARALLEL, 'in_block = ".self_attn." in name or ".mlp." in name', "in_block = False",
        ("fuzz", "step tp2 qwen3"), "families", "Qwen3: the gradients of the norms inside heads are not summed over the ranks.",
        thread="NVIDIA/Megatron-LM#7452", place=r"gradient of \S*self_attn\.[qk]_norm\.weight .* one term of a sum",
    ),
    "shared_heads_not_summed": Mistake(
        TENSOR_PARALLEL, "new_groups(grid.view(-1, kv.replicas).tolist()) if kv.replicas > 1 else None", "None",
        ("fuzz", "step tp4 kv2"),
        thread="bigcode-project/Megatron-LM#37", place=r"gradient of \S*self_attn\.[kv]_proj\.weight .* one term of a sum",
    ),
    "norm_of_own_heads": Mistake(
        TENSOR_PARALLEL, "mean_over_ranks(wide.square().mean(-1, keepdim=True), self.group)", "wide.square().mean(-1, keepdim=True)",
        ("fuzz", "step tp2 olmo2"), "families", "OLMo 2: each rank normalises its own heads, instead of all heads together.",
        thread="EleutherAI/gpt-neox#1424", place=r"layers\.0\.self_attn\.[qk]_norm output",
    ),
    "logits_multiplied": Mistake(
        LLAMA, "x = x / self.logits_scaling", "x = x * self.logits_scaling", ("fuzz", "step dp2 granite")
    ),
    "stale_frequencies": Mistake(
        LLAMA, "self.frequencies = rope_frequencies(config)",
        "self.frequencies = rope.__dict__.setdefault(head_size(config), rope_frequencies(config))", FUZZ,
    ),
    "eps_of_norms_assumed": Mistake(LLAMA, "self.weight, self.eps)\n", "self.weight, 1e-6)\n", ("fuzz", "step dp2")),
    "theta_assumed": Mistake(LLAMA, '1.0 / parameters["rope_theta"]', "1.0 / 1e4", ("fuzz", "step dp2")),
    # -------------------------------------------------------------------------------------------------------- experts
    "expert_gradients_times_ep": Mistake(
        EXPERT_PARALLEL, "gradient_scale=1 / ep_size", "gradient_scale=1.0", (EXPERT_TESTS, "step dp2 ep2 mixtral"),
        thread="pytorch/pytorch#160285",
    ),
    "expert_gradients_divided_by_all": Mistake(
        EXPERT_PARALLEL, "gradient_scale=1 / ep_size", "gradient_scale=1 / grid.cp_dp_world_size",
        (EXPERT_TESTS, "step dp4 ep2 mixtral"),
    ),
    "router_not_summed": Mistake(
        EXPERTS, "place(block.gate.weight, sum_over=grid.tp_group)", "place(block.gate.weight, sum_over=None)",
        (EXPERT_TESTS, "step tp2 mixtral"), thread="pytorch/torchtitan#4054",
    ),
    "expert_without_rows_skipped": Mistake(
        EXPERTS, "zip(experts.values(), parts, strict=True)])", "zip(experts.values(), parts, strict=True) if len(part)])",
        FUZZ,
    ),
    "router_weights_not_normalised": Mistake(
        EXPERTS, "weights = weights / weights.sum(-1, keepdim=True)", "pass", (EXPERT_TESTS, "step dp2 mixtral")
    ),
    "outputs_in_the_wrong_order": Mistake(
        EXPERTS, "Permute.apply(outputs, inverse, order)", "Permute.apply(outputs, order, inverse)",
        (EXPERT_TESTS, "step dp2 mixtral"),
    ),
    "rows_of_ranks_not_sorted": Mistake(
        EXPERT_PARALLEL, "expert.repeat_interleave(arriving.flatten()).argsort(stable=True)",
        "expert.new_tensor(range(sum(received)))", (EXPERT_TESTS, "step dp2 ep2 mixtral"),
    ),
    "load_of_one_rank": Mistake(
        EXPERTS, "    all_reduce(counts, None)\n", "", (EXPERT_TESTS,), thread="NVIDIA-NeMo/Automodel#3359"
    ),
    "router_in_bfloat16": Mistake(
        EXPERTS, "logits.softmax(-1, dtype=accumulation_dtype(logits))", "logits.softmax(-1)", (EXPERT_TESTS,)
    ),
    # ------------------------------------------------------------------------------------------ pipeline parallelism
    "micro_batches_not_divided": Mistake(
        PIPELINE,
        "        output_tensor = output_tensor / data_loader.grad_acc_steps\n        losses.append(output_tensor.detach())\n",
        "        losses.append(output_tensor.detach() / data_loader.grad_acc_steps)\n",
        ("fuzz", "step pp2"), "pipeline_parallel",
        "forward_step divides the logged loss by the number of micro-batches, but not the loss that backward starts at.",
    ),
    "wrong_backward_first": Mistake(
        PIPELINE, "\n\nclass PipelineParallel(", "\n\nclass deque(deque):\n    popleft = deque.pop\n\n\nclass PipelineParallel(",
        ("fuzz", "step pp2"), "pipeline_parallel", "Each stage runs backward for its newest forward instead of its oldest.",
    ),
    "tied_embedding_forgotten": Mistake(
        PIPELINE, "sum_over=both", "sum_over=None", ("fuzz", "run pp2 tied"), "pipeline_parallel",
        "The first and the last stage do not sum the gradients of the tied embedding, of which both hold a replica.",
    ),
    "executor_does_not_divide": Mistake(EXECUTOR, "y = y / self.schedule.micro_batches", "y = y / 1", FUZZ),
    "groups_by_operation": Mistake(
        EXECUTOR,
        "grid.pp_group if sender < receiver else", 'grid.pp_group if operation == "send" else',
        ("tests/workbench/pipelines/test_nccl_order.py",),
    ),
    "receives_not_waited_for": Mistake(
        EXECUTOR, "            work.wait()\n\n    def take_input", "            pass\n\n    def take_input",
        ("tests/workbench/pipelines/test_nccl_order.py",),
    ),
    "reduced_at_the_end": Mistake(
        EXECUTOR, "        self.model.start_grad_sync(action.stage)\n", "        pass\n", ("tests/workbench/pipelines/test_executor_order.py",)
    ),
    "uneven_stages": Mistake(
        "picotron/pipeline_parallel/stages.py", "    costs[-1] += head\n", "", ("tests/picotron/pipeline_parallel/test_stages.py",)
    ),
    # ------------------------------------------------------------------------------------------- context parallelism
    "cp_not_averaged": Mistake(
        PLACEMENT, "or pgm.process_group_manager.cp_dp_group", "or pgm.process_group_manager.dp_group",
        ("fuzz", "step cp2"), "context_parallel",
        "The gradients are averaged over dp_group instead of cp_dp_group, so not over the cp ranks.",
    ),
    "wrong_tokens": Mistake(
        LOADER, "grid.cp_rank, layout.cp_sharding)", 'grid.cp_rank, "contiguous")',
        ("fuzz",), "context_parallel",
        "The data loader returns contiguous shards of the sequences, but attention assumes zigzag shards.",
    ),
    "positions_from_zero": Mistake(
        LOADER, "self.position_ids = positions.to(device).expand", "self.position_ids = torch.arange(len(positions), device=device).expand",
        ("fuzz",), "context_parallel", "Every rank numbers the positions of its tokens from 0.",
    ),
    "future_seen": Mistake(
        CONTEXT_PARALLEL, "else Block(slice(half, tokens), full)]", "else Block(full, full)]", ("fuzz", "step cp2"), "context_parallel",
        "visible_blocks lets all queries attend to the keys of later ranks, not only the queries of the second chunk.",
    ),
    "contiguous_shards": Mistake(
        CONTEXT_PARALLEL, "else Block(slice(half, tokens), full)]\n",
        "else Block(slice(half, tokens), full)]\n\n\nzigzag_blocks = visible_blocks\n\n\n"
        "def chunk_count(cp_size, sharding):\n    return cp_size\n\n\n"
        'def visible_blocks(source, tokens, sharding):\n    return zigzag_blocks(source, tokens, "contiguous")\n',
        ("tests/picotron/context_parallel/test_context_parallel.py",), "context_parallel",
        "Data loader and attention use contiguous shards: the results are correct, but the last rank has the most work.",
    ),
    "documents_see_each_other": Mistake(
        VARIANTS, "if documents is not None:", "if False:", ("fuzz", "run cp2")
    ),
    "ring_turns_the_other_way": Mistake(
        CONTEXT_PARALLEL,
        "tensor.contiguous(), grid.cp_send_rank, grid.cp_group),\n        dist.P2POp(dist.irecv, received, grid.cp_recv_rank",
        "tensor.contiguous(), grid.cp_recv_rank, grid.cp_group),\n        dist.P2POp(dist.irecv, received, grid.cp_send_rank",
        ("fuzz", "step cp4"),
    ),
    "blocks_merged_by_the_larger": Mistake(
        BLOCKS, "torch.logaddexp(lse, block_lse)", "torch.maximum(lse, block_lse)", FUZZ
    ),
    "odd_length_loses_a_token": Mistake(
        CONTEXT_PARALLEL, 'if sharding == "zigzag" and cp_size > 1 else', 'if sharding == "zigzag" else', FUZZ
    ),
    "sum_over_own_tokens": Mistake(BATCHES, "return sum_for_own_losses(x.sum(-1), pgm.process_group_manager.cp_group)", "return x.sum(-1)", FUZZ),
    # ----------------------------------------------------------------------------------------- batches, data, samples
    "mean_of_means": Mistake(
        BATCHES, 'all_reduce(mean, grid.cp_dp_group if scope == "global" else grid.cp_group,', "all_reduce(mean, grid.cp_group,",
        ("fuzz", "run dp2"),
    ),
    "mean_of_each_micro_batch": Mistake(
        BATCHES, "needs_weights = check_batches(", "needs_weights = not check_batches(", FUZZ,
    ),
    "rows_skip_a_token": Mistake(
        "picotron/data/loader.py", "tokens = self.tokens[i * self.seq_length : (i + 1) * self.seq_length + 1]\n",
        "start = min(i * (self.seq_length + 1), len(self.tokens) - 1 - self.seq_length)\n"
        "        tokens = self.tokens[start : start + self.seq_length + 1]\n", FUZZ,
    ),
    "parts_tokenised_separately": Mistake(
        "workbench/prepare/token_characters.py", "        if not self.is_fast:\n            return [",
        "        if any(places):\n"
        "            cut = [[text[a:b] for a, b in zip([0, *p], [*p, None])] for text, p in zip(texts, places)]\n"
        "            ids = [self._encode(parts)['input_ids'] for parts in cut]\n"
        "            spans = [[(a, b or len(t)) for a, b, i in zip([0, *p], [*p, None], each) for _ in i] for t, p, each in zip(texts, places, ids)]\n"
        "            return [Spans(sum(each, []), span.__getitem__) for each, span in zip(ids, spans)]\n"
        "        if not self.is_fast:\n            return [",
        FUZZ,
    ),
    # ------------------------------------------------------------------------------------------ checkpoints and files
    "optimizer_begins_again": Mistake(
        OPTIMIZER, "torch.tensor(updates, dtype", "torch.tensor(0, dtype", ("fuzz", "run dp2")
    ),
    "moments_mixed_up": Mistake(
        OPTIMIZER, "                read(parameter, name, tensor)", '                read(parameter, "exp_avg", tensor)',
        ("fuzz", "run dp2"),
    ),
    "resumed_one_sample_late": Mistake(CHECKPOINT, "samples = self.state.samples if", "samples = self.state.samples + 1 if", FUZZ),
    "tensors_not_flushed": Mistake(
        SAFETENSORS, "            os.fsync(file.fileno())\n", "", ("tests/workbench/run/checkpoint/test_checkpoint_writer.py",)
    ),
    "files_not_flushed": Mistake("workbench/files.py", "            os.fsync(file.fileno())\n", "", ("tests/workbench/test_files.py",)),
    "keeps_one_fewer": Mistake(
        WRITER, "[: -config.keep_last] if", "[: 1 - config.keep_last or None] if", ("tests/workbench/run/checkpoint/test_checkpoint_writer.py",)
    ),
    "final_name_too_early": Mistake(
        "workbench/files.py", "path.with_name(path.name.removesuffix(UNFINISHED) + UNFINISHED)", "path", ("tests/workbench/run/checkpoint/test_checkpoint_writer.py",)
    ),
    "checksums_not_compared": Mistake(
        SAFETENSORS, "if checksum.hexdigest() != expected.xxh3:", "if False:", ("tests/workbench/run/checkpoint/test_checkpoint_mistakes.py",)
    ),
    "ranges_checked_by_nobody": Mistake(
        CHECKPOINT, "all_ranges[share::shares]", "all_ranges[share : share + 1]", ("tests/workbench/run/checkpoint/test_checkpoint_mistakes.py",)
    ),
    "records_after_the_checkpoint_stay": Mistake(
        RUN_FOLDER, 'if record["step"] <= (resumed_step or 0)]', "]", ("tests/workbench/run/test_metrics.py",)
    ),
    "earlier_checkpoints_stay": Mistake(
        RUN_FOLDER, "(resumed_step is None or int(match[1]) > resumed_step)]", "int(match[1]) == resumed_step]", ("tests/workbench/run/test_metrics.py",)
    ),
    "stop_signal_of_own_rank": Mistake(
        "workbench/run/metrics.py", "return record, int(any_stop)", "return record, int(stop)", ("tests/workbench/run/checkpoint/test_resume.py",)
    ),
    # ----------------------------------------------------------------------------------------------------- generation
    "every_token_is_the_first": Mistake(
        ROTATION, "[len(sequence) - 1 for sequence in self.sequences]", "[0 for _ in self.sequences]",
        ("tests/workbench/generation/test_generation.py", "generation pp2"), "generation",
        "Every new token has the position 0, because it is the only token of its row.",
    ),
    "empty_columns_seen": Mistake(
        CACHE, "        if any(self.starts):", "        if False:", ("tests/workbench/generation/test_generation.py",), "generation",
        "New tokens of short prompts attend to the empty columns of the cache, too, because there is no mask.",
    ),
    "one_stream_of_draws": Mistake(
        ROTATION, '{number: random.Random(f"{sampling.seed} {first + number}") for number in prompts}',
        'dict.fromkeys(prompts, random.Random(f"{sampling.seed} {first}"))', ("tests/workbench/generation/test_generation.py",), "generation",
        "All prompts of a group draw from one stream of random numbers.",
    ),
    "unused_columns_kept": Mistake(CACHE, "unused = min(self.starts, default=0)", "unused = 0", ("tests/workbench/generation/test_kv_cache.py",)),
    "top_p_cuts_the_last": Mistake(SAMPLING, "ranked[before >= ", "ranked[before + ranked >= ", ("tests/workbench/generation/test_sampling.py",)),
    "top_k_keeps_one_more": Mistake(SAMPLING, "ranked[:, top_k:] = 0", "ranked[:, top_k + 1 :] = 0", ("tests/workbench/generation/test_sampling.py",)),
    "ends_before_min_new_tokens": Mistake(
        SAMPLING, "    if new < sampling.min_new_tokens:\n", "    if False:\n", ("tests/workbench/generation/test_generation.py",)
    ),
    "prompts_without_last_token": Mistake(
        ADAPTER, "case.prompts(), Sampling", "[each[:-1] for each in case.prompts()], Sampling", ("generation pp2",)
    ),
    # ------------------------------------------------------------------------------------------------------ schedules
    "one_warm_up_too_many": Mistake(
        SCHEDULES, "    for _ in range(pp - rank - 1): program.forward(rank)\n", "    for _ in range(pp - rank): program.forward(rank)\n",
        ("tests/workbench/schedules/test_simulate.py",),
    ),
    "weight_gradients_not_delayed": Mistake(
        SCHEDULES, "program.backward_weight(keep=rank)", "program.backward_weight()", ("tests/workbench/schedules/test_simulate.py",)
    ),
    "interleaved_warms_up_longer": Mistake(
        SCHEDULES, "group_size, warmup_per_rank=2)", "group_size, warmup_per_rank=3)", ("tests/workbench/schedules/test_simulate.py",)
    ),
    # ----------------------------------------------------------------------------- config, sweeps, plans and forecasts
    "check_of_decay_forgotten": Mistake(
        CONFIG_CHECKS, 'if training.decay_steps and training.lr_scheduler != "wsd":', "if False:", ("tests/workbench/run/test_config.py",)
    ),
    "unknown_keys_accepted": Mistake("picotron/config.py", 'extra="forbid"', 'extra="ignore"', ("tests/workbench/run/test_config.py",)),
    "duplicate_keys_accepted": Mistake("workbench/files.py", "    if len(data) < len(pairs):", "    if False:", ("tests/workbench/prepare/test_documents.py",)),
    "layouts_with_fewer_processes": Mistake(
        "workbench/sweep/combinations.py", "if math.prod(layout.values()) in world_sizes]", "if math.prod(layout.values()) <= max(world_sizes)]",
        ("tests/workbench/sweep/test_create_config.py",),
    ),
    "timeouts_called_cancelled": Mistake(
        LOCAL_JOBS, 'stopped = "cancelled" if interrupt.received else "timeout"', 'stopped = "cancelled"',
        ("tests/workbench/sweep/test_local_jobs.py::test_local_jobs_resume_after_a_timeout_and_after_ctrl_c",),
    ),
    "start_of_job_ignored": Mistake(
        JOBS, 'f"latest or {start}" if start else "latest"', '"latest"',
        ("tests/workbench/sweep/test_local_jobs.py::test_jobs_start_from_the_load_path_of_their_config_and_continue_from_their_own_checkpoint",),
    ),
    "bound_above_the_value": Mistake(
        "workbench/sweep/planner.py", "len(saved[0]) * min(m, layout.pp_size) * min(saved[0])", "len(saved[0]) * m * min(saved[0])",
        ("tests/workbench/sweep/test_planner.py",),
    ),
    "estimate_forgets_an_input": Mistake(
        "workbench/explain/memory.py", "norms + (2 - compiles_mlp(config, s))", "norms + (1 - compiles_mlp(config, s))", ("tests/workbench/explain/test_memory.py",)
    ),
    "half_an_all_reduce": Mistake(
        "workbench/explain/step_time.py", "self.collective(\"dp\", 2 * s.wide * once", "self.collective(\"dp\", s.wide * once",
        ("tests/workbench/explain/test_step_time.py",),
    ),
    # --------------------------------------------------------------------------- evaluation, in picotron's adapter
    "evaluation_of_one_rank": Mistake(ADAPTER, "    all_reduce(total, pgm.process_group_manager.cp_dp_group)\n", "", ("run dp2",)),
    "evaluation_without_weights": Mistake(
        ADAPTER, "weights = weights_of(batch)\n", "weights = torch.ones_like(batch['target_ids']).double()\n", ("run dp2",)
    ),
    "evaluations_summed": Mistake(
        "workbench/run/metrics.py", "    all_reduce(mean, grid.cp_dp_group, dist.ReduceOp.AVG)\n", "    all_reduce(mean, grid.cp_dp_group)\n", FUZZ
    ),
    # ------------------------------------------------------------ trainers in plain torch, the examples of conformance
    "ddp: forgotten_all_reduce": Mistake(DDP, "dist.all_reduce(parameter.grad)", "pass", ("step dp2",)),
    "ddp: mean_of_ranks_means": Mistake(DDP, "dist.all_reduce(total)", "total *= ranks", ("run dp2",)),
    "ddp: mean_of_micro_batches_means": Mistake(
        DDP, "losses.sum() / total", "losses.sum() / weights_of(piece).sum() / case.micro_batches / ranks", ("run dp2",),
        thread="PrimeIntellect-ai/prime-rl#583", place=r"gradient of lm_head output .* times what it should be",
    ),
    "ddp: loss_of_one_rank": Mistake(DDP, "dist.all_reduce(loss)", "pass", ("step dp2",)),
    "ddp: same_rows_on_every_rank": Mistake(DDP, "chunk(ranks)[rank]", "chunk(ranks)[0]", ("step dp2",)),
    "ddp: weights_of_targets_ignored": Mistake(
        DDP, 'piece["target_ids"]) * weights_of(piece)', 'piece["target_ids"])', ("run dp2",)
    ),
    "ddp: stale_replica": Mistake(DDP, "        optimizer.step()", "        rank or optimizer.step()", ("step dp2",)),
    "ddp: gradients_not_set_to_zero": Mistake(
        DDP, "        optimizer.zero_grad()\n", "", ("run dp2",),
        thread="facebookresearch/nwm#16", place=r"step 2: gradient of lm_head\.weight",
    ),
    "ddp: no_clipping": Mistake(DDP, "case.max_grad_norm or ", "", ("run dp2",)),
    "ddp: decay_of_norms": Mistake(
        DDP, ADAMW, f"{ADAMW}\n    optimizer.param_groups[1]['weight_decay'] = 0.1", ("run dp2",),
        thread="verl-project/verl#5070", place=r"step 1: \S*input_layernorm\.weight .* after the optimizer's step",
    ),
    "ddp: documents_see_each_other": Mistake(
        DDP, "logits_of(model, piece)", "model(input_ids=piece['input_ids']).logits", ("run dp2",),
        thread="huggingface/nanoVLM#204", place=r"(rotary_emb output|layers\.0\.self_attn\.o_proj input)",
    ),
    "ddp: untied": Mistake(
        DDP, f"    {ADAMW}", f"    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())\n    {ADAMW}", ("run dp2 tied",)
    ),
    "ddp: own_loss_ignored": Mistake(
        DDP, "case.token_losses(", "__import__('conformance.case').case.cross_entropy(", ("loss dp2",)
    ),
    "ddp: logits_in_bfloat16": Mistake(DDP, "logits_of(model, piece)", "logits_of(model, piece).bfloat16()", ("float32 dp2",)),
    "ddp: exported_in_bfloat16": Mistake(
        DDP, "model.save_pretrained", "__import__('copy').deepcopy(model).bfloat16().save_pretrained", ("export dp2",)
    ),
    "ddp: exported_without_a_multiplier": Mistake(
        DDP, "        model.save_pretrained", "        model.config.residual_multiplier = 1.0\n        model.save_pretrained", ("export dp2 granite",)
    ),
    "ddp: exported_without_weights": Mistake(DDP, "model.save_pretrained", "model.config.save_pretrained", ("export dp2",)),
    "zero1: slices_not_gathered": Mistake(OWN_ZERO1, "matrices.gather()", "pass", ("step dp2",)),
    "zero1: moments_of_the_next_slice": Mistake(
        OWN_ZERO1, "nn.Parameter(self.weight_slices[self.rank])", "nn.Parameter(self.weight_slices[self.rank - 1])", ("step dp2",)
    ),
    "zero1: norm_of_own_parts": Mistake(
        "conformance/adapters/loop.py", "    dist.all_reduce(square)\n", "", (f"{OWN_ZERO1} step dp2",)
    ),
    "tensor: copy_not_summed": Mistake(OWN_TENSOR, "*inputs, copy, all_reduce", "*inputs, copy, copy", ("step tp2",)),
    "tensor: replicas_counted_on_every_rank": Mistake(
        OWN_TENSOR, "for name in places), torch.zeros", "for name in squares), torch.zeros", ("step tp2",)
    ),
    "pipeline: tied_gradients_of_one_end": Mistake(
        OWN_PIPELINE, "dist.all_reduce(shared.grad, group=ends)", "pass", ("run pp2 tied",),
        thread="uw-syfi/piper#13", place=r"gradient of model\.embed_tokens\.weight .* one term of a sum over ranks 0, 1",
    ),
    "pipeline: tied_gradients_counted_twice": Mistake(
        OWN_PIPELINE, ", uncounted=shared if rank == last > 0 else None", "", ("run pp2 tied",)
    ),
    "pipeline: newest_micro_batch_first": Mistake(
        OWN_PIPELINE, "waiting.pop(0)", "waiting.pop()", ("step pp2",),
        thread="pytorch/pytorch#139404", place=r"gradient of model\.layers\.1 output on rank 0 holds the values of rows 12-15",
    ),
    "ring: shift_without_backward": Mistake(
        OWN_RING, "return shift(gradient, -1)", "return gradient", ("step cp2",),
        thread="NVIDIA/Megatron-LM#1464", place=r"gradient of \S*layers\.1\.self_attn\.[vk]_proj output",
    ),
    "ring: keys_of_the_next_rank": Mistake(OWN_RING, "(rank - i) % ranks  #", "(rank + i) % ranks  #", ("step cp4",)),
    "ring: position_0_on_every_rank": Mistake(
        OWN_RING, 'position_ids=piece["position_ids"], ', "", ("step cp2",),
        thread="NVIDIA/Megatron-LM#560", place=r"rotary_emb output on rank 1",
    ),
    "ring: output_of_one_block": Mistake(OWN_RING, "out * (lse - new).exp() + ", "out + ", ("step cp2",)),
    "ddp: not_divided_by_micro_batches": Mistake(
        DDP, "losses.sum() / total", "losses.sum() / total * case.micro_batches", ("run dp2",),
        thread="ByteDance-Seed/VeOmni#963", place=r"gradient of lm_head\.weight .* is 4 times",
    ),
    "ddp: only_last_micro_batch": Mistake(
        DDP, "part.backward()", "optimizer.zero_grad(); part.backward()", ("run dp2",),
        thread="NVIDIA-NeMo/Automodel#3530", place=r"gradient of lm_head\.weight .* the gradients of all outputs are equal",
    ),
    "ddp: first_rate_is_0": Mistake(
        DDP, "case.learning_rates[step]", "case.learning_rates[step] * (step > 0)", ("run dp2",),
        thread="EleutherAI/gpt-neox#1379", place=r"step 1: .*\.weight on ranks 0, 1 after the optimizer's step",
    ),
    "fsdp: sum_instead_of_mean": Mistake(
        TORCH_FSDP, "x), ranks, model", "x), ranks**2, model", (f"{TORCH_FSDP} step dp2",),
        thread="pytorch/pytorch#162338", place=r"gradient of lm_head\.weight .* is 2 times",
    ),
    "pipeline: norm_of_one_stage": Mistake(
        OWN_PIPELINE, "return sum_norms(own, limit, uncounted=shared if rank == last > 0 else None)",
        "return float(nn.utils.clip_grad_norm_(own, limit))", ("step pp2",),
        thread="pytorch/torchtitan#596", place=r"the gradient norm",
    ),
    "ring: gradients_of_own_tokens": Mistake(
        OWN_RING, "            dist.all_reduce(p.grad)\n", "            pass\n", ("step cp2",),
        thread="ByteDance-Seed/VeOmni#1115", place=r"gradient of lm_head\.weight .* one term of a sum over ranks 0, 1",
    ),
    "ring: stale_keys_in_backward": Mistake(
        OWN_RING, "kv = Shift.apply(kv) if", "kv = kv + (Shift.apply(kv) - kv).detach() if", ("step cp2",),
        thread="huggingface/diffusers#14265", place=r"gradient of \S*layers\.1\.self_attn\.[vk]_proj output",
    ),
    "ring: mean_of_own_targets": Mistake(
        OWN_RING, "accumulate(case, tokens, total, logits_of)",
        'accumulate(case, tokens, (tokens["target_ids"] >= 0).sum() * dist.get_world_size(), logits_of)', ("run cp2",),
        thread="NVIDIA/Megatron-LM#673", place=r"gradient of lm_head output .* times what it should be",
    ),
    "ddp: mean_of_no_targets": Mistake(
        DDP, "losses.sum() / total", "(losses.sum(1) / weights_of(piece).sum(1)).sum() / 16", ("run dp2",),
        thread="NVIDIA/Megatron-LM#1764", place=r"gradient of lm_head output",
    ),
    "ring: row_that_sees_nothing": Mistake(
        OWN_RING,
        "> torch.arange(tokens)[:, None]\n"
        "        # Not -inf: every rank computes every block, so that every Shift has a backward, also that of an unseen block.\n"
        '        scores = (q @ kv[0].mT * options["scaling"]).masked_fill(ahead, torch.finfo(q.dtype).min)',
        ">= torch.arange(tokens)[:, None]\n"
        '        scores = (q @ kv[0].mT * options["scaling"]).masked_fill(ahead, -math.inf)',
        ("step cp2",),
        thread="axolotl-ai-cloud/axolotl#3026", place=r"layers\.0\.self_attn\.o_proj input on rank.* NaN",
    ),
    "tp: norms_not_summed": Mistake(
        PLAIN_TP, "for p in copied:", "for p in [p for p in copied if p.ndim > 1]:", (f"{PLAIN_TP} step tp2",),
        thread="NVIDIA-NeMo/RL#3716", place=r"gradient of model\.norm\.weight .* one term of a sum over ranks 0, 1",
    ),
    "tp: final_norm_not_summed": Mistake(
        PLAIN_TP, "for p in copied:", "for p in [p for p in copied if p is not model.final_norm.weight]:",
        (f"{PLAIN_TP} step tp2",),
        thread="NVIDIA/Megatron-LM#1446", place=r"gradient of model\.norm\.weight .* one term of a sum over ranks 0, 1",
    ),
    "tp: joined_matrix_split_as_one": Mistake(
        PLAIN_TP, "torch.cat([linear.weight.detach().chunk(ranks)[rank] for linear in linears])",
        "torch.cat([linear.weight.detach() for linear in linears]).chunk(ranks)[rank].clone()", (f"{PLAIN_TP} step tp2",),
        thread="NVIDIA-NeMo/Automodel#1324", place=r"layers\.0\.self_attn\.o_proj input",
    ),
    "tp: same_shard_on_every_rank": Mistake(
        PLAIN_TP, "linear.weight.detach().chunk(ranks)[rank] for", "linear.weight.detach().chunk(ranks)[0] for",
        (f"{PLAIN_TP} step tp2",),
        thread="vllm-project/vllm-gguf-plugin#103", place=r"layers\.0\.self_attn\.q_proj.* rows .* are on no rank",
    ),
    "tp: backward_not_summed": Mistake(
        PLAIN_TP, "x, all_gather, reduce_scatter",
        "x, all_gather, lambda y: y.chunk(dist.get_world_size())[dist.get_rank()].clone()", (f"{PLAIN_TP} step tp2",),
        thread="NovaSky-AI/SkyRL#1886", place=r"gradient of \S*layers\.1\.post_attention_layernorm output",
    ),
    "tp: mean_instead_of_sum": Mistake(
        PLAIN_TP, "reduce_scatter, all_gather", "lambda y: reduce_scatter(y) / dist.get_world_size(), all_gather",
        (f"{PLAIN_TP} step tp2",),
        thread="vllm-project/vllm#33088", place=r"layers\.0\.self_attn\.o_proj output .* is 0\.5 times",
    ),
    "tp: norm_counts_copies": Mistake(
        PLAIN_TP, "        dist.all_reduce(square)\n", "        square += rest\n        dist.all_reduce(square)\n        rest = 0.0\n",
        (f"{PLAIN_TP} step tp2",),
        thread="NVIDIA-NeMo/RL#3788", place=r"the gradient norm",
    ),
}  # fmt: skip
