"""A choice made for the user is a value with its reason: printed, saved with the run, and never made twice."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen and why, e.g. `Decision("mask token", "<|mask|>", "the tokenizer's own")`."""

    name: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value} ({self.reason})"
