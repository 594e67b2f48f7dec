"""A check of trainers: any trainer computes what one process of transformers computes, in every layout that it offers."""

from conformance.case import Case
from conformance.result import NotOffered, Part, Result

__all__ = ["Case", "NotOffered", "Part", "Result"]
