"""Tokenising a large file: speed compared with the tokenizer alone, and peak memory.

    python -m benchmarks.tokens --mb 1000

The tokenizer alone gets texts of 64 KiB in memory, 1 MiB at a time, and its token ids are dropped. Peak memory is that
of the largest process; at the beginning, a process that has imported the libraries uses about 400 MiB.
"""

import argparse
import hashlib
import itertools
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.side_by_side import CONTEXT, DifferentResults, print_markdown
from benchmarks.workload import TINY, add_tiny
from conformance.oracle import make_config, tiny_llama
from picotron.console import number
from workbench.prepare.documents import python_stdlib
from workbench.prepare.text import PIECE
from workbench.prepare.tokens import train_bpe, write_tokens

VOCABULARY, BPE_FILES = (300, 10) if TINY else (4096, 600)


def texts() -> Iterator[str]:
    """Yield the files of the standard library, again and again."""
    return itertools.cycle(path.read_text(encoding="utf-8", errors="replace") for path in python_stdlib())


def write_file(path: Path, size: int) -> None:
    """Write a .txt or .jsonl file with at least `size` bytes of text."""
    left = size
    with path.open("w", encoding="utf-8") as file:
        for text in texts():
            file.write(text if path.suffix == ".txt" else json.dumps({"text": text}) + "\n")
            left -= len(text.encode())
            if left <= 0:
                return


def tokenizer_alone(folder: Path, size: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "bpe")
    source, left = texts(), size
    while left > 0:
        text = "".join(itertools.islice(source, 100))
        for start in range(0, len(text), 16 * PIECE):
            batch = text[start : start + 16 * PIECE]
            tokenizer([batch[i : i + PIECE] for i in range(0, len(batch), PIECE)], verbose=False)
            left -= len(batch.encode())


def picotron(folder: Path, name: str, processes: int) -> Path:
    """Tokenise a file, and return the file of its tokens."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=folder)
    config = make_config(
        dataset__name=str(folder / name), dataset__num_proc=processes, model__tokenizer=str(folder / "bpe")
    )
    return write_tokens(config, tiny_llama(vocab_size=VOCABULARY)) / "tokens.uint16"


def timed(connection: Any, function: Callable[..., Path | None], arguments: tuple[Any, ...]) -> None:
    """Send the seconds that a call takes, the peak memory of the largest process in MiB, and the checksum of the file
    whose path the call returns.
    """
    start = time.perf_counter()
    file = function(*arguments)
    seconds = time.perf_counter() - start
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    connection.send((seconds, max(peaks) / 1024, hashlib.sha256(file.read_bytes()).hexdigest() if file else ""))


def measure(function: Callable[..., Path | None], *arguments: Any) -> tuple[float, float, str]:
    """Run `timed` in a new process."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=timed, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    result: tuple[float, float, str] = ours.recv()
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    size_in_mb, turns = (1, 1) if TINY else (60, 2)
    parser.add_argument("--mb", type=number(int, 1), default=size_in_mb, help="MB of text in each file [%(default)s]")
    parser.add_argument("--turns", type=number(int, 1), default=turns, help="runs of each variant [%(default)s]")
    add_tiny(parser)
    options = parser.parse_args()
    size, cores = options.mb * 10**6, os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_bpe(itertools.islice(texts(), BPE_FILES), VOCABULARY).save_pretrained(folder / "bpe")
        variants: dict[str, tuple[Any, ...]] = {"tokenizer alone": (tokenizer_alone, folder, size)}
        for file in ("a.txt", "a.jsonl"):
            write_file(folder / file, size)
            for processes in (1, cores):
                variants[f"picotron, {Path(file).suffix}, num_proc {processes}"] = (picotron, folder, file, processes)
        results: dict[str, list[tuple[float, float, str]]] = {name: [] for name in variants}
        for _ in range(options.turns):
            for name, variant in variants.items():
                results[name].append(measure(*variant))
        for suffix in (".txt", ".jsonl"):
            if len({sum for name, each in results.items() if suffix in name for _, _, sum in each}) > 1:
                raise DifferentResults(f"the tokens of the {suffix} file depend on the number of processes")
        baseline = results["tokenizer alone"]
        rows = [("", "MB/s", "relative speed", "peak memory, MiB")]
        for name, turns in results.items():
            rate = options.mb / statistics.median(seconds for seconds, _, _ in turns)
            speed = statistics.median(b / s for (b, _, _), (s, _, _) in zip(baseline, turns, strict=True))
            rows.append((name, f"{rate:.2f}", f"{speed:.2f}", f"{max(memory for _, memory, _ in turns):,.0f}"))
    print(f"\n{options.mb} MB of text per file, vocabulary of {VOCABULARY:,}")
    print_markdown(rows)


if __name__ == "__main__":
    main()
