"""Wrong answers: a plausible mistake in the solution of each puzzle, and answers that fail in all ways of failing."""

# Number, what to replace in the solution and by what, the verdict, and a pattern of the sentence.
WRONG = [
    (1, "[: len(x)]", "", "WRONG", r"rank 0 of 3, x = .*\(7,\).*\(9,\)"),
    (2, "chunks[(rank - step - 1) % n] + group.recv(before)", "group.recv(before)", "WRONG", r"result\[0\] is 1, expected 10101"),
    (3, "B * dp)\n    dp_rank", "B)\n    dp_rank", "WRONG", r"place\(4, B=2, m=4, dp=2\): the micro-batch is 2, expected 1"),
    (4, "count += (targets != -100).sum()", "count += len(targets)", "WRONG", r"with \[6, 1\] and \[2, 5\] targets"),
    (5, "return buckets[::-1]", "return [[i] for i in range(len(sizes))]", "OVER PAR", "par"),
    (6, "first = rank * K // tp", "first = rank * heads", "WRONG", r"split\('k_proj', rank=1, tp=8, .*start is 16, expected 0"),
    (7, "group, copy, all_reduce", "group, copy, copy", "WRONG", r"the gradient of x\[0, 0\] is"),
    (8, 'group.all_reduce(logits.amax(1), "max")', "group.all_reduce(logits.amax(1))", "WRONG", "logits around 5000: losses.0. is (inf|nan|-inf)"),
    (9, "min(chunk, 2 * cp - 1 - chunk)", "min(chunk, 2 * cp - 1 - chunk) if cp == 4 else chunk // 2", "WRONG", "1.480 times the mean"),
    (10, "torch.logaddexp(lse1, lse2)", "(lse1.exp() + lse2.exp()).log()", "WRONG", r"scores in the thousands: y\[0, 0, 0\] is 0, expected"),
    (11, "group.recv((rank - 1) % n)", "kv", "ERROR", "a message was not received: 1 sent by rank 0, 0 received by rank 1"),
    (12, "min(p - 1 - rank, m)", "min(rank, m)", "WRONG", "p = 2, m = 3: deadlock: pp rank 0 waits at 0B0 for 1B0 of pp rank 1"),
    (13, "warmup = P - 1 - rank", "warmup = P - rank", "WRONG", "rank 0 holds the activations of 5 micro-batches, expected at most 4"),
    (14, "math.ceil((3 + 2 * p2p) / 3)", "1", "WRONG", "p2p = 2: the step takes as long as 43 forwards"),
    (15, "/ group.size\n", "\n", "WRONG", "AdamW hides a constant factor in the gradients"),
    (16, '"dp_engine": "zero3"', '"dp_engine": "bucket"', "WRONG", "a rank needs .* GiB, expected at most 92 %"),
    (17, "warmup = min(group.size - 1 - rank, m)", "warmup = m", "WRONG", "had activations at the same time"),
    (17, "y.backward(None if last", "(y * 2 if last else y).backward(None if last", "WRONG", "the gradient of the stage's weight"),
    (18, "dp.all_reduce(g) / dp.size", "dp.all_reduce(g)", "WRONG", "the norm is"),
    (18, "(tp.all_reduce(squares[0] + squares[1]) + squares[2])", "tp.all_reduce(squares[0] + squares[1] + squares[2])", "WRONG", "the norm is"),
    (20, " * weights[tokens, places, None]", "", "WRONG", r"tokens that stay on their rank: y\[0, 0\] is"),
    (20, "weights[tokens, places, None]", "weights[tokens, 0, None]", "WRONG", r"y\[0, 0\] is"),
    (19, "(scores - lse[..., None]).exp()", "scores.softmax(-1)", "WRONG", r"dk\[0, 0, 0\] is"),
]  # fmt: skip

FIRST = "def all_reduce(x, group):\n"  # of puzzle 1
FAILURES = [
    ("", "raise NotImplementedError\n", "NOT DONE YET", "still raises NotImplementedError in line 2"),
    ("", "while True: print(f'rank {group.rank}')\n", "HANGS", "after 0.5 s: ranks 0, 1 and 2 are in line 2, `while True"),
    ("", "return x if group.rank == 1 else group.reduce_scatter(x)\n", "ERROR", "rank 0 calls reduce_scatter .*, but rank 1 has returned"),
    ("", "return group.all_gather(x[: 1 + group.rank])\n", "ERROR", "line 2, .*shape .1,., but rank 1 calls all_gather of shape .2,."),
    ("import os; os._exit(0)\n", "return x\n", "ERROR", "has ended its process"),
    ("all_reduce = None\n", "return group.all_reduce(x)\n", "ERROR", "solve this puzzle without group.all_reduce"),
    ("", "return group.all_gather(x.grad)\n", "ERROR", "all_gather takes .* got None; x.grad is None unless x.requires_grad_"),
    ("", "return x.tolist()\n", "WRONG", "should be a tensor of shape .6,., float64, but is list"),
]  # fmt: skip
