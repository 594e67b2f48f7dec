"""Solutions to the exercises of docs/when_an_axis_pays.md."""

H100, NVLINK, NETWORK = 989e12, 450e9, 50e9  # FLOP/s, bytes/s


def tokens_that_hide_dp(products: float, bandwidth: float, gradient_bytes: int = 4) -> float:
    """Return the tokens of a micro-batch on a rank whose backward takes as long as the all-reduce of all gradients."""
    return 2 * gradient_bytes / 4 * products / bandwidth


def largest_tp(F: int, products: float, bandwidth: float) -> int:
    """Return the largest power of two by which an MLP can be split and still compute longer than it sends."""
    tp = 1
    while F / (2 * tp) >= 2 / 3 * products / bandwidth:
        tp *= 2
    return tp


def exposed_dp(tokens_of_micro_batch: int, micro_batches: int, products: float, bandwidth: float) -> float:
    """Return the time of the all-reduce of a step relative to its computation, if nothing hides the messages."""
    return 4 / 3 * products / bandwidth / (tokens_of_micro_batch * micro_batches)


def largest_dp(tokens_per_step: int, tokens_of_micro_batch: int) -> int:
    """Return the number of replicas that each get one micro-batch of a step."""
    return tokens_per_step // tokens_of_micro_batch


if __name__ == "__main__":
    print(f"1. {tokens_that_hide_dp(H100, NVLINK, gradient_bytes=2):,.0f} tokens")
    print(
        f"2. tp {largest_tp(28672, H100, NVLINK)} on an H100, tp {largest_tp(28672, 2 * H100, NVLINK)} on the other GPU"
    )
    replicas = largest_dp(16_000_000, 8192)
    hidden = tokens_that_hide_dp(H100, NETWORK)
    shares = (exposed_dp(8192, m, H100, NETWORK) for m in (1, 16))
    print(f"3. {replicas:,} replicas, {8 * replicas:,} GPUs; {hidden:,.0f} tokens would hide the gradients")
    print("   {:.0%} of the computation, with 16 micro-batches {:.0%}".format(*shares))
