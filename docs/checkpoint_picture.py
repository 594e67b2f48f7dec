"""A picture of who writes which bytes of a checkpoint, for which the writing itself is watched:

python -m docs.checkpoint_picture --out docs/pictures/checkpoint_files.svg
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from docs.grid import fake_rank, start_svg
from picotron.config_reader import load_config
from picotron.model import load_model_config
from picotron.pipeline_parallel.draw_svg import COLOURS
from picotron.process_group_manager import new_groups
from picotron.safetensors_folder import Part
from picotron.stage_files import Piece, StageFiles
from train import build_model

PP, TP = 2, 2
WIDTH, BAR, ROW = 960, 30, 92  # pixels


def written_parts(rank: int) -> tuple[list[Piece], list[Part]]:
    """What the model's file of a rank's stage holds, and which parts of it the rank writes."""
    sizes = {"distributed.dp_size": 1, "distributed.pp_size": PP, "distributed.tp_size": TP}
    overrides = [str(word) for key, value in sizes.items() for word in (f"--{key}", value)]
    config = load_config(["--config", "template/base_config.json", *overrides])
    no_state: Any = SimpleNamespace(state_of=lambda parameter: {})  # the optimizer's files are alike
    # Its groups are gloo's whatever the device, but here all groups are fake.
    fake_groups = mock.patch("picotron.stage_files.new_groups", lambda rows, _: new_groups(rows))
    with fake_rank(rank, config), fake_groups, tempfile.TemporaryDirectory() as folder:
        stage = build_model(config, load_model_config(config.model), torch.device("cpu"), torch.float32)
        files = StageFiles(stage.module, no_state)
        pieces = files.pieces()
        (written,) = files.write(Path(folder), pieces)
    return pieces, written.parts


def part_of_model(name: str) -> str:
    """`layer 3` of model.layers.3.mlp.up_proj.weight; the norm before the head is too small to be told."""
    words = name.split(".")
    return f"layer {words[2]}" if words[1] == "layers" else words[1].replace("norm", "")


def checkpoint_files() -> str:
    """The model's files of a run with pp 2 x tp 2, to scale in bytes; a colour for each rank that writes."""
    found = [written_parts(rank) for rank in range(PP * TP)]
    longest = max(part.start + part.size for _, parts in found for part in parts)
    height = PP * ROW
    lines = start_svg(WIDTH, height)
    for rank, (pieces, parts) in enumerate(found):
        stage, colour = rank // TP, list(COLOURS.values())[rank]
        top, scale = stage * ROW + 20, WIDTH / longest
        lines.append(f'<rect x="{260 + 75 * rank % (75 * TP)}" y="{top - 17}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{276 + 75 * rank % (75 * TP)}" y="{top - 7}">rank {rank}</text>')
        for part in parts:
            where = f'x="{part.start * scale:.2f}" y="{top}" width="{part.size * scale:.2f}" height="{BAR}"'
            title = f"rank {rank}: bytes {part.start:,} to {part.start + part.size:,}"
            lines.append(f'<rect {where} fill="{colour}"><title>{title}</title></rect>')
        if rank % TP == 0:
            lines.append(f'<text x="0" y="{top - 7}">{pieces[0].file}</text>')
            for name, held in itertools.groupby(pieces, lambda piece: part_of_model(piece.name)):
                start = next(held).start * scale
                lines.append(f'<text x="{start + 2:.0f}" y="{top + BAR + 15}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the .svg")
    parser.parse_args().out.write_text(checkpoint_files(), encoding="utf-8")
