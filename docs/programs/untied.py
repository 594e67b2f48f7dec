"""A weight that two modules share, after torch's `parallelize_module`."""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
model[1].weight = model[0].weight
plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel()}
parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
print(len(list(model.parameters())), "parameters")
