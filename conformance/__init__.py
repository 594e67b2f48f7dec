"""A check that a trainer computes, in every layout that it offers, what one process of transformers computes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.case import Case
    from conformance.result import NotOffered, Part, Result

__all__ = ["Case", "NotOffered", "Part", "Result"]
__version__ = "1.0.0"  # that of picotron; results of two versions are comparable if their chapters are the same


def __getattr__(name: str) -> Any:
    """Import what an adapter uses when it does, because worker_pool.py, which puzzles use, should need torch alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from conformance import case, result

    return getattr(case if name == "Case" else result, name)
