"""What torch's CommDebugMode and DebugMode say of planted mistakes, beside `--trace`.

python -m conformance.trace_peers [NAME ...]

Both tools say what a run does, and not what it should do. So each of them watches the trainer with the mistake and
without it, and a row has the first difference. A user who looks for a mistake has no such second run.
"""

import argparse
import contextlib
import functools
import json
import pickle
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import transformers

from conformance.chapters import cases_of
from conformance.check import Checker
from conformance.mistakes import MISTAKES
from conformance.mutants import ROOT, command

NAMES = (
    "tp: mean_instead_of_sum",
    "tp: backward_not_summed",
    "tp: norms_not_summed",
    "ring: position_0_on_every_rank",
    "ddp: not_divided_by_micro_batches",
    "ddp: decay_of_norms",
)
WATCHED = """

def watched(case, run=run):
    import contextlib, json, torch
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._debug_mode import DebugMode

    comm, debug, load = CommDebugMode(), DebugMode(record_nn_module=True), Case.model
    with contextlib.ExitStack() as stack:

        def model(case):  # the tools cannot watch how transformers loads a model
            found = load(case)
            for tool in (comm, debug, DebugMode.log_tensor_hashes(hash_inputs=True)):
                stack.enter_context(tool)
            return found

        Case.model = model
        result = run(case)
    counts = {str(name).rpartition(".")[2]: n for name, n in comm.get_comm_counts().items()}
    text = json.dumps([counts, debug.debug_string(show_stack_trace=False).splitlines()])
    (case.folder / f"seen{torch.distributed.get_rank()}").write_text(text)
    return result


run = watched
"""


@contextlib.contextmanager
def variant(source: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "variant.py")
        path.write_text(source)
        yield path


def seen(checker: Checker, source: str, chapter: str, layout: str) -> list[tuple[dict[str, int], list[str]]]:
    """Return what the tools say on each rank: the number of collectives of each kind, and the operations."""
    with variant(source + WATCHED) as path, tempfile.TemporaryDirectory() as folder:
        (case,) = cases_of(chapter, layout, "dp1", Path(folder), last_step=1)
        checker.start(case, path)
        outcomes = [pickle.loads((case.folder / f"rank{rank}").read_bytes()) for rank in range(case.world_size)]
        for kind, text in outcomes:
            if kind != "result":
                raise SystemExit(text)
        return [json.loads((case.folder / f"seen{rank}").read_text()) for rank in range(case.world_size)]


def collectives(wrong: dict[str, int], right: dict[str, int]) -> str:
    """Return the numbers of collectives that the mistake changes."""
    changed = [name for name in sorted({*wrong, *right}) if wrong.get(name, 0) != right.get(name, 0)]
    return ", ".join(f"{right.get(name, 0)} -> {wrong.get(name, 0)} {name}" for name in changed)


def operation(wrong: list[str], right: list[str]) -> str:
    """Return the first operation that the mistake changes, and the module in which it is."""
    module = "no module"
    for line, other in zip(wrong, right, strict=False):
        if found := re.search(r"\[nn\.Mod\w*\] (\S+)", line):
            module = found[1]
        if line != other:
            name = re.search(r"([\w:]+)\(", line)
            return f"{name[1] if name else line.strip()} in {module}"
    return "" if len(wrong) == len(right) else "the number of operations"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.trace_peers", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="NAME", help="mistakes [six]")
    names = parser.parse_args().names or NAMES
    transformers.utils.logging.disable_progress_bar()
    print("| mistake | CommDebugMode | DebugMode | --trace |\n|---|---|---|---|")
    with contextlib.ExitStack() as stack:
        checkers = functools.cache(lambda path: stack.enter_context(Checker(path, timeout=600, trace=True)))
        rights = functools.cache(lambda path, *case: seen(checkers(path), path.read_text(), *case))
        for name in names:
            mistake = MISTAKES[name]
            words = command(mistake.found_by[-1], mistake)
            adapter, case = ROOT / words[2], (words[4], words[6])
            wrong = adapter.read_text().replace(mistake.old, mistake.new)
            pairs = [*zip(seen(checkers(adapter), wrong, *case), rights(adapter, *case), strict=True)]
            counts = next(filter(None, (collectives(a[0], b[0]) for a, b in pairs)), "no difference")
            first = next(filter(None, (operation(a[1], b[1]) for a, b in pairs)), "no difference")
            with variant(wrong) as path:
                trace = checkers(adapter).check(*case, adapter=path, last_step=2).trace
            print(f"| {name} | {counts} | {first} | {trace} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
