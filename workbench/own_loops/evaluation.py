"""The loss of a model on a text:  python train.py --config FILE --checkpoint.load_path DIR --evaluate TEXT"""

from typing import Any

import torch
import torch.distributed as dist

from picotron.config import Config
from picotron.console import UserError
from picotron.data.loader import MicroBatchDataLoader
from workbench.console import print_line
from workbench.files import naming_deleted
from workbench.pipelines.engine import check_run, make_evaluation
from workbench.prepare.tokens import prepare
from workbench.run.checkpoint.checkpoint import find_checkpoint
from workbench.run.launch import connect
from workbench.run.metrics import evaluation_record
from workbench.run.rows import targets_and_bytes
from workbench.run.token_files import for_data, load_data
from workbench.variants.choose import build_model
from workbench.variants.whole import whole_rows


def evaluate(config: Config, name: str) -> None:
    """Print the loss of the config's model on all tokens of a data set, in nats per token and in bits per byte. Each
    row of `seq_length` tokens begins without context. Every rank must call this.

    Args:
        name: data set of any kind that `dataset.name` may have.

    Raises:
        UserError: the config names no weights.
    """
    model_config, plan = check_run(config)
    device, dtype = connect(config, model_config, plan.identity), getattr(torch, config.model.dtype)
    checkpoint = find_checkpoint(config, model_config)
    if checkpoint is None:
        raise UserError("--evaluate needs a model: set checkpoint.load_path, or model.pretrained to true")
    with naming_deleted(checkpoint.folder):
        tokenizer = str(checkpoint.tokenizer) if checkpoint.tokenizer else config.model.tokenizer
        config = for_data(config, name, tokenizer)
        data, _, folder = load_data(config, model_config, checkpoint.tokenizer, prepare)
        rows = whole_rows(data, config, name)
        batches = len(rows) // config.global_batch_size
        loader = MicroBatchDataLoader(rows, config, device, shuffle=False, batches=batches)
        frozen: Any = lambda name: True  # noqa: E731 -- so that no parameter has a gradient
        model = build_model(config, model_config, plan.wrap, device, dtype, checkpoint.weights(), frozen)
    targets, size = targets_and_bytes(rows, folder)
    record = evaluation_record(make_evaluation(config, plan, device)(model, loader), targets, size)
    if dist.get_rank() == 0:
        bits = "" if record["bits_per_byte"] is None else f" | {record['bits_per_byte']:.4f} bits per byte"
        print_line(f"{name}: {targets:,} tokens | loss {record['eval_loss']:.4f}{bits}")
    dist.destroy_process_group()
