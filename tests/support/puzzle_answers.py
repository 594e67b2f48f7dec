"""Answers to the puzzles: plausible mistakes, other correct ones, and those that reach the best known score."""

# Number, what to replace in the solution and by what, the verdict, and a pattern of the sentence.
WRONG = [
    (1, "padded = F.pad(x, (0, -len(x) % group.size))", "padded = x", "ERROR", "line 11.*3 equal parts, so it cannot be a tensor of shape .7,."),
    (1, "[: len(x)]", "", "WRONG", r"rank 0 of 3, x = tensor\(\[1, ..., 7\]\) \* 100\*\*rank: result should be .*\(7,\).*\(9,\)"),
    (1, "group.all_gather(group.reduce_scatter(padded))", "group.reduce_scatter(group.all_gather(padded))", "WRONG", r"rank 0 of 3, x = tensor\(\[1, ..., 6\]\) .*: result\[0\] is 3, expected 10101; every number is 3367 times too small"),
    (2, "chunks[(rank - step - 1) % n] + group.receive(before)", "group.receive(before)", "WRONG", r"rank 0 of 3, x = tensor\(\[1, ..., 6\]\) .*result\[0\] is 1, expected 10101"),
    (2, "for step in range(n - 1):\n        group.send(chunks[(rank - step + 1)", "for step in range(n - 2):\n        group.send(chunks[(rank - step + 1)", "WRONG", r"rank 0 of 3, .*result\[4\] is 50005, expected 50505 \(2 of 6"),
    (3, "B * dp)\n    dp_rank", "B)\n    dp_rank", "WRONG", r"place\(4, B=2, m=4, dp=2\): the micro-batch is 2, expected 1"),
    (3, "B * m * dp", "B * m", "WRONG", r"place\(8, B=2, m=4, dp=2\): the step is 1, expected 0"),
    (4, ', reduction="sum"', "", "WRONG", r"rank 0 of 2, micro-batches with \[6, 6\] and \[6, 6\] targets on ranks 0 and 1: gradient\[0, 0\] is"),
    (4, "return group.all_reduce(w.grad) / group.all_reduce(count)", "return group.all_reduce(w.grad / count) / group.size", "WRONG", r"with \[6, 0\] and \[2, 5\] targets on ranks 0 and 1: gradient"),
    (4, "count += (targets != -100).sum()", "count += len(targets)", "WRONG", r"with \[6, 1\] and \[2, 5\] targets"),
    (4, "return group.all_reduce(w.grad) / group.all_reduce(count)", "return group.all_reduce(w.grad)", "WRONG", "every number is 24 times too large"),
    (5, "return buckets[::-1]", "return [0, [1]]", "WRONG", r"model 0 of 37 gradients: expected a list of lists of numbers, such as \[\[0, 1\], \[2\]\], but element 0 is int 0$"),
    (5, "return buckets[::-1]", "return [*buckets, []]", "WRONG", r"bucket \d+ of \d+ is empty$"),
    (5, "return buckets[::-1]", "buckets, new = [], []\n    for i in range(len(sizes)):\n        new.append(i)\n        if sum(sizes[j] for j in new) >= 2**20:\n            buckets.append(new)\n            new = []\n    return buckets", "WRONG", "model 3 of 7 gradients: gradient 6 is in 0 buckets, expected 1$"),
    (7, "        return gradient, None", "        return gradient", "ERROR", "Leave.backward must return two values, the gradient and None; with x"),
    (5, "return buckets[::-1]", "return [[i] for i in range(len(sizes))]", "OVER PAR", "not yet as good as par"),
    (5, "list(range(a, b))", "list(range(a, b - 1))", "WRONG", r"model 0 of 37 gradients: (gradient \d+ is in 0 buckets, expected 1|bucket \d+ of \d+ is empty)"),
    (6, 'if name in ("o_proj", "down_proj")', 'if name in ("o_proj",)', "WRONG", r"split\('down_proj', rank=0, tp=2, H=8, K=4, d=16, F=352\): dimension is 0, expected 1"),
    (6, "return dimension, rank * size", "dimension, rank * size", "WRONG", "expected a tuple of 3 values .dimension, start, stop., but got None; is a return missing"),
    (6, "first = rank * K // tp", "first = rank * heads", "WRONG", r"split\('k_proj', rank=1, tp=8, .*start is 16, expected 0"),
    (7, "return ctx.group.all_reduce(gradient), None", "return gradient, None", "WRONG", r"rank 0 of 3, x \(5, 4\), 12 hidden units, .*: the gradient of x\[0, 0\] is"),
    (7, "        return group.all_reduce(y)", "        return y", "WRONG", "rank 0 of 3, .*: the output y.0, 0. is"),
    (7, "return gradient, None", "return gradient / 3, None", "WRONG", "the gradient of x"),
    (8, "largest = group.all_reduce(logits.amax(1), \"max\")", "largest = group.all_reduce(logits.amax(1))", "WRONG", "logits around 5000: losses.0. is (inf|nan|-inf)"),
    (8, "gradient[tokens, column] -= here.double()", "gradient[tokens, column] -= 1", "WRONG", r"rank \d of 3, logits around 0: gradient\[\d+, \d\]"),
    (8, "torch.stack([exponentials.sum(1), target_logit])", "torch.stack([exponentials.sum(1), target_logit, target_logit])[:2].repeat(2, 1))[:2] + 0 * group.all_reduce(torch.stack([target_logit, target_logit])", "OVER PAR", "par"),
    (8, "    total, target_logit = group", "    if here.any():\n        group.all_reduce(target_logit)\n    total, target_logit = group", "ERROR", "rank 0 calls all_reduce .sum. of shape .2, 24., but rank 1 calls all_reduce .sum. of shape .24,."),
    (8, "logits.amax(1)", "logits.max(1)", "ERROR", r"takes a tensor in float64, but got max .*; use x.max\(dim\).values or x.amax\(dim\)"),
    (9, "min(chunk, 2 * cp - 1 - chunk)", "chunk // 2", "OVER PAR", "par"),
    (9, "min(chunk, 2 * cp - 1 - chunk)", "min(chunk, 2 * cp - 1 - chunk) if cp == 4 else chunk // 2", "WRONG", "all of 4 ranks have the same work, but the busiest of 2 ranks has 1.480 times the mean"),
    (9, "min(chunk, 2 * cp - 1 - chunk)", "chunk % 3", "WRONG", r"owner\(2, 2\) is 2, expected a rank from 0 to 1"),
    (9, "min(chunk, 2 * cp - 1 - chunk)", "0", "WRONG", r"cp = 2: rank 0 has 4 chunks, expected 2; the owners are \[0, 0, 0, 0\]"),
    (10, "torch.logaddexp(lse1, lse2)", "(lse1.exp() + lse2.exp()).log()", "WRONG", r"scores in the thousands: y\[0, 0, 0\] is 0, expected 1.52357307 \(36 of 40"),
    (10, "(lse1 - lse).exp()[..., None] * y1 + (lse2 - lse).exp()[..., None] * y2", "(y1 + y2) / 2", "WRONG", "two blocks of 4 keys: y.0, 0, 0. is"),
    (10, "* y2, lse", "* y2", "WRONG", "expected a tuple of 2 values .y, lse., but got a tensor of shape .2, 5, 4."),
    (11, "if source == rank:", "if False:", "WRONG", r"rank 0 of 2, random numbers, 3 tokens per rank: attention\[0, 0, 0\] is"),
    (11, "if source <= rank:", "if True:", "WRONG", r"rank 0 of 2, .*attention\[0, 0, 0\] is"),
    (11, "group.receive((rank - 1) % n)", "kv", "ERROR", "a message was not received: 1 sent by rank 0, 0 received by rank 1"),
    (12, "min(p - 1 - rank, m)", "m", "WRONG", "p = 2, m = 3: rank 0 holds the activations of 3 micro-batches, expected at most 2"),
    (12, "min(p - 1 - rank, m)", "0", "WRONG", "p = 2, m = 3: the step takes as long as 18 forwards, expected at most 12"),
    (12, "min(p - 1 - rank, m)", "min(rank, m)", "WRONG", "p = 2, m = 3: deadlock: pp rank 0 waits at 0B0 for 1B0 of pp rank 1"),
    (12, "[f\"{rank}F{warmup + i}\", f\"{rank}B{i}\"]", "[f\"{rank}F{warmup + i}\"]", "WRONG", r"p = 2, m = 3: pp rank 0 lacks 0B0 \(or"),
    (13, "M - rank", "M", "OVER PAR", "par"),
    (13, "range(M - rank, M)]", "range(M)]", "WRONG", "p = 4, m = 8: pp rank 0 "),
    (13, "warmup = P - 1 - rank", "warmup = P - rank", "WRONG", "rank 0 holds the activations of 5 micro-batches, expected at most 4"),
    (14, "math.ceil((3 + 2 * p2p) / 3)", "1", "WRONG", r"p = 2, m = 8, p2p = 2: the step takes as long as 43 forwards, but that of AFAB 31"),
    (14, "1 + per_stage * (p - 1 - rank)", "m", "OVER PAR", "par"),
    (14, "{rank}B{i}", "{rank}I{i}", "WRONG", "p = 2, m = 8, p2p = 0: pp rank 0"),
    (14, "rank), m)", "rank), m) - (rank == 1)", "WRONG", r"p = 2, m = 8, p2p = 0: "),
    (15, "/ group.size\n", "\n", "WRONG", "rank 0 of 3, step [12], 200 weights: weights.[0-9]+. is"),
    (15, "/ group.size\n", "\n", "WRONG", "nearly right: AdamW hides a constant factor in the gradients"),
    (15, "[: len(w)]", "", "WRONG", r"rank 0 of 3, step 1, 200 weights: weights should be .*\(200,\)"),
    (15, "if not state:", "if True:", "WRONG", "rank 0 of 3, step 2, 200 weights: weights"),
    (15, "F.pad(w, padding).chunk(group.size)[group.rank].clone()", "w.clone()", "ERROR", "line 1[0-9]"),
    (16, '"tp_size": 2', '"tp_size": 1', "WRONG", "the settings are for 32 GPUs, expected 64"),
    (16, '"dp_engine": "zero3"', '"dp_engine": "bucket"', "WRONG", "a rank needs .* GiB, expected at most 92 % of 79.1 GiB"),
    (16, '"dp_engine": "zero3"', '"dp_engin": "zero3"', "WRONG", "there is no key 'dp_engin'"),
    (16, '"tp_size": 2', '"tp_size": 3', "WRONG", "tp_size"),
    (16, '"selective"', '"full"', "OVER PAR", "par"),
    (16, '"gradient_accumulation_steps": 4', '"seq_length": 65536, "gradient_accumulation_steps": 4', "WRONG", "65536 tokens per sequence, expected 131072"),
]  # fmt: skip

# Correct answers that differ from the solutions in method, order of sums, or types.
OTHERS = [
    (1, """
def all_reduce(x, group):
    n = group.size
    size = (len(x) + n - 1) // n * n
    longer = x.new_zeros(size)
    longer[: len(x)] = x
    part = group.reduce_scatter(longer.view(n, -1))
    return group.all_gather(part).view(-1)[: len(x)]
"""),
    (2, """
import torch

def ring_all_reduce(x, group):  # messages to all ranks, in two rounds, instead of a ring
    n, others = group.size, [r for r in range(group.size) if r != group.rank]
    chunks = list(x.tensor_split(n))
    for r in others:
        group.send(chunks[r], r)
    mine = chunks[group.rank] + sum(group.receive(r) for r in others)
    for r in others:
        group.send(mine, r)
    return torch.cat([mine if r == group.rank else group.receive(r) for r in range(n)])
"""),
    (3, """
def place(sample, B, m, dp):
    return [sample // (B * m * dp), sample // (B * dp) % m, sample // B % dp, sample % B]
"""),
    (4, """
import torch

def mean_gradient(w, micro_batches, group):  # by hand: the gradient of logits is softmax - one-hot
    x = torch.cat([x for x, _ in micro_batches])
    targets = torch.cat([targets for _, targets in micro_batches])
    x, targets = x[targets >= 0], targets[targets >= 0]
    logits = (x @ w.T).softmax(-1)
    logits[torch.arange(len(targets)), targets] -= 1
    sent = torch.cat([(logits.T @ x).flatten(), torch.tensor([len(targets)], dtype=torch.float64)])
    total = group.all_reduce(sent)
    return (total[:-1] / total[-1]).view_as(w)
"""),
    (6, """
def split(name, rank, tp, H, K, d, F):
    columns = name.startswith(("o_", "down"))
    if name[0] in "kv":
        first = rank * (H // tp) // (H // K)  # the key/value head of the rank's first query head
        last = ((rank + 1) * (H // tp) - 1) // (H // K)
        return 0, first * d, (last + 1) * d
    whole = {"q": H * d, "o": H * d}.get(name[0], F)
    return int(columns), whole * rank // tp, whole * (rank + 1) // tp
"""),
    (7, """
import torch, torch.nn.functional as F

def parallel_mlp(x, up, down, group):
    return Both.apply(x, up, down, group)

class Both(torch.autograd.Function):  # the whole MLP as one function
    @staticmethod
    def forward(ctx, x, up, down, group):
        ctx.save_for_backward(x, up, down)
        ctx.group = group
        return group.all_reduce(F.silu(x @ up.T) @ down.T)

    @staticmethod
    def backward(ctx, dy):
        x, up, down = ctx.saved_tensors
        with torch.enable_grad():
            x, up, down = (each.detach().requires_grad_() for each in (x, up, down))
            grads = torch.autograd.grad(F.silu(x @ up.T) @ down.T, (x, up, down), dy)
        return ctx.group.all_reduce(grads[0]), grads[1], grads[2], None
"""),
    (9, """
def owner(chunk, cp):
    return cp - 1 - (chunk if chunk < cp else 2 * cp - 1 - chunk)
"""),
    (10, """
import torch

def merge(y1, lse1, y2, lse2):
    top = torch.maximum(lse1, lse2)
    a, b = torch.exp(lse1 - top), torch.exp(lse2 - top)
    return ((a.unsqueeze(-1) * y1 + b.unsqueeze(-1) * y2) / (a + b).unsqueeze(-1), top + torch.log(a + b))
"""),
    (12, """
def program(rank, p, m):
    names, forwards, backwards = [], 0, 0
    while backwards < m:
        if forwards < m and forwards - backwards < p - rank:
            names.append(f"{rank}F{forwards}")
            forwards += 1
        else:
            names.append(f"{rank}B{backwards}")
            backwards += 1
    return names
"""),
    (14, """
def program(rank, p, m, p2p):  # any rank runs a backward only if it holds as many micro-batches as one more round trip
    per_stage, names, forwards, backwards = 1, [], 0, 0
    while 3 * per_stage < 3 + 2 * p2p:
        per_stage += 1
    while backwards < m:
        if forwards < m and forwards - backwards <= per_stage * (p - 1 - rank):
            names.append(f"{rank}F{forwards}")
            forwards += 1
        else:
            names.append(f"{rank}B{backwards}")
            backwards += 1
    return names
"""),
    (15, """
import torch

def step(w, gradient, state, group):  # AdamW by hand (Loshchilov and Hutter 2019), slices of unequal length padded
    n, P = group.size, len(w)
    size = -(-P // n)
    mean = group.reduce_scatter(torch.cat([gradient, gradient.new_zeros(n * size - P)])) / n
    own = torch.cat([w, w.new_zeros(n * size - P)])[group.rank * size : (group.rank + 1) * size]
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(own)) + 0.1 * mean
    v = state["v"] = 0.999 * state.get("v", torch.zeros_like(own)) + 0.001 * mean**2
    own = own * (1 - 0.1 * 0.1)
    own = own - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return group.all_gather(own)[:P]
"""),
]  # fmt: skip

# Answers that reach the best known score, of puzzles whose solution does not.
BEST = [
    (8, """
import torch

def cross_entropy(logits, targets, group):
    (T, width), n, r = logits.shape, group.size, group.rank
    others = [rank for rank in range(n) if rank != r]
    # A log-sum-exp of all ranks: an all-reduce made of messages, in which rank r collects the r-th part of the tokens.
    parts = list(torch.logsumexp(logits, 1).tensor_split(n))
    for rank in others:
        group.send(parts[rank], rank)
    merged = torch.logsumexp(torch.stack([parts[r], *(group.receive(rank) for rank in others)]), 0)
    for rank in others:
        group.send(merged, rank)
    lse = torch.cat([merged if rank == r else group.receive(rank) for rank in range(n)])
    # The target's logit: in each round, to one more rank, from the rank with the least work that has it.
    owners = (targets // width).tolist()
    own = torch.tensor(owners) == r
    token, column = torch.arange(T)[own], targets[own] - r * width
    target = torch.zeros(T, dtype=torch.float64)
    target[token] = logits[token, column]
    load = [owners.count(rank) for rank in range(n)]
    rounds = [{} for _ in range(n - 1)]
    for t, owner in enumerate(owners):
        have = [owner]
        for k in range(n - 1):
            source = min(have, key=lambda rank: load[rank])
            load[source] += k > 0
            to = min((rank for rank in range(n) if rank not in have), key=lambda rank: load[rank])
            have.append(to)
            rounds[k].setdefault((source, to), []).append(t)
    for routes in rounds:
        for (source, to), tokens in routes.items():
            if source == r:
                group.send(target[tokens], to)
        for (source, to), tokens in routes.items():
            if to == r:
                target[tokens] = group.receive(source)
    gradient = (logits - lse[:, None]).exp()
    gradient[token, column] -= 1
    return lse - target, gradient
"""),
    (11, """
import torch

def ring_attention(q, k, v, group):  # keys go only to the ranks that need them
    rank, n = group.rank, group.size
    for later in range(rank + 1, n):
        group.send(torch.stack([k, v]), later)
    blocks = [group.receive(earlier) for earlier in range(rank)] + [torch.stack([k, v])]
    k, v = torch.cat(blocks, 2)
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
"""),
    (13, """
from picotron.schedules.schedules import zb_h1

def program(rank):
    return [str(action) for action in zb_h1(rank, 4, 8, 1)]
"""),
]  # fmt: skip
