"""Table of the papers that the code cites, and of the files that cite them:  python -m docs.programs.papers"""

import re
from pathlib import Path

from workbench.console import print_line

PAPERS = """
Model
    2302.13971 | Touvron et al. 2023 | LLaMA: Open and Efficient Foundation Language Models | the model
    2407.21783 | Llama team 2024 | The Llama 3 Herd of Models | rotary frequencies for long contexts; all-gather attention in context parallelism; any group size in interleaved 1F1B
    2104.09864 | Su et al. 2021 | RoFormer: Enhanced Transformer with Rotary Position Embedding | rotary embeddings
    2306.15595 | Chen et al. 2023 | Extending Context Window of Large Language Models via Positional Interpolation | linear scaling of positions
    1910.07467 | Zhang and Sennrich 2019 | Root Mean Square Layer Normalization | RMSNorm
    2002.05202 | Shazeer 2020 | GLU Variants Improve Transformer | SwiGLU
    2305.13245 | Ainslie et al. 2023 | GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints | grouped-query attention
    2310.06825 | Jiang et al. 2023 | Mistral 7B | a family
    2412.15115 | Qwen team 2024 | Qwen2.5 Technical Report | a family
    2505.09388 | Qwen team 2025 | Qwen3 Technical Report | a family
    2403.08295 | Gemma team 2024 | Gemma | a family
    2501.00656 | OLMo team 2025 | 2 OLMo 2 Furious | a family
    2401.04088 | Jiang et al. 2024 | Mixtral of Experts | a family
    2409.02060 | Muennighoff et al. 2024 | OLMoE: Open Mixture-of-Experts Language Models | a family
    2506.05767 | Huo et al. 2025 | dots.llm1 Technical Report | a family
    2408.15664 | Wang et al. 2024 | Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts | the bias of an expert
    1701.06538 | Shazeer et al. 2017 | Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer | experts
    2211.15841 | Gale et al. 2022 | MegaBlocks: Efficient Sparse Training with Mixture-of-Experts | experts without dropped tokens
    2501.18795 | Yang et al. 2025 | Rope to Nope and Back Again: A New Hybrid Attention Strategy | layers without positions
    2203.03466 | Yang et al. 2022 | Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer | Granite's multipliers
    1508.07909 | Sennrich et al. 2015 | Neural Machine Translation of Rare Words with Subword Units | byte-pair encoding
    1904.09751 | Holtzman et al. 2019 | The Curious Case of Neural Text Degeneration | nucleus sampling
Training
    1711.05101 | Loshchilov and Hutter 2017 | Decoupled Weight Decay Regularization | AdamW
    1608.03983 | Loshchilov and Hutter 2016 | SGDR: Stochastic Gradient Descent with Warm Restarts | the cosine schedule
    2404.06395 | Hu et al. 2024 | MiniCPM: Unveiling the Potential of Small Language Models with Scalable Training Strategies | warm-up, stable, decay
    1710.03740 | Micikevicius et al. 2017 | Mixed Precision Training | master weights in float32, loss scaling
    2010.06192 | Zamirai et al. 2020 | Revisiting BFloat16 Training | stochastic rounding
    2209.05433 | Micikevicius et al. 2022 | FP8 Formats for Deep Learning | float8
    1604.06174 | Chen et al. 2016 | Training Deep Nets with Sublinear Memory Cost | activation checkpointing
    2204.02311 | Chowdhery et al. 2022 | PaLM: Scaling Language Modeling with Pathways | the formula of MFU
Data parallelism and ZeRO
    2006.15704 | Li et al. 2020 | PyTorch Distributed: Experiences on Accelerating Data Parallel Training | buckets that overlap with backward
    1910.02054 | Rajbhandari et al. 2019 | ZeRO: Memory Optimizations Toward Training Trillion Parameter Models | ZeRO-1 and ZeRO-3
    2304.11277 | Zhao et al. 2023 | PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel | weights gathered unit by unit
Tensor parallelism
    1909.08053 | Shoeybi et al. 2019 | Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism | column- and row-parallel layers, the vocabulary-parallel loss
    2205.05198 | Korthikanti et al. 2022 | Reducing Activation Recomputation in Large Transformer Models | sequence parallelism; selective recomputation; bytes of activations
    2006.16668 | Lepikhin et al. 2020 | GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding | expert parallelism
Pipeline parallelism
    1811.06965 | Huang et al. 2018 | GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism | micro-batches, AFAB
    2006.09503 | Narayanan et al. 2020 | Memory-Efficient Pipeline-Parallel DNN Training | 1F1B (PipeDream-Flush)
    2104.04473 | Narayanan et al. 2021 | Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM | interleaved 1F1B
    2211.05953 | Lamy-Poirier 2022 | Breadth-First Pipeline Parallelism | looped BFS
    2401.10241 | Qi et al. 2023 | Zero Bubble Pipeline Parallelism | ZB-H1, and the backward in two halves
    2405.15362 | Qi et al. 2024 | Pipeline Parallelism with Controllable Memory | V schedules
    2412.19437 | DeepSeek-AI 2024 | DeepSeek-V3 Technical Report | DualPipe; moments in bfloat16; routers with sigmoids and a bias
Context parallelism
    2310.01889 | Liu et al. 2023 | Ring Attention with Blockwise Transformers for Near-Infinite Context | ring attention
    2309.14509 | Jacobs et al. 2023 | DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models | Ulysses
Time and memory of a step
    2307.08691 | Dao 2023 | FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning | FLOPs of attention
    2407.08608 | Shah et al. 2024 | FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision | rates of attention on H100s
"""  # fmt: skip


def citations() -> dict[str, list[str]]:
    """Return the files of picotron/ and workbench/ that cite each paper, by its arXiv number."""
    found: dict[str, list[str]] = {}
    for path in sorted([*Path("picotron").rglob("*.py"), *Path("workbench").rglob("*.py")]):
        for number in sorted(set(re.findall(r"arXiv:(\d+\.\d+)", path.read_text()))):
            found.setdefault(number, []).append(path.name)
    return found


def main() -> None:
    cited = citations()
    for line in PAPERS.strip().splitlines():
        if not line.startswith(" "):
            print_line(f"\n{line}")
            continue
        number, authors, title, use = line.strip().split(" | ")
        print_line(f"{number}  {authors}: {title}")
        print_line(f"            {use}: {', '.join(cited.pop(number))}")
    assert not cited, f"papers without a title: {cited}"


if __name__ == "__main__":
    main()
