"""A choice made for the user is a value with its reason: printed, saved with the run, and never made twice."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen and why, e.g. `Decision("mask token", "<|mask|>", "the tokenizer's own")`."""

    name: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value} ({self.reason})"


class Ledger:
    """Keeps decisions in the order they were made. Calling it with one notes it and gives its value."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def __call__(self, decision: Decision) -> Any:
        self.decisions.append(decision)
        return decision.value
