"""What other tools say of planted mistakes, beside `python -m conformance ADAPTER --trace`.

    python -m docs.programs.tools_beside_trace

A step of an adapter runs with each mistake under torch's CommDebugMode, which counts collectives, and under its
DebugMode, which hashes the result of every operation. Both are compared with the same step without the mistake, in the
same layout. The trace needs no such step: it compares with transformers on one process.
"""

import contextlib
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import transformers
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._debug_mode import DebugMode

from conformance.case import Case
from conformance.check import Checker
from conformance.mistakes import MISTAKES
from conformance.mutants import command

NAMES = (
    "tp: backward_not_summed", "tp: mean_instead_of_sum", "tp: joined_matrix_split_as_one",
    "ring: position_0_on_every_rank", "ring: gradients_of_own_tokens",
    "pipeline: newest_micro_batch_first", "ddp: decay_of_norms",
)  # fmt: skip
OBSERVED = """

unobserved = run


def run(case):
    from docs.programs.tools_beside_trace import observed

    with observed("{tool}", "{folder}"):
        return unobserved(case)
"""


@contextlib.contextmanager
def observed(tool: str, folder: str) -> Iterator[None]:
    """Write what a tool sees of this rank from the first batch on. (DebugMode cannot hash a model that loads.)"""
    counts, operations, batch = CommDebugMode(), DebugMode(record_nn_module=True), Case.batch
    modes = [counts] if tool == "CommDebugMode" else [operations, DebugMode.log_tensor_hashes()]
    with contextlib.ExitStack() as stack:

        def first_batch(case: Case, step: int) -> Any:
            patch.stop()
            for mode in modes:
                stack.enter_context(mode)
            return batch(case, step)

        patch = mock.patch.object(Case, "batch", first_batch)
        patch.start()
        yield
    seen: list[Any] = sorted((str(each).split(".")[-1], n) for each, n in counts.get_comm_counts().items())
    for call in operations.logs:
        name, value = call.render([]).strip().partition("(")[0].removeprefix("aten::"), (call.log or {}).get("hash")
        # A collective is hashed before its result is there.
        seen.append((name, None if name.startswith("c10d") else value))
    Path(folder, f"rank{dist.get_rank()}").write_bytes(pickle.dumps(seen))


def see(tool: str, checker: Checker, chapter: str, layout: str, text: str) -> list[list[Any]] | str:
    """Run an adapter's text under a tool. Returns what it sees on each rank, or an error."""
    with tempfile.TemporaryDirectory() as folder:
        variant = Path(folder, "variant.py")
        variant.write_text(text + OBSERVED.format(tool=tool, folder=folder))
        row = checker.check(chapter, layout, adapter=variant)
        if row.log:
            return f"raises {row.log.strip().splitlines()[-1]}"
        return [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("rank*"))]


def difference(right: list[list[Any]] | str, wrong: list[list[Any]] | str) -> str:
    """Describe the first difference on the first rank that has one."""
    if isinstance(right, str) or isinstance(wrong, str):
        return str(right if isinstance(right, str) else wrong)
    for rank, (ours, theirs) in enumerate(zip(right, wrong, strict=True)):
        module = ""
        for (name, value), (other, found) in zip(ours, theirs, strict=False):
            if name.startswith("[nn.Mod]"):
                module = f", after {name.removeprefix('[nn.Mod] ')}"
            if name != other:
                return f"rank {rank}: {other} instead of {name}{module}"
            if value != found:
                values = f": {found} instead of {value}" if isinstance(value, int) else ""
                return f"rank {rank}: {name}{values}{module}"
    return "nothing"


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    path = Path(MISTAKES[NAMES[0]].file)
    with Checker(path) as checker:
        one, two = (see("DebugMode", checker, "step", layout, path.read_text()) for layout in ("tp1", "tp2"))
    print(f"no mistake, tp2 beside tp1\n  DebugMode     {difference(one[:1], two[:1])}")
    for name in NAMES:
        mistake = MISTAKES[name]
        chapter, layout = command(mistake.found_by[-1], mistake)[4:7:2]
        right = Path(mistake.file).read_text()
        wrong = right.replace(mistake.old, mistake.new)
        print(name)
        with Checker(Path(mistake.file)) as checker, tempfile.TemporaryDirectory() as folder:
            for tool in ("CommDebugMode", "DebugMode"):
                seen = [see(tool, checker, chapter, layout, text) for text in (right, wrong)]
                print(f"  {tool:13} {difference(*seen)}")
            variant = Path(folder, "variant.py")
            variant.write_text(wrong)
            checker.trace = True
            print(f"  {'trace':13} {checker.check(chapter, layout, adapter=variant).trace}")


if __name__ == "__main__":
    main()
