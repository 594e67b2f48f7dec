"""The grid of layouts: each trains as one process of transformers does, in float64.

    make parity        or: python -m conformance.grid [WORD ...]

checks every layout of LAYOUTS with `conformance`, through picotron's adapter. All train the same model. It prints the
largest errors, writes them to docs/reference/parity.csv, and fails if one is above LIMIT. With words it takes only
layouts that have all of them, and writes nothing.
"""

import math
import os
import sys
from pathlib import Path

import transformers

from conformance.check import Checker
from conformance.compare import LIMIT

ADAPTER = Path("conformance/adapters/picotron.py").resolve()
TABLE = Path("docs/reference/parity.csv")
KINDS = ("loss", "gradients", "weights")  # of errors

# The sizes of the axes; a schedule, with pp, and chunks2 for two stages per rank where one is the default; ep2 or ep4
# for experts that as many ranks share; sp, sequence parallel, with tp; how the sequence is split and attention sees the
# rest of it, with cp; zero1 or zero3, else bucket, with dp or cp; embedding and head tied or not; how many key/value
# heads there are for 8 query heads; the family.
# test_grid.py shows that any two of these meet, if they can.
LAYOUTS = """
dp2 x pp2 looped_bfs zero1 tied kv8 qwen3
pp2 x cp2 afab zigzag all_gather zero3 untied kv1 mistral
pp2 x cp2 looped_bfs contiguous ring zero3 untied kv1 qwen2
pp2 x cp2 zb_h1 contiguous ring zero1 untied kv1 qwen3
pp2 x cp2 zb_h1 zigzag all_gather zero1 tied kv8 granite
pp2 x tp2 dualpipev untied kv4 qwen2
pp2 x tp2 zbv sp untied kv1 qwen3
pp4 interleaved_1f1b tied kv8 mistral
tp4 sp untied kv1 llama
cp2 x tp4 sp contiguous ulysses zero3 untied kv8 qwen2
cp4 x tp2 zigzag ring zero1 tied kv1 qwen3
dp2 x cp2 x tp2 contiguous all_gather tied kv1 qwen3
dp2 x pp2 x cp2 dualpipev contiguous ulysses zero3 untied kv8 qwen3
dp2 x pp2 x cp2 looped_bfs zigzag all_gather tied kv1 smollm3
dp2 x pp2 x cp2 zbv zigzag ring zero3 untied kv4 olmo2
dp2 x pp2 x tp2 1f1b sp zero3 tied kv4 olmo2
dp2 x pp2 x tp2 interleaved_1f1b sp zero1 untied kv1 granite
dp2 x pp2 x tp2 zbv zero1 tied kv8 llama
dp4 x cp2 zigzag ring untied kv8 olmo2
dp4 x pp2 1f1b zero3 tied kv1 qwen2
dp4 x pp2 afab zero1 tied kv8 qwen2
dp4 x pp2 interleaved_1f1b zero3 tied kv1 llama
dp4 x pp2 zb_h1 zero3 tied kv1 qwen3
pp2 x cp2 x tp2 1f1b sp contiguous ring zero1 untied kv8 qwen3
pp2 x cp2 x tp2 afab contiguous ring tied kv1 llama
pp2 x cp2 x tp2 interleaved_1f1b sp contiguous all_gather zero1 tied kv8 smollm3
pp2 x cp2 x tp2 zb_h1 zigzag ulysses zero3 untied kv8 smollm3
pp2 x cp4 1f1b zigzag ulysses tied kv4 granite
pp2 x cp4 afab contiguous ulysses zero3 untied kv8 olmo2
pp2 x cp4 dualpipev zigzag all_gather zero1 tied kv1 smollm3
pp2 x cp4 interleaved_1f1b zigzag ulysses zero1 tied kv4 qwen2
pp2 x cp4 zbv contiguous ring tied kv1 qwen2
pp2 x tp4 dualpipev sp tied kv1 mistral
pp2 x tp4 zb_h1 sp untied kv8 qwen3
pp4 x cp2 dualpipev zigzag ring tied kv1 llama
pp4 x cp2 interleaved_1f1b contiguous all_gather zero1 untied kv4 qwen3
pp4 x tp2 1f1b untied kv1 mistral
pp4 x tp2 afab sp tied kv4 qwen3
pp4 x tp2 zb_h1 untied kv4 granite
cp4 x tp4 zigzag all_gather untied kv8 olmo2
dp2 x cp4 x tp2 sp contiguous ring zero1 tied kv8 mistral
dp2 x pp2 x cp2 x tp2 afab sp zigzag ulysses zero3 tied kv8 smollm3
dp2 x pp2 x cp4 zb_h1 contiguous ulysses zero3 tied kv4 olmo2
dp2 x pp2 x tp4 afab zero1 untied kv4 granite
dp2 x pp4 x cp2 1f1b contiguous ulysses zero3 untied kv8 llama
dp2 x pp4 x cp2 zb_h1 zigzag all_gather untied kv8 qwen2
dp4 x cp2 x tp2 contiguous all_gather zero1 tied kv4 granite
dp4 x cp4 zigzag ring zero3 untied kv1 smollm3
dp4 x pp2 x cp2 dualpipev contiguous all_gather zero3 untied kv1 mistral
dp4 x pp2 x cp2 looped_bfs zigzag ulysses zero3 untied kv4 olmo2
dp4 x pp4 zbv untied kv4 smollm3
dp4 x tp4 sp zero1 untied kv4 granite
pp2 x cp2 x tp4 1f1b zigzag all_gather zero3 tied kv4 smollm3
pp2 x cp2 x tp4 interleaved_1f1b zigzag ring untied kv1 olmo2
pp2 x cp2 x tp4 zbv contiguous ulysses zero3 tied kv8 mistral
pp2 x cp4 x tp2 looped_bfs sp zigzag all_gather untied kv4 llama
pp4 x cp2 x tp2 dualpipev sp contiguous ring zero1 untied kv8 granite
pp4 x cp2 x tp2 dualpipev zigzag ulysses zero1 tied kv4 olmo2
pp4 x cp2 x tp2 looped_bfs contiguous ulysses zero3 tied kv8 granite
pp4 x cp4 zbv contiguous all_gather untied kv4 granite
pp4 x tp4 looped_bfs tied kv4 mistral
pp4 auto tied kv8 granite
dp2 x pp2 auto zero1 untied kv4 mistral
dp2 x pp4 x cp2 auto contiguous ulysses zero3 untied kv8 llama
pp2 x cp2 x tp2 auto sp zigzag ring tied kv1 mistral
pp4 zb_h1 chunks2 tied kv1 llama
dp2 x pp2 x tp2 zb_h1 chunks2 sp zero3 untied kv4 granite
pp2 x cp2 zb_h1 chunks2 zigzag ulysses zero1 tied kv8 mistral
pp2 x cp2 x tp2 v_min zigzag ring zero1 tied kv1 gemma
pp4 x cp4 v_min contiguous all_gather untied kv4 gemma
dp2 x pp2 x tp4 v_min sp zero3 untied kv8 gemma
dp4 x pp2 x cp2 v_min zigzag ulysses zero1 tied kv4 gemma
pp2 v_min untied kv4 llama
pp2 v_min tied kv1 mistral
pp2 v_min untied kv4 qwen2
pp2 v_min tied kv4 qwen3
pp2 v_min tied kv8 smollm3
pp2 v_min untied kv4 olmo2
pp2 v_min untied kv8 granite
cp2 contiguous ulysses zero1 untied kv4 gemma
pp2 1f1b untied kv4 gemma
pp2 afab untied kv4 gemma
pp2 dualpipev untied kv4 gemma
pp2 interleaved_1f1b tied kv8 gemma
pp2 looped_bfs untied kv1 gemma
pp2 zb_h1 untied kv8 gemma
pp2 zbv untied kv8 gemma
dp2 ep2 untied kv4 qwen3_moe
dp2 x tp2 ep2 sp tied kv1 mixtral
dp2 x cp2 ep4 zigzag ring untied kv4 olmoe
dp2 x pp2 1f1b ep2 zero1 untied kv4 dots1
dp4 ep2 zero3 untied kv8 mixtral
dp2 x cp2 ep2 zero3 zigzag all_gather tied kv4 qwen3_moe
dp2 x cp2 ep4 zero1 contiguous ulysses untied kv8 dots1
pp2 x cp2 x tp2 dualpipev ep2 contiguous ring untied kv1 mixtral
dp4 x tp2 ep4 sp zero1 untied kv4 dots1
tp2 sp untied kv4 mixtral
pp4 1f1b tied kv1 qwen3_moe
pp2 x cp2 x tp4 looped_bfs contiguous ring zero1 untied kv8 qwen3_moe
pp2 x cp4 x tp2 1f1b ep4 zigzag all_gather untied kv1 olmoe
pp4 x cp4 zb_h1 zigzag ulysses tied kv8 mixtral
dp4 x pp4 interleaved_1f1b ep4 zero3 tied kv1 olmoe
pp4 x cp4 v_min ep2 contiguous ulysses zero1 tied kv8 qwen3_moe
dp2 x pp2 x cp2 x tp2 afab sp contiguous all_gather zero1 tied kv8 mixtral
pp2 x cp2 x tp4 dualpipev sp contiguous all_gather zero3 untied kv1 olmoe
pp2 x cp2 x tp4 looped_bfs ep2 sp contiguous all_gather zero1 untied kv1 mixtral
dp4 x pp2 x cp2 interleaved_1f1b zigzag ring zero3 untied kv8 qwen3_moe
dp2 x pp2 x cp2 x tp2 zb_h1 ep2 contiguous ulysses zero1 tied kv8 olmoe
pp4 x cp2 x tp2 interleaved_1f1b ep2 contiguous all_gather zero3 untied kv1 mixtral
pp4 x cp2 zbv ep2 zigzag ulysses zero1 untied kv8 mixtral
dp2 x pp4 x cp2 v_min zigzag ring tied kv4 olmoe
pp2 x cp2 x tp4 afab ep2 sp contiguous ring zero3 untied kv4 qwen3_moe
dp2 x pp4 x cp2 zbv ep4 contiguous all_gather zero3 untied kv8 qwen3_moe
pp2 x cp2 x tp2 zbv sp zigzag all_gather zero3 tied kv1 olmoe
dp2 x pp2 x cp2 x tp2 zb_h1 ep4 sp zigzag ulysses tied kv8 qwen3_moe
dp4 x pp2 x tp2 dualpipev ep4 sp untied kv1 qwen3_moe
dp2 x pp4 x cp2 afab ep4 contiguous ring zero1 tied kv4 olmoe
dp2 x pp2 x cp2 looped_bfs ep4 zigzag ring untied kv8 olmoe
pp2 x cp2 x tp2 1f1b contiguous ulysses untied kv8 mixtral
pp4 x cp2 x tp2 v_min zigzag ring zero3 untied kv1 mixtral
dp2 x pp2 x cp2 x tp2 v_min ep4 zigzag ring tied kv1 dots1
dp2 x cp2 x tp4 ep4 sp contiguous all_gather zero1 tied kv4 dots1
pp4 x cp4 interleaved_1f1b zigzag all_gather untied kv1 dots1
pp2 x cp4 x tp2 zbv ep2 sp zigzag ring tied kv1 dots1
dp4 x pp2 x cp2 looped_bfs ep2 zigzag ring tied kv4 dots1
pp4 x cp2 x tp2 zb_h1 zigzag all_gather zero1 tied kv4 dots1
dp4 x pp2 x cp2 dualpipev ep4 contiguous all_gather zero3 untied kv4 dots1
pp2 afab tied kv8 dots1
""".strip().splitlines()


TEN = {"last_step": 10, "total_steps": 10, "warmup_steps": 3}
BARE = "no_documents no_masks no_weights no_evaluation no_resume"


def errors_of(checker: Checker, name: str) -> dict[str, float]:
    """Return the largest errors of the training in a layout; infinity from the first difference on."""
    row = checker.check("run", f"{name} {BARE}", micro_batches=4 if "pp" in name else 2, **TEN)
    if row.verdict != "equal":
        print(row, row.log, sep="\n")
    found = {kind: row.errors.get(kind, math.inf) for kind in ("loss", "gradient", "gradient norm", "weight")}
    gradients = max(found["gradient"], found["gradient norm"])
    return {"loss": found["loss"], "gradients": gradients, "weights": found["weight"]}


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [",".join([name, *(f"{errors[kind]:.1e}" for kind in KINDS)]) for name, errors in rows.items()]
    return "\n".join([",".join(["layout", *KINDS]), *lines]) + "\n"


def main(words: list[str]) -> int:
    transformers.utils.logging.disable_progress_bar()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs have no kernel for blocks of attention in float64
    rows: dict[str, dict[str, float]] = {}
    checker = Checker(ADAPTER, timeout=120)
    for name in LAYOUTS:
        if set(words) <= set(name.split()):
            rows[name] = errors_of(checker, name)
            print(name, *(f"{kind} {error:.1e}" for kind, error in rows[name].items()), sep=" | ", flush=True)
    bad = [name for name, errors in rows.items() if not max(errors.values()) <= LIMIT]
    if not words:
        TABLE.write_text(table(rows))
    for kind in KINDS:
        print(f"largest error of {kind}: {max((errors[kind] for errors in rows.values()), default=math.nan):.1e}")
    print(f"{len(rows)} layouts, {len(bad)} above {LIMIT:g}", *bad, sep="\n")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
