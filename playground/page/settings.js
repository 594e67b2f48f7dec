// The settings of the two tabs: their names, limits, and what they mean.

const slider = (name, label, min, max, step, note, zero) => ({ name, label, min, max, step, note, zero, kind: "slider" });
const number = (name, label, min, max, note, zero) => ({ name, label, min, max, step: 1, note, zero, kind: "number" });
const choice = (name, label, choices, note) => ({ name, label, choices, note, kind: "choice" });
const flag = (name, label, note) => ({ name, label, note, kind: "flag" });
const text = (name, label, example, note) => ({ name, label, example, note, kind: "text" });

// zero: how 0 is called where it stands for a default.
export const SCHEDULES = {
  Pipeline: [
    slider("pp", "Ranks", 1, 32, 1, "number of pipeline-parallel ranks (pp)"),
    slider("micro_batches", "Micro-batches", 1, 128, 1, "number of micro-batches per step"),
    slider("chunks", "Chunks", 0, 8, 1, "stages per rank; some schedules allow only their default", "default"),
    slider("group_size", "Group size", 0, 64, 1, "micro-batches that take turns on the chunks of interleaved schedules", "default"),
  ],
  Times: [
    slider("F", "F forward", 0.1, 4, 0.1, "time of a forward. All times are in forwards of one micro-batch on one rank"),
    slider("B", "B backward", 0.1, 8, 0.1, "time of a full backward"),
    slider("I", "I input half", 0.1, 4, 0.1, "time of the first half of a split backward: gradients of the stage’s input"),
    slider("W", "W weights half", 0.1, 4, 0.1, "time of the second half of a split backward: gradients of the weights"),
    slider("message", "Message", 0, 2, 0.05, "latency of a message between ranks, which compute meanwhile (in picotron’s loops for afab and 1f1b, they wait, so a step takes longer)"),
    slider("transfer", "Transfer", 0, 2, 0.05, "time in which a message occupies the link between two ranks: its size, divided by the bandwidth"),
    slider("overlapped", "Overlapped pair", 0.5, 1, 0.05, "time of a pair of DualPipeV, as a fraction of F + B"),
  ],
  "Unequal stages": [
    slider("first", "First stage +", 0, 2, 0.05, "additional time of the first stage, for the embedding"),
    slider("last", "Last stage +", 0, 2, 0.05, "additional time of the last stage, for the head and the loss"),
    text("layout", "Layers", "Et|tt|tt|tL", "the layers of each stage, as in pp_layout: E is the embedding, t a layer, L the head, | a boundary between stages; empty: equal stages"),
    text("factors", "Factors", "1 1 1.5 1", "a factor for the time of each rank, or of each stage, separated by spaces"),
  ],
  Memory: [
    slider("memory", "Limit", 0, 64, 0.5, "the most activations that a rank may hold, in micro-batches", "none"),
    slider("deferred", "Kept for W", 0, 1, 0.05, "fraction of the activations that a rank keeps between I and W"),
  ],
};

const RANKS = 65536;
export const memorySettings = (schedules) => ({
  Layout: [
    number("tp_size", "tp", 1, 1024, "tensor-parallel ranks: each holds a shard of every matrix"),
    flag("sequence_parallel", "Sequence parallel", "also shard the activations of norms over the tp ranks"),
    number("cp_size", "cp", 1, 1024, "context-parallel ranks: each holds a shard of every sequence"),
    choice("cp_engine", "cp engine", ["ring", "all_gather", "ulysses"], "how context-parallel ranks compute attention"),
    number("pp_size", "pp", 1, 64, "pipeline ranks: each holds some of the layers"),
    choice("pp_engine", "Schedule", schedules, "the pipeline schedule; it decides how many micro-batches a rank holds"),
    number("pp_chunks", "Chunks", 0, 16, "stages per pipeline rank", "default"),
    number("dp_size", "dp", 1, RANKS, "data-parallel ranks: each trains on other sequences"),
    choice("dp_engine", "dp engine", ["bucket", "zero1", "zero3"], "zero1 shards the optimizer state over dp and cp ranks, zero3 also weights and gradients"),
  ],
  Batch: [
    number("seq_length", "Sequence length", 1, 2 ** 24, "tokens per sequence"),
    number("micro_batch_size", "Sequences", 1, 4096, "sequences per micro-batch"),
    number("gradient_accumulation_steps", "Micro-batches", 1, 512, "micro-batches per step and data-parallel rank"),
    choice("activation_checkpointing", "Recompute", ["none", "selective", "full"], "activations that backward computes again instead of keeping them: none, those of norms and SwiGLU, or all of a layer"),
    choice("dtype", "dtype", ["bfloat16", "float32", "float64"], "numbers of weights and activations; gradients are in float32 or wider"),
    choice("optimizer_states", "Optimizer states", ["float32", "bfloat16_moments", "bfloat16"], "master weights and moments of a bfloat16 model: in float32; moments in bfloat16; or no master weights, too"),
    number("gpu_memory", "GPU memory", 1, 4096, "memory of a GPU in GiB: ranks that need more are marked"),
  ],
  Model: [
    number("num_hidden_layers", "Layers", 1, 1024, "decoder layers"),
    number("hidden_size", "Hidden size", 1, 2 ** 17, "size D of the hidden states"),
    number("intermediate_size", "MLP size", 1, 2 ** 19, "size F inside the MLP"),
    number("num_attention_heads", "Heads", 1, 1024, "query heads"),
    number("num_key_value_heads", "KV heads", 1, 1024, "key/value heads"),
    number("head_dim", "Head size", 0, 4096, "size of a head; by default hidden size / heads", "default"),
    number("vocab_size", "Vocabulary", 1, 2 ** 22, "number of tokens in the vocabulary"),
    flag("tie_word_embeddings", "Tied", "the embedding and the head share a matrix"),
  ],
});

// Say why a text is no value of a setting; empty if it is one.
export function problem({ kind, min, max, step, zero, choices }, text) {
  if (kind === "choice") return choices.includes(text) ? "" : `${text} is none of ${choices.join(", ")}`;
  if (kind === "flag") return ["true", "false"].includes(text) ? "" : `${text} is neither true nor false`;
  if (kind === "text" || (zero && text === "")) return "";
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value)) return `enter a number from ${min} to ${max}`;
  if (value < min || value > max) return `${text} is not between ${min} and ${max}`;
  return step === 1 && !Number.isInteger(value) ? `${text} is not a whole number` : "";
}

// Return the value of a setting that a text without a problem stands for.
export function read({ kind }, text) {
  return kind === "flag" ? text === "true" : kind === "slider" || kind === "number" ? Number(text) : text;
}
