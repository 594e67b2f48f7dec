"""A first program in plain torch: a sum over all ranks, a ring of messages, a sum over pairs."""

import torch
import torch.distributed as dist

# Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets.
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()

x = torch.full((2,), float(rank))
dist.all_reduce(x)  # in place: x is now the sum, on every rank

received = torch.empty(2)  # the receiver allocates; shape and dtype must be those of the sender
messages = [
    dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % n),  # peers are global ranks
    dist.P2POp(dist.irecv, received, (rank - 1) % n),
]
# Starts all messages: if every rank first sent, all could wait forever.
for work in dist.batch_isend_irecv(messages):
    work.wait()  # until then, do not read `received`, and do not write to the tensor that is sent

# Every rank makes every group, in the same order; only the members of a group communicate in it.
pairs = [dist.new_group([i, i + 1]) for i in range(0, n, 2)]
dist.all_reduce(x, group=pairs[rank // 2])

# In one piece, because all ranks print at the same time:
print(f"{rank} {x.tolist()} {received.tolist()}\n", end="")
dist.barrier()  # no rank ends while another one still communicates with it
dist.destroy_process_group()
