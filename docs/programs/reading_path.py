"""A way through the trainer, function by function, in the order of a step:  python -m docs.programs.reading_path"""

import ast
from pathlib import Path

from workbench.console import text_table

PATH = """
train.py                                              train
picotron/process_group_manager.py                     ProcessGroupManager.__init__
picotron/parallelize.py                               build_model build_stage
picotron/tensor_parallel/tensor_parallel.py           apply_tensor_parallel ColumnParallel RowParallelLinear
picotron/pipeline_parallel/pipeline_parallel.py       train_step_pipeline_1f1b forward_step PipelineParallel.forward PipelineParallel.backward
picotron/pipeline_parallel/pp_communications.py       bidirectional_pipeline_communicate _exchange
picotron/model/llama.py                               Llama.forward Llama.run_layers Attention.forward
picotron/tensor_parallel/tp_communications.py         leave Pair
picotron/context_parallel/context_parallel.py         RingAttention ring start_ring_step
picotron/context_parallel/block_attention.py          blockwise_attention
picotron/data_parallel/data_parallel.py               Bucket DataParallel._accumulate DataParallel.finish_grad_sync
picotron/model/placement.py                           sum_partial_gradients
picotron/optimizer.py                                 clip_grad_norm squared_norms
"""


def find(path: str, name: str) -> ast.stmt:
    """Return a function or a class of a file, such as `Llama.forward`."""
    node = ast.parse(Path(path).read_text())
    for part in name.split("."):
        (node,) = [each for each in node.body if getattr(each, "name", None) == part]  # type: ignore[assignment]
    return node  # type: ignore[return-value]


def main() -> None:
    rows, total = [["", "", "lines"]], 0
    for path, *names in map(str.split, PATH.strip().splitlines()):
        for i, name in enumerate(names):
            node = find(path, name)
            size = (node.end_lineno or 0) - node.lineno + 1
            rows.append([path if i == 0 else "", name, str(size)])
            total += size
    print(text_table([*rows, ["", "all", str(total)]], first_number=2))


if __name__ == "__main__":
    main()
