"""The way through a step of 4D training, function by function, from the parts to the whole:

    python -m docs.programs.reading_path                 the parts, their files and their functions
    python -m docs.programs.reading_path --code | less   the functions themselves, each after those that it calls

tests/test_budget.py traces a step: each function that it runs is in PATH or in LEFT_OUT.
"""

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workbench.console import print_line, text_table

# A part, then files and names in them: functions, classes (whole), methods, and names that are assigned.
PATH = """
Sums over ranks
    picotron/collectives.py  accumulation_dtype all_reduce
Tensor parallelism
    picotron/tensor_parallel/tp_communications.py  after start_all_gather start_reduce_scatter start_sum
    picotron/tensor_parallel/tp_communications.py  Pair pair all_gather reduce_scatter enter leave
    picotron/tensor_parallel/tensor_parallel.py  gradient_of_input ColumnParallel ParallelProjections.forward
    picotron/tensor_parallel/tensor_parallel.py  RowParallelLinear.forward VocabParallelEmbedding.forward
Context parallelism
    picotron/context_parallel/block_attention.py  Block block_forward merge_attention blockwise_attention
    picotron/context_parallel/block_attention.py  block_backward accumulate_gradients
    picotron/context_parallel/context_parallel.py  start_ring_step ring visible_blocks RingAttention attend_across_ranks
The model
    picotron/model/llama.py  Attention.forward MLP.forward DecoderLayer.forward
The loss
    picotron/model/cross_entropy.py  Softmax chunk_loss LinearCrossEntropy linear_cross_entropy
    picotron/model/llama.py  Head.cross_entropy Llama.run_layers Llama.logits_or_loss Llama.forward
Gradients and data parallelism
    picotron/model/placement.py  main_grad sum_partial_gradients
    picotron/data_parallel/data_parallel.py  Bucket DataParallelBucket._reduce DataParallel._accumulate
    picotron/data_parallel/data_parallel.py  DataParallel._on_gradient DataParallel._take_gradients_of
    picotron/data_parallel/data_parallel.py  DataParallel._end_reductions DataParallel.finish_grad_sync
Pipeline parallelism
    picotron/pipeline_parallel/pp_communications.py  _exchange pipeline_communicate
    picotron/pipeline_parallel/pp_communications.py  bidirectional_pipeline_communicate
    picotron/pipeline_parallel/pipeline_parallel.py  PipelineParallel.forward PipelineParallel.backward forward_step
    picotron/pipeline_parallel/pipeline_parallel.py  graph_of train_step_pipeline_1f1b
The update
    picotron/optimizer.py  squared_norm clip_grad_norm
    picotron/optimizer.py  AdamW.update_masters AdamW.update AdamW.step update_weights
The loop, whose `step` is train_step_pipeline_1f1b
    train.py  train
"""

# What a step also runs, or what the functions above name: names, classes or whole folders and files.
LEFT_OUT = {
    "this rank's place on each axis, and its groups: made at the start": "pgm process_group_manager",
    "the placement of a parameter: made with the model": "placement replicas copies owned_weight set_main_grad VocabularyShard",
    "as in any Llama": "rope rotate RMSNorm.forward GatedActivation.forward Llama.embed fused_attention",
    "one call: a collective, a product, a sum": "start_all_reduce copy_to_ranks reduce_from_ranks VocabParallelHead.enter "
    "all_gather_single reduce_scatter_single add_product sum_losses scale_gradients UPDATE",
    "passes its arguments on": "DataParallel.forward DataParallel.backward DataParallel.parts wrapper_of unwrap shapes_of",
    "sets gradients to zero": "AdamW.zero_grad DataParallel.zero_grad DataParallel.gradient_buffers",
    "a number": "SEQUENCE IGNORE_INDEX NORM_PART chunk_tokens Config.global_batch_size learning_rate_factor.factor",
    "types": "Finish Group Start BlocksOf AttentionFn ChunkLoss LossFn Loader Model Shapes OwnedSlice Placement",
    "checks": "UserError checked version_of picotron/data_parallel/guards.py",
    "the kernel of a GPU, and torch's kernels": "prefers_cudnn aten",
    "reads the rows of a dp rank, and keeps the positions of a cp rank": "picotron/data/loader.py",
    "the log and the checkpoints": "workbench/",
}


class Piece(NamedTuple):
    """A function, a class, a method or an assigned name of a file."""

    file: str
    name: str

    @property
    def node(self) -> ast.stmt:
        """The definition; of `train`, the loop."""
        node: Any = ast.parse(Path(self.file).read_text())
        for part in self.name.split("."):
            (node,) = [each for each in node.body if part in names_of(each)]
        return next(each for each in ast.walk(node) if isinstance(each, ast.While)) if self.name == "train" else node

    def text(self) -> str:
        """Return the code, of docstrings only the first sentence. A method keeps its indentation."""
        node = self.node
        lines: list[str | None] = [*Path(self.file).read_text().splitlines()]
        for each in reversed([*ast.walk(node)]):
            if isinstance(each, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(each)):
                first, last = each.body[0].lineno - 1, each.body[0].end_lineno or 0
                last += lines[last : last + 1] == [""]
                sentence = re.split(r"\n\n" if text.startswith("forward:") else r"(?<=\.)(?<!al\.) |\n\n", text)[0]
                indent = " " * each.body[0].col_offset
                shown = textwrap.wrap(f'"""{" ".join(sentence.split())}"""', 120 - len(indent))
                lines[first:last] = [*(indent + line for line in shown), *[None] * (last - first - len(shown))]
        first = min(each.lineno for each in (node, *getattr(node, "decorator_list", [])))
        text = "\n".join(line for line in lines[first - 1 : node.end_lineno] if line)
        text = text if "." in self.name else textwrap.dedent(text)
        return re.sub(r"^( *)(.*[(\[{])\n((?:\1    .*,\n)+)\1([)\]}].*)$", fill, text, flags=re.MULTILINE)


def fill(match: re.Match[str]) -> str:
    """Write arguments that have a line each one after the other, unless one has a comment."""
    indent, opening, inner, closing = match.groups()
    arguments = [line.strip() for line in inner.splitlines()]
    whole = f"{indent}{opening}{' '.join(arguments).removesuffix(',')}{closing}"
    if "#" in inner or len(whole) <= 120:
        return match[0] if "#" in inner else whole
    unbroken = " ".join(each.replace(" ", "\0") for each in arguments)
    lines = textwrap.wrap(unbroken, 116 - len(indent), break_long_words=False, break_on_hyphens=False)
    return "\n".join([indent + opening, *(f"{indent}    {line}" for line in lines), indent + closing]).replace(
        "\0", " "
    )


def names_of(node: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [getattr(node, "name", ""), *(each.id for each in targets if isinstance(each, ast.Name))]


def parts() -> dict[str, list[Piece]]:
    """Return the pieces of each part, in order."""
    found: dict[str, list[Piece]] = {}
    for line in PATH.strip().splitlines():
        if not line.startswith(" "):
            found[line] = pieces = []
        else:
            file, *names = line.split()
            pieces += [Piece(file, name) for name in names]
    return found


def code() -> Iterator[str]:
    """Yield the lines of all pieces."""
    for part, pieces in parts().items():
        yield f"\n\n# {part}"
        file = around = ""
        for piece in pieces:
            owner = piece.name.rpartition(".")[0]
            if piece.file != file:
                yield f"\n# {piece.file}"
            elif owner != around or (not owner and isinstance(piece.node, ast.FunctionDef | ast.ClassDef)):
                yield ""
            if owner and (owner, piece.file) != (around, file):
                bases = ", ".join(ast.unparse(each) for each in getattr(Piece(piece.file, owner).node, "bases", []))
                yield f"class {owner}({bases}):" if bases else f"class {owner}:"
            file, around = piece.file, owner
            yield piece.text()


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the way through a step of 4D training.")
    parser.add_argument("--code", action="store_true", help="print the code of all functions")
    if parser.parse_args().code:
        print_line("\n".join(code()).strip())
        return
    rows = [["part", "functions", "lines"]]
    for part, pieces in parts().items():
        rows.append([part, str(len(pieces)), str(sum(piece.text().count("\n") + 1 for piece in pieces))])
    total = [str(sum(int(row[i]) for row in rows[1:])) for i in (1, 2)]
    print_line(text_table([*rows, ["all", *total]], first_number=1))
    print_line("\nleft out, because")
    for reason, names in LEFT_OUT.items():
        print_line(textwrap.fill(f"{reason}: {', '.join(names.split())}", 110, subsequent_indent="    "))


if __name__ == "__main__":
    main()
