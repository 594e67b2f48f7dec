"""Freeing of models. This imports no config, because worker_pool.py, which puzzles use, should need torch alone."""

import gc

from picotron.data_parallel.data_parallel import DataParallel


def free_models() -> None:
    """Remove the hooks of all wrappers, and free the models to which no other reference is left."""
    for each in gc.get_objects():
        if issubclass(type(each), DataParallel):
            each.unhook()
    gc.collect()
