"""Count what the second training step of a run executes:  python -m tests.support.traced_step OUT [train.py's options]

Writes OUT, a JSON object with the functions and code lines of each file, over all ranks.
"""

import ast
import io
import json
import os
import sys
import threading
import tokenize
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import train
from workbench.run.metrics import Metrics

ROOT = str(Path(train.__file__).parent) + os.sep
OPTIONS = """
--config template/base_config.json --distributed.pp_size 2 --distributed.cp_size 2 --distributed.tp_size 2
--distributed.dp_size 1 --distributed.sequence_parallel true --training.total_train_steps 3 --training.seq_length 64
--training.warmup_steps 1 --training.eval_frequency 0 --training.num_samples 20 --checkpoint.save_frequency null
"""
NOT_CODE = "COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the lines of docstrings, also those of attributes."""
    statements = (each for each in ast.walk(tree) if isinstance(each, ast.Expr))
    found = (each for each in statements if isinstance(getattr(each.value, "value", None), str))
    return {line for each in found for line in range(each.lineno, (each.end_lineno or 0) + 1)}


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """Return the tokens of a program without comments, docstrings and layout. An f-string counts once, although Python
    3.12 and later split it.
    """
    documentation, tokens, depth = docstring_lines(ast.parse(source)), [], 0
    for each in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[each.type]
        if not depth and kind not in NOT_CODE and each.start[0] not in documentation:
            tokens.append(each)
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return tokens


def code_lines(source: str) -> set[int]:
    return {line for each in code_tokens(source) for line in range(each.start[0], each.end[0] + 1)}


class Tracer:
    """Traces the second step, from one `Metrics.start_step` to the next."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.functions: set[tuple[str, str]] = set()
        self.starts, self.start_step = 0, Metrics.start_step

    def in_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(ROOT) or ".venv" in path or path == __file__:
            return None
        if not frame.f_code.co_name.startswith("<"):  # a comprehension or a lambda
            self.functions.add((path[len(ROOT) :], frame.f_code.co_qualname.replace("<locals>.", "")))
        return self.in_line(frame, "line", None)

    def in_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename[len(ROOT) :], frame.f_lineno))
        return self.in_line

    def starts_step(self, metrics: Metrics) -> None:
        self.starts += 1
        caller = sys._getframe(1)
        if self.starts == 3:  # the first one is that of the constructor
            caller.f_trace = self.in_line
            sys.settrace(self.in_call)
            threading.settrace(self.in_call)  # backward runs in other threads on a GPU
        elif self.starts == 4:
            sys.settrace(None)
            caller.f_trace = None
        self.start_step(metrics)


def traced(ranks: Path, train_rank: partial[None]) -> None:
    """Train on this rank, and write what its second step ran to a file of the folder `ranks`."""
    tracer = Tracer()
    Metrics.start_step = lambda metrics: tracer.starts_step(metrics)  # type: ignore[method-assign]
    train_rank()
    found = {"lines": sorted(tracer.lines), "functions": sorted(tracer.functions)}
    (ranks / os.environ.get("RANK", "0")).write_text(json.dumps(found))


def main() -> None:
    out = Path(sys.argv[1]).absolute()
    sys.argv = ["train.py", *OPTIONS.split(), *sys.argv[2:]]
    ranks = out.with_suffix(".ranks")
    ranks.mkdir(exist_ok=True)
    run_ranks = train.run_ranks
    train.run_ranks = lambda count, train_rank: run_ranks(count, partial(traced, ranks, train_rank))
    try:
        train.main()
    finally:
        if os.environ.get("RANK", "0") == "0":
            parts = [json.loads(path.read_text()) for path in ranks.iterdir()]
            lines, functions = ({tuple(each) for part in parts for each in part[key]} for key in ("lines", "functions"))
            result = {}
            for file in sorted({file for file, _ in lines | functions}):
                code = code_lines(Path(ROOT, file).read_text())
                names = sorted(name for path, name in functions if path == file)
                result[file] = {"functions": names, "lines": sum(path == file and line in code for path, line in lines)}
            out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
