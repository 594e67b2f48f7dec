"""A check that a trainer computes, in every layout that it offers, what one process of transformers computes."""

from conformance.case import Case
from conformance.result import NotOffered, Part, Result

__all__ = ["Case", "NotOffered", "Part", "Result"]
