"""Freeing of models. It imports no config, so that worker_pool.py, and with it the puzzles, need torch alone."""

import gc

from picotron.data_parallel.data_parallel import DataParallel


def free_models() -> None:
    """Remove the hooks of all wrappers, and free the models to which no other reference is left."""
    for each in gc.get_objects():
        if issubclass(type(each), DataParallel):
            each.unhook()
    gc.collect()
