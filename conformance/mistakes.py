"""Mistakes to plant: in picotron, and in the examples of trainers that `conformance` checks. `mutants` plants them.

A mistake is worth an entry if it ends no run with an error, and somebody has made it, or could. Add one for a new kind
of code.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """A mistake.

    Args:
        file: the file in which it is made.
        old, new: a text that occurs once in the file, and its replacement.
        found_by: the checks that find it, the first of which `make test` has, if any: `fuzz` for the random cases of
            fixed seeds; the name of a file of tests (FILE::TEST may be slow); or a chapter and a layout of
            `conformance`, in front of them perhaps an adapter (by default `file` if it is one, or else picotron's).
        thread: a thread of a public tracker that reports such a mistake: OWNER/REPOSITORY#NUMBER.
        place: a regular expression of the first wrong tensor, which the last of the checks names.
    """

    file: str
    old: str
    new: str
    found_by: tuple[str, ...]
    thread: str = ""
    place: str = ""


# The mistakes of a file: name, old text, new text, and the checks that find it ["fuzz"].
PLANTED: dict[str, list[tuple[str, ...]]] = {
    "picotron/pipeline_parallel/pipeline_parallel.py": [
        ("loss_not_divided",
         "loss = model(**next(data_loader)) / data_loader.grad_acc_steps\n        loss.backward()\n",
         "loss = model(**next(data_loader))\n        loss.backward()\n        loss = loss / data_loader.grad_acc_steps\n",
         "fuzz", "run dp2"),
        ("loss_read_in_each_micro_batch", "total_loss = total_loss + loss.detach()",
         "total_loss = total_loss + loss.item()", "test_explain"),
        ("loss_averaged_twice", "loss = model(**next(data_loader)) / data_loader.grad_acc_steps",
         "loss = model(**next(data_loader)) / data_loader.grad_acc_steps / torch.distributed.get_world_size()", "fuzz",
         "step dp2"),
        ("reduced_every_time", "model.require_backward_grad_sync = i == data_loader.grad_acc_steps - 1", "pass", "fuzz",
         "run dp2"),
        ("micro_batches_not_divided",
         "        output_tensor = output_tensor / data_loader.grad_acc_steps\n        losses.append(output_tensor.detach())\n",
         "        losses.append(output_tensor.detach() / data_loader.grad_acc_steps)\n", "fuzz", "step pp2"),
        ("wrong_backward_first", "\n\nclass PipelineParallel(",
         "\n\nclass deque(deque):\n    popleft = deque.pop\n\n\nclass PipelineParallel(", "fuzz", "step pp2"),
        ("tied_embedding_forgotten", "sum_over=both", "sum_over=None", "fuzz", "run pp2 tied")],
    "picotron/optimizer.py": [
        ("clipped_by_own_norm", "    all_reduce(square, None)\n",
         "    all_reduce(square, pgm.process_group_manager.pp_group)\n", "fuzz", "step tp2"),
        ("decay_of_norms", '"weight_decay": 0.0}', '"weight_decay": training.weight_decay}', "fuzz", "run dp2"),
        ("schedule_one_step_late", "    def factor(step: int) -> float:\n",
         "    def factor(step: int) -> float:\n        step -= 1\n", "fuzz"),
        ("decay_begins_after_warmup", 'total - training.decay if training.lr_scheduler == "wsd" else warmup', "warmup"),
        ("cosine_decays_to_zero", "low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))",
         "0.5 * (1 + math.cos(math.pi * progress))"),
        ("norm_of_one_stage", "all_reduce(square, None)", "all_reduce(square, pgm.process_group_manager.tp_group)",
         "fuzz", "step pp2"),
        ("norm_counts_replicas", "pgm.process_group_manager.tp_world_size if shard is None else shard.replicas", "1",
         "fuzz", "step tp2"),
        ("norm_counts_tied_embedding_twice", " and not placement(each).is_replica", "", "fuzz", "run pp2 tied"),
        ("no_master_weights",
         "torch._foreach_copy_([owned_weight(p) for p in rounded], [self.masters[p] for p in rounded])",
         "torch._foreach_copy_([owned_weight(p) for p in rounded], [self.masters[p] for p in rounded])\n            torch._foreach_copy_([self.masters[p] for p in rounded], [owned_weight(p) for p in rounded])",
         "test_optimizer", "mixed dp2"),
        ("moments_in_bfloat16", "        UPDATE(self)  # skips",
         '        for each in self.state.values() if next(iter(self.masters.values())).dtype == torch.float32 else ():\n            _ = [each[n].copy_(each[n].bfloat16()) for n in ("exp_avg", "exp_avg_sq") if n in each]\n        UPDATE(self)  # skips',
         "test_optimizer"),
        ("norm_of_own_slices", "return on_tp_ranks if owned else on_tp_ranks *", "return on_tp_ranks *", "fuzz",
         "run dp2 zero1"),
        ("decay_by_shape_of_slice",
         "self.masters.items() if p.ndim >= 2]\n        vectors = [master for p, master in self.masters.items() if p.ndim < 2]",
         "self.masters.items() if master.ndim >= 2]\n        vectors = [m for m in self.masters.values() if m.ndim < 2]",
         "fuzz", "run dp2 zero1"),
        ("masters_not_loaded", 'master.copy_(state.pop("master"))', 'state.pop("master")', "fuzz", "test_optimizer"),
        ("changed_weight_replaces_its_master", "torch.where(weight == master.to(weight.dtype), master, weight)",
         "weight", "test_optimizer"),
        ("optimizer_begins_again", "torch.tensor(updates, dtype", "torch.tensor(0, dtype", "fuzz", "run dp2"),
        ("moments_mixed_up", "                read(parameter, name, tensor)",
         '                read(parameter, "exp_avg", tensor)', "fuzz", "run dp2")],
    "picotron/data/loader.py": [
        ("same_sequences", "for micro_batch in numbers[:, dp_rank])", "for micro_batch in numbers[:, 0])"),
        ("wrong_tokens", "grid.cp_rank, layout.cp_sharding)", 'grid.cp_rank, "contiguous")'),
        ("positions_from_zero", "self.position_ids = positions.to(device).expand",
         "self.position_ids = torch.arange(len(positions), device=device).expand"),
        ("rows_skip_a_token", "tokens = self.tokens[i * self.seq_length : (i + 1) * self.seq_length + 1]\n",
         "start = min(i * (self.seq_length + 1), len(self.tokens) - 1 - self.seq_length)\n        tokens = self.tokens[start : start + self.seq_length + 1]\n")],
    "workbench/variants/bfloat16_states.py": [
        ("each_rank_rounds_otherwise", 'f"{seed} {self.name} {update}"',
         'f"{seed} {self.name} {update} {__import__(\'os\').getpid()}"', "test_bfloat16_states"),
        ("slices_round_alike", "torch.arange(self.offset + start, self.offset + start + count",
         "torch.arange(start, start + count", "test_bfloat16_states"),
        ("shards_round_alike", "self.first + j + skipped", "j + skipped", "test_bfloat16_states"),
        ("rounded_to_nearest", "round_stochastically(weight, w, bits)", "weight.copy_(w)", "test_bfloat16_states"),
        ("second_moment_to_nearest", "round_stochastically(exp_avg_sq, v, bits >> 16)", "exp_avg_sq.copy_(v)",
         "test_bfloat16_states"),
        ("nan_becomes_zero", "torch.where(values.isfinite(), rounded, values)", "rounded", "test_bfloat16_states")],
    "workbench/variants/float16.py": [
        ("scale_not_divided", "clip / scale.value", "clip", "test_float16"),
        ("overflow_seen_on_own_rank_only", "bool(norm.isfinite())",
         "all(each.isfinite().all() for each in model.gradient_buffers())", "test_float16")],
    "workbench/run/checkpoint/checkpoint.py": [
        ("scale_not_resumed", ".update(self.state.loss_scale)", "", "test_float16"),
        ("masters_are_exported", 'and not name.startswith("model")', 'and name.startswith("exp_avg")',
         "test_model_folders"),
        ("resumed_one_sample_late", "samples = self.state.samples if", "samples = self.state.samples + 1 if"),
        ("ranges_checked_by_nobody", "all_ranges[share::shares]", "all_ranges[share : share + 1]",
         "test_checkpoint_mistakes")],
    "picotron/data_parallel/data_parallel.py": [
        ("gradients_not_divided", "dist.ReduceOp.AVG, async_op=True)", "dist.ReduceOp.SUM, async_op=True)", "fuzz",
         "step dp2"),
        ("only_last_micro_batch", ".gradients[parameter].add_(gradient)", ".gradients[parameter].copy_(gradient)")],
    "picotron/data_parallel/guards.py": [
        ("first_parameter_checked_alone", "    for parameter in parameters:\n        if parameter.untyped",
         "    for parameter in list(parameters)[:1]:\n        if parameter.untyped", "test_fuzz")],
    "workbench/variants/zero1.py": [
        ("weights_not_gathered", "self.work = start_gather_of_slices(self.weights, self.group)", "self.work = None",
         "fuzz", "run dp2 zero1")],
    "workbench/variants/zero3.py": [
        ("gradients_overwritten", "self.gradient_shard.add_(buffer[self.own])",
         "self.gradient_shard.copy_(buffer[self.own])", "fuzz", "run dp2 zero3"),
        ("weights_outlive_update", "unit.arrived.clear()\n            unit.free()", "unit.arrived.clear()", "fuzz")],
    "picotron/tensor_parallel/tp_communications.py": [
        ("partial_sums", "reduce_from_ranks = pair(start_all_reduce,", "reduce_from_ranks = pair(identity,", "fuzz",
         "step tp2"),
        ("copy_not_summed", "= pair(identity,             start_all_reduce)", "= pair(identity, identity)", "fuzz",
         "step tp2")],
    "picotron/tensor_parallel/tensor_parallel.py": [
        ("partial_gradients", "finish_dx = start_sum(dx, ctx.group, ctx.sequence_parallel)", "finish_dx = dx.clone",
         "fuzz", "step tp2"),
        ("head_norms_not_summed", 'in_block = ".self_attn." in name or ".mlp." in name', "in_block = False", "fuzz",
         "step tp2 qwen3"),
        ("shared_heads_not_summed", "new_groups(grid.view(-1, kv.replicas).tolist()) if kv.replicas > 1 else None",
         "None", "fuzz", "step tp4 kv2"),
        ("norm_of_own_heads", "mean_over_ranks(wide.square().mean(-1, keepdim=True), self.group)",
         "wide.square().mean(-1, keepdim=True)", "fuzz", "step tp2 olmo2")],
    "picotron/model/placement.py": [
        ("norms_not_summed", "        all_reduce(total, group)\n", "", "fuzz", "step tp2 sp"),
        ("cp_not_averaged", "or pgm.process_group_manager.cp_dp_group", "or pgm.process_group_manager.dp_group", "fuzz",
         "step cp2")],
    "picotron/model/cross_entropy.py": [
        ("largest_logit_of_own_shard", "all_reduce(top, shard.group, dist.ReduceOp.MAX)", "pass"),
        ("log_softmax_in_bfloat16", "        wide = accumulation_dtype(logits)\n        logits",
         "        wide = logits.dtype\n        logits", "test_cross_entropy")],
    "picotron/model/llama.py": [
        ("logits_multiplied", "x = x / self.logits_scaling", "x = x * self.logits_scaling", "fuzz", "step dp2 granite"),
        ("stale_frequencies", "self.frequencies = rope_frequencies(config)",
         "self.frequencies = rope.__dict__.setdefault(head_size(config), rope_frequencies(config))"),
        ("eps_of_norms_assumed", "self.weight, self.eps)\n", "self.weight, 1e-6)\n", "fuzz", "step dp2"),
        ("frequencies_not_interpolated", "keep = keep.clamp(0, 1)", "keep = keep.clamp(0, 1).ceil()", "fuzz",
         "run dp1 llama3"),
        ("theta_assumed", '1.0 / parameters["rope_theta"]', "1.0 / 1e4", "fuzz", "step dp2")],
    "workbench/variants/expert_parallel.py": [
        ("expert_gradients_times_ep", "gradient_scale=1 / ep_size", "gradient_scale=1.0", "fuzz",
         "step dp2 ep2 mixtral"),
        ("expert_gradients_divided_by_all", "gradient_scale=1 / ep_size", "gradient_scale=1 / grid.cp_dp_world_size",
         "fuzz", "step dp4 ep2 mixtral"),
        ("rows_of_ranks_not_sorted", "expert.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)",
         "expert.new_tensor(range(sum(received)))", "fuzz", "step dp2 ep2 mixtral")],
    "workbench/variants/experts.py": [
        ("router_not_summed", "place(block.gate.weight, sum_over=grid.tp_group)",
         "place(block.gate.weight, sum_over=None)", "fuzz", "step tp2 mixtral"),
        ("expert_without_rows_skipped", "zip(experts.values(), parts, strict=True)])",
         "zip(experts.values(), parts, strict=True) if len(part)])"),
        ("router_weights_not_normalised", "weights = weights / weights.sum(-1, keepdim=True)", "pass", "fuzz",
         "step dp2 mixtral"),
        ("outputs_in_the_wrong_order", "Permute.apply(outputs, inverse, order)",
         "Permute.apply(outputs, order, inverse)", "fuzz", "step dp2 mixtral"),
        ("load_of_one_rank", "    all_reduce(counts, None)\n", "", "test_fuzz"),
        ("bias_in_the_weights", "weights = scores.gather(1, chosen)",
         "weights = (scores + self.get_parameter(BIAS)).gather(1, chosen)", "fuzz", "step dp2 dots1"),
        ("bias_falls_for_few", "(means - counts).sign()", "(counts - means).sign()", "test_fuzz"),
        ("router_in_bfloat16", "logits.softmax(-1, dtype=wide)", "logits.softmax(-1)",
         "test_experts")],
    "workbench/pipelines/executor.py": [
        ("executor_does_not_divide", "y = y / self.schedule.micro_batches", "y = y / 1"),
        ("groups_by_operation", "grid.pp_group if sender < receiver else", 'grid.pp_group if operation == "send" else',
         "test_nccl_order"),
        ("receives_not_waited_for", "            work.wait()\n\n    def take_input",
         "            pass\n\n    def take_input", "test_nccl_order"),
        ("reduced_at_the_end", "        self.model.start_grad_sync(action.stage)\n", "        pass\n",
         "test_executor_order")],
    "picotron/pipeline_parallel/stages.py": [
        ("uneven_stages", "    costs[-1] += head\n", "", "test_stages")],
    "picotron/context_parallel/context_parallel.py": [
        ("future_seen", "else Block(slice(half, tokens), full)]", "else Block(full, full)]", "fuzz", "step cp2"),
        ("contiguous_shards", "else Block(slice(half, tokens), full)]\n",
         'else Block(slice(half, tokens), full)]\n\n\nzigzag_blocks = visible_blocks\n\n\ndef chunk_count(cp_size, sharding):\n    return cp_size\n\n\ndef visible_blocks(source, tokens, sharding):\n    return zigzag_blocks(source, tokens, "contiguous")\n',
         "test_context_parallel"),
        ("ring_turns_the_other_way",
         "tensor.contiguous(), grid.cp_send_rank, grid.cp_group),\n        dist.P2POp(dist.irecv, received, grid.cp_recv_rank",
         "tensor.contiguous(), grid.cp_recv_rank, grid.cp_group),\n        dist.P2POp(dist.irecv, received, grid.cp_send_rank",
         "fuzz", "step cp4"),
        ("odd_length_loses_a_token", 'if sharding == "zigzag" and cp_size > 1 else', 'if sharding == "zigzag" else')],
    "workbench/variants/choose.py": [
        ("documents_see_each_other", "if documents is not None:", "if False:", "fuzz", "run cp2")],
    "picotron/context_parallel/block_attention.py": [
        ("blocks_merged_by_the_larger", "torch.logaddexp(lse, block_lse)", "torch.maximum(lse, block_lse)")],
    "workbench/own_loops/batches.py": [
        ("sum_over_own_tokens", "return sum_for_own_losses(x.sum(-1), pgm.process_group_manager.cp_group)",
         "return x.sum(-1)"),
        ("mean_of_means", 'all_reduce(mean, grid.cp_dp_group if scope == "global" else grid.cp_group,',
         "all_reduce(mean, grid.cp_group,", "fuzz", "run dp2"),
        ("mean_of_each_micro_batch", "needs_weights = check_batches(", "needs_weights = not check_batches(")],
    "workbench/prepare/token_characters.py": [
        ("parts_tokenised_separately", "        if not self.is_fast:\n            return [",
         "        if any(places):\n            cut = [[text[a:b] for a, b in zip([0, *p], [*p, None])] for text, p in zip(texts, places)]\n            ids = [self._encode(parts)['input_ids'] for parts in cut]\n            spans = [[(a, b or len(t)) for a, b, i in zip([0, *p], [*p, None], each) for _ in i] for t, p, each in zip(texts, places, ids)]\n            return [Spans(sum(each, []), span.__getitem__) for each, span in zip(ids, spans)]\n        if not self.is_fast:\n            return [")],
    "workbench/run/checkpoint/safetensors_folder.py": [
        ("tensors_not_flushed", "            os.fsync(file.fileno())\n", "", "test_checkpoint_writer"),
        ("checksums_not_compared", "if checksum != expected.xxh3:", "if False:",
         "test_checkpoint_mistakes")],
    "workbench/files.py": [
        ("files_not_flushed", "            os.fsync(file.fileno())\n", "", "test_files"),
        ("final_name_too_early", "path.with_name(path.name.removesuffix(UNFINISHED) + UNFINISHED)", "path",
         "test_checkpoint_writer"),
        ("duplicate_keys_accepted", "    if len(data) < len(pairs):", "    if False:", "test_documents")],
    "workbench/run/checkpoint/writer.py": [
        ("keeps_one_fewer", "[: -config.keep_last] if", "[: 1 - config.keep_last or None] if",
         "test_checkpoint")],
    "workbench/run/run_folder.py": [
        ("records_after_the_checkpoint_stay", 'if record["step"] <= last]', "]", "test_metrics"),
        ("earlier_checkpoints_stay", "if match and int(match[1]) > last]",
         "if match and int(match[1]) == resumed_step]", "test_metrics")],
    "workbench/run/metrics.py": [
        ("stop_signal_of_own_rank", "return record, int(any_stop)", "return record, int(stop)", "test_resume"),
        ("last_step_under_max_tokens_left_out", "math.ceil((training.max_tokens - self.tokens) / tokens)",
         "(training.max_tokens - self.tokens) // tokens"),
        ("evaluations_summed", "    all_reduce(mean, grid.cp_dp_group, dist.ReduceOp.AVG)\n",
         "    all_reduce(mean, grid.cp_dp_group)\n")],
    "workbench/generation/rotation.py": [
        ("every_token_is_the_first", "[len(sequence) - 1 for sequence in self.sequences]",
         "[0 for _ in self.sequences]", "test_generation", "generation pp2"),
        ("one_stream_of_draws", '{number: random.Random(f"{sampling.seed} {first + number}") for number in prompts}',
         'dict.fromkeys(prompts, random.Random(f"{sampling.seed} {first}"))', "test_generation")],
    "workbench/generation/kv_cache.py": [
        ("empty_columns_seen", "        if any(self.starts):", "        if False:", "test_generation"),
        ("unused_columns_kept", "unused = min(self.starts, default=0)", "unused = 0", "test_kv_cache")],
    "workbench/generation/sampling.py": [
        ("top_k_without_top_p", "(sampling.top_p)(None, scores)", "(sampling.top_p)(None, logits)", "test_sampling"),
        ("ends_before_min_new_tokens", "    if new < sampling.min_new_tokens:\n", "    if False:\n", "test_generation")],
    "conformance/adapters/picotron.py": [
        ("prompts_without_last_token", "case.prompts(), Sampling", "[each[:-1] for each in case.prompts()], Sampling",
         "generation pp2"),
        ("evaluation_of_one_rank", "    all_reduce(total, pgm.process_group_manager.cp_dp_group)\n", "",
         "run dp2"),
        ("evaluation_without_weights", "weights = weights_of(batch)\n",
         "weights = torch.ones_like(batch['target_ids']).double()\n", "run dp2")],
    "workbench/schedules/schedules.py": [
        ("one_warm_up_too_many", "    for _ in range(pp - rank - 1): program.forward(rank)\n",
         "    for _ in range(pp - rank): program.forward(rank)\n", "test_simulate"),
        ("weight_gradients_not_delayed", "program.backward_weight(keep=rank)", "program.backward_weight()",
         "test_simulate"),
        ("interleaved_warms_up_longer", "group_size, warmup_per_rank=2)", "group_size, warmup_per_rank=3)",
         "test_simulate")],
    "workbench/run/config_conflicts.py": [
        ("check_of_decay_forgotten", 'if training.decay_steps and training.lr_scheduler != "wsd":', "if False:",
         "test_config")],
    "picotron/config.py": [
        ("unknown_keys_accepted", 'extra="forbid"', 'extra="ignore"', "test_config")],
    "workbench/sweep/combinations.py": [
        ("layouts_with_fewer_processes", "if math.prod(layout.values()) in world_sizes]",
         "if math.prod(layout.values()) <= max(world_sizes)]", "test_create_config")],
    "workbench/sweep/local_jobs.py": [
        ("timeouts_called_cancelled", 'stopped = "cancelled" if interrupt.received else "timeout"',
         'stopped = "cancelled"', "test_local_jobs::test_local_jobs_resume_after_a_timeout_and_after_ctrl_c")],
    "workbench/sweep/jobs.py": [
        ("start_of_job_ignored", 'f"latest or {start}" if start else "latest"', '"latest"',
         "test_local_jobs::test_jobs_start_from_the_load_path_of_their_config_and_continue_from_their_own_checkpoint")],
    "workbench/sweep/planner.py": [
        ("bound_above_the_value", "len(saved[0]) * min(m, layout.pp_size) * min(saved[0])",
         "len(saved[0]) * m * min(saved[0])", "test_planner")],
    "workbench/pipelines/memory.py": [
        ("estimate_forgets_an_input", "norms + (2 - compiles_mlp(config, s))", "norms + (1 - compiles_mlp(config, s))",
         "test_memory")],
    "workbench/explain/step_time.py": [
        ("half_an_all_reduce", 'self.collective("dp", 2 * s.wide * once', 'self.collective("dp", s.wide * once',
         "test_step_time")],
    "conformance/examples/ddp.py": [
        ("ddp: weights_not_loaded", "    optimizer = adamw(model.parameters(), case)",
         "    [p.data.normal_() for p in model.parameters()]\n    optimizer = adamw(model.parameters(), case)", "step dp2"),
        ("ddp: forgotten_all_reduce", "dist.all_reduce(parameter.grad)", "pass", "step dp2"),
        ("ddp: mean_of_ranks_means", "dist.all_reduce(total)", "total *= ranks", "run dp2"),
        ("ddp: mean_of_micro_batches_means", "losses.sum() / total",
         "losses.sum() / weights_of(piece).sum() / case.micro_batches / ranks", "run dp2"),
        ("ddp: loss_of_one_rank", "dist.all_reduce(loss)", "pass", "step dp2"),
        ("ddp: same_rows_on_every_rank", "chunk(ranks)[rank]", "chunk(ranks)[0]", "step dp2"),
        ("ddp: weights_of_targets_ignored", 'piece["target_ids"]) * weights_of(piece)', 'piece["target_ids"])',
         "run dp2"),
        ("ddp: stale_replica", "        optimizer.step()", "        rank or optimizer.step()", "step dp2"),
        ("ddp: gradients_not_set_to_zero", "        optimizer.zero_grad()\n", "", "run dp2"),
        ("ddp: no_clipping", "case.max_grad_norm or ", "", "run dp2"),
        ("ddp: decay_of_norms", "optimizer = adamw(model.parameters(), case)",
         "optimizer = adamw(model.parameters(), case)\n    optimizer.param_groups[1]['weight_decay'] = 0.1",
         "run dp2"),
        ("ddp: documents_see_each_other", "logits_of(model, piece)", "model(input_ids=piece['input_ids']).logits",
         "run dp2"),
        ("ddp: untied", "    optimizer = adamw(model.parameters(), case)",
         "    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())\n    optimizer = adamw(model.parameters(), case)",
         "run dp2 tied"),
        ("ddp: own_loss_ignored", "case.token_losses(", "__import__('conformance.case').case.cross_entropy(",
         "loss dp2"),
        ("ddp: logits_in_bfloat16", "logits_of(model, piece)", "logits_of(model, piece).bfloat16()", "float32 dp2"),
        ("ddp: exported_in_bfloat16", "model.save_pretrained",
         "__import__('copy').deepcopy(model).bfloat16().save_pretrained", "export dp2"),
        ("ddp: exported_without_a_multiplier", "        model.save_pretrained",
         "        model.config.residual_multiplier = 1.0\n        model.save_pretrained", "export dp2 granite"),
        ("ddp: exported_without_weights", "model.save_pretrained", "model.config.save_pretrained", "export dp2"),
        ("ddp: not_divided_by_micro_batches", "losses.sum() / total", "losses.sum() / total * case.micro_batches",
         "run dp2"),
        ("ddp: only_last_micro_batch", "part.backward()", "optimizer.zero_grad(); part.backward()", "run dp2"),
        ("ddp: first_rate_is_0", "case.learning_rates[step]", "case.learning_rates[step] * (step > 0)", "run dp2"),
        ("ddp: mean_of_no_targets", "losses.sum() / total", "(losses.sum(1) / weights_of(piece).sum(1)).sum() / 16",
         "run dp2")],
    "conformance/examples/zero1.py": [
        ("zero1: slices_not_gathered", "matrices.gather()", "pass", "step dp2"),
        ("zero1: moments_of_the_next_slice", "nn.Parameter(self.weight_slices[self.rank])",
         "nn.Parameter(self.weight_slices[self.rank - 1])", "step dp2")],
    "conformance/adapters/loop.py": [
        ("zero1: norm_of_own_parts", "    dist.all_reduce(square)\n", "", "conformance/examples/zero1.py step dp2")],
    "conformance/examples/tensor.py": [
        ("tensor: copy_not_summed", "*inputs, copy, all_reduce", "*inputs, copy, copy", "step tp2"),
        ("tensor: replicas_counted_on_every_rank", "in shards else 1 / ranks", "in shards else 1.0", "step tp2")],
    "conformance/examples/pipeline.py": [
        ("pipeline: tied_gradients_of_one_end", "dist.all_reduce(shared.grad, group=ends)", "pass", "run pp2 tied"),
        ("pipeline: tied_gradients_counted_twice", ", share=lambda p: float(p is not shared or rank == 0)", "", "run pp2 tied"),
        ("pipeline: newest_micro_batch_first", "waiting.pop(0)", "waiting.pop()", "step pp2"),
        ("pipeline: norm_of_one_stage", "sum_norms, share=lambda p: float(p is not shared or rank == 0)",
         "torch.nn.utils.clip_grad_norm_", "step pp2")],
    "conformance/examples/ring.py": [
        ("ring: shift_without_backward", "return shift(gradient, -1)", "return gradient", "step cp2"),
        ("ring: keys_of_the_next_rank", "(rank - i) % ranks  #", "(rank + i) % ranks  #", "step cp4"),
        ("ring: position_0_on_every_rank", 'position_ids=piece["position_ids"], ', "", "step cp2"),
        ("ring: output_of_one_block", "out * (lse - new).exp() + ", "out + ", "step cp2"),
        ("ring: gradients_of_own_tokens", "            dist.all_reduce(p.grad)\n", "            pass\n", "step cp2"),
        ("ring: stale_keys_in_backward", "kv = Shift.apply(kv) if", "kv = kv + (Shift.apply(kv) - kv).detach() if",
         "step cp2"),
        ("ring: mean_of_own_targets", "accumulate(case, tokens, total, logits_of)",
         'accumulate(case, tokens, (tokens["target_ids"] >= 0).sum() * dist.get_world_size(), logits_of)', "run cp2"),
        ("ring: row_that_sees_nothing",
         '> torch.arange(tokens)[:, None]\n        # Not -inf: every rank computes every block, so that every Shift has a backward, also that of an unseen block.\n        scores = (q @ kv[0].mT * options["scaling"]).masked_fill(ahead, torch.finfo(q.dtype).min)',
         '>= torch.arange(tokens)[:, None]\n        scores = (q @ kv[0].mT * options["scaling"]).masked_fill(ahead, -math.inf)',
         "step cp2")],
    "conformance/adapters/torch_fsdp.py": [
        ("fsdp: sum_instead_of_mean", "x), ranks, model", "x), ranks**2, model", "step dp2")],
    "conformance/adapters/plain_tp.py": [
        ("tp: norms_not_summed", "for p in copied:", "for p in [p for p in copied if p.ndim > 1]:", "step tp2"),
        ("tp: final_norm_not_summed", "for p in copied:",
         "for p in [p for p in copied if p is not model.final_norm.weight]:", "step tp2"),
        ("tp: joined_matrix_split_as_one",
         "torch.cat([shard(linear.weight) for linear in linears])",
         "shard(torch.cat([linear.weight for linear in linears]))", "step tp2"),
        ("tp: same_shard_on_every_rank", "shard(linear.weight) for",
         "linear.weight.detach().chunk(dist.get_world_size())[0] for", "step tp2"),
        ("tp: backward_not_summed", "x, all_gather, reduce_scatter",
         "x, all_gather, lambda y: y.chunk(dist.get_world_size())[dist.get_rank()].clone()", "step tp2"),
        ("tp: mean_instead_of_sum", "reduce_scatter, all_gather",
         "lambda y: reduce_scatter(y) / dist.get_world_size(), all_gather", "step tp2"),
        ("tp: norm_counts_copies", "in split else 1 / ranks", "in split else 1.0", "step tp2"),
        ("tp: key_heads_in_another_order", "        attention, mlp = layer.self_attn, layer.mlp\n",
         "        attention, mlp = layer.self_attn, layer.mlp\n        keys = attention.k_proj.weight\n"
         "        keys.data = keys.data.unflatten(0, (2, -1, attention.head_dim)).flip(1).flatten(0, 2)\n", "step tp2")],
}  # fmt: skip

# The mistakes that a page of docs/ shows, each in one sentence.
SHOWN = {
    "training_step": {
        "loss_not_divided":
            "train_step divides the logged loss by the number of micro-batches, but not the loss that backward starts at.",
        "clipped_by_own_norm": "Each tp rank clips by the norm of its own gradients.",
        "decay_of_norms": "Weight decay applies to norms and biases as well as to matrices.",
        "schedule_one_step_late":
            "The learning-rate schedule is one step late, so the first step has a learning rate of 0.",
        "same_sequences": "All data-parallel ranks read the sequences of dp rank 0."},
    "data_parallel": {
        "gradients_not_divided":
            "Bucket.launch sums the gradients over the ranks, but does not divide by the number of ranks.",
        "loss_averaged_twice":
            "The loss is divided by the number of ranks, although the gradients are averaged over the ranks as well.",
        "reduced_every_time":
            "train_step never sets require_backward_grad_sync, so the backward of every micro-batch averages the gradients."},
    "zero": {
        "norm_of_own_slices": "Each rank clips by the norm of its own slices of the gradients.",
        "decay_by_shape_of_slice": "Weight decay applies to what has two dimensions, but slices are flat.",
        "weights_not_gathered": "After the optimizer's step, the ranks do not gather the updated weights.",
        "gradients_overwritten":
            "The reduction of each micro-batch replaces the slice of the gradients, instead of adding to it."},
    "tensor_parallel": {
        "partial_sums":
            "The forward of reduce_from_ranks returns the rank's own term instead of the sum over the ranks.",
        "partial_gradients": "ColumnParallel.backward does not sum the gradient of x over the ranks.",
        "copy_not_summed":
            "The backward of copy_to_ranks does not sum: each rank continues with the contribution of its own shard of the head.",
        "norms_not_summed":
            "With sequence parallelism, the gradients of the norms' weights are not summed over the ranks."},
    "families": {
        "head_norms_not_summed": "Qwen3: the gradients of the norms inside heads are not summed over the ranks.",
        "norm_of_own_heads": "OLMo 2: each rank normalises its own heads, instead of all heads together."},
    "pipeline_parallel": {
        "micro_batches_not_divided":
            "forward_step divides the logged loss by the number of micro-batches, but not the loss that backward starts at.",
        "wrong_backward_first": "Each stage runs backward for its newest forward instead of its oldest.",
        "tied_embedding_forgotten":
            "The first and the last stage do not sum the gradients of the tied embedding, of which both hold a replica."},
    "context_parallel": {
        "cp_not_averaged": "The gradients are averaged over dp_group instead of cp_dp_group, so not over the cp ranks.",
        "wrong_tokens":
            "The data loader returns contiguous shards of the sequences, but attention assumes zigzag shards.",
        "positions_from_zero": "Every rank numbers the positions of its tokens from 0.",
        "future_seen":
            "visible_blocks lets all queries attend to the keys of later ranks, not only the queries of the second chunk.",
        "contiguous_shards":
            "Data loader and attention use contiguous shards: the results are correct, but the last rank has the most work."},
    "generation": {
        "every_token_is_the_first": "Every new token has the position 0, because it is the only token of its row.",
        "empty_columns_seen":
            "New tokens of short prompts attend to the empty columns of the cache, too, because there is no mask.",
        "one_stream_of_draws": "All prompts of a group draw from one stream of random numbers."},
}  # fmt: skip

# Threads of public trackers that report such mistakes, if there is one, and the places that a trace names.
REPORTED = {
    "head_norms_not_summed": ("NVIDIA/Megatron-LM#7452", r"gradient of \S*self_attn\.[qk]_norm\.weight .* one term of a sum"),
    "shared_heads_not_summed": ("bigcode-project/Megatron-LM#37", r"gradient of \S*self_attn\.[kv]_proj\.weight .* one term of a sum"),
    "norm_of_own_heads": ("EleutherAI/gpt-neox#1424", r"layers\.0\.self_attn\.[qk]_norm output"),
    "expert_gradients_times_ep": ("pytorch/pytorch#160285", ""),
    "router_not_summed": ("pytorch/torchtitan#4054", ""),
    "load_of_one_rank": ("NVIDIA-NeMo/Automodel#3359", ""),
    "ddp: weights_not_loaded": ("", r"model\.embed_tokens\.weight on ranks 0, 1 .* it is loaded wrongly"),
    "ddp: mean_of_micro_batches_means": ("PrimeIntellect-ai/prime-rl#583", "gradient of lm_head output .* times what it should be"),
    "ddp: gradients_not_set_to_zero": ("facebookresearch/nwm#16", r"step 2: gradient of lm_head\.weight"),
    "ddp: decay_of_norms": ("verl-project/verl#5070", r"step 1: \S*input_layernorm\.weight .* after the optimizer's step"),
    "ddp: documents_see_each_other": ("huggingface/nanoVLM#204", r"(rotary_emb output|layers\.0\.self_attn\.o_proj input)"),
    "pipeline: tied_gradients_of_one_end": ("uw-syfi/piper#13", r"gradient of model\.embed_tokens\.weight .* one term of a sum over ranks 0, 1"),
    "pipeline: newest_micro_batch_first": ("pytorch/pytorch#139404", r"gradient of model\.layers\.1 output on rank 0 holds the values of rows 12-15"),
    "ring: shift_without_backward": ("NVIDIA/Megatron-LM#1464", r"gradient of \S*layers\.1\.self_attn\.[vk]_proj output"),
    "ring: position_0_on_every_rank": ("NVIDIA/Megatron-LM#560", "rotary_emb output on rank 1"),
    "ddp: not_divided_by_micro_batches": ("ByteDance-Seed/VeOmni#963", r"gradient of lm_head\.weight .* is 2 times"),
    "ddp: only_last_micro_batch": ("NVIDIA-NeMo/Automodel#3530", r"gradient of lm_head\.weight .* the gradients of all outputs are equal"),
    "ddp: first_rate_is_0": ("EleutherAI/gpt-neox#1379", r"step 1: .*\.weight on ranks 0, 1 after the optimizer's step"),
    "fsdp: sum_instead_of_mean": ("pytorch/pytorch#162338", r"gradient of lm_head\.weight .* is 2 times"),
    "pipeline: norm_of_one_stage": ("pytorch/torchtitan#596", "the gradient norm"),
    "ring: gradients_of_own_tokens": ("ByteDance-Seed/VeOmni#1115", r"gradient of lm_head\.weight .* one term of a sum over ranks 0, 1"),
    "ring: stale_keys_in_backward": ("huggingface/diffusers#14265", r"gradient of \S*layers\.1\.self_attn\.[vk]_proj output"),
    "ring: mean_of_own_targets": ("NVIDIA/Megatron-LM#673", "gradient of lm_head output .* times what it should be"),
    "ddp: mean_of_no_targets": ("NVIDIA/Megatron-LM#1764", "gradient of lm_head output"),
    "ring: row_that_sees_nothing": ("axolotl-ai-cloud/axolotl#3026", r"layers\.0\.self_attn\.o_proj input on rank.* NaN"),
    "tp: norms_not_summed": ("NVIDIA-NeMo/RL#3716", r"gradient of model\.norm\.weight .* one term of a sum over ranks 0, 1"),
    "tp: final_norm_not_summed": ("NVIDIA/Megatron-LM#1446", r"gradient of model\.norm\.weight .* one term of a sum over ranks 0, 1"),
    "tp: joined_matrix_split_as_one": ("NVIDIA-NeMo/Automodel#1324", r"layers\.0\.self_attn\.o_proj input"),
    "tp: same_shard_on_every_rank": ("vllm-project/vllm-gguf-plugin#103", r"layers\.0\.self_attn\.q_proj.* rows .* are on no rank"),
    "tp: backward_not_summed": ("NovaSky-AI/SkyRL#1886", r"gradient of \S*layers\.1\.post_attention_layernorm output"),
    "tp: mean_instead_of_sum": ("vllm-project/vllm#33088", r"layers\.0\.self_attn\.o_proj output .* is 0\.5 times"),
    "tp: norm_counts_copies": ("NVIDIA-NeMo/RL#3788", "the gradient norm"),
    "tp: key_heads_in_another_order": ("", r"k_proj \+ .*weight on rank 0 has heads \[1, 0\] .* it is loaded wrongly"),
}  # fmt: skip

MISTAKES = {
    name: Mistake(file, old, new, tuple(found_by) or ("fuzz",), *REPORTED.get(name, ()))
    for file, mistakes in PLANTED.items()
    for name, old, new, *found_by in mistakes
}
