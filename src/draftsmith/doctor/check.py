"""What a check is, and what it looks at."""

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from draftsmith.compile import guard
from draftsmith.config import Config
from draftsmith.decisions import Ledger
from draftsmith.doctor.code import observe_into
from draftsmith.drafter.config import DrafterConfig
from draftsmith.pipeline.machine import Machine, this_machine
from draftsmith.pipeline.prepare import Outline, choose_shape, outline
from draftsmith.target.load import frozen_weights

TINY_TOKENS = 8
Verdict = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """A suspect and what became of it.

    `ok`: ruled out; the evidence says how. `warn`: a hazard that is there and that the guard, or nothing but care,
    keeps away. `fail`: mend it before you train. `skipped`: not looked at; the evidence says why.
    """

    name: str
    verdict: Verdict
    evidence: str
    remedy: str = "none needed"

    def to_json(self) -> dict[str, str]:
        return asdict(self)


class Subject:
    """What is examined: this process and machine and, if given, a run. What several checks need is read once."""

    def __init__(self, config: Config | None, *, hunt: bool = False, left_on: tuple[str, ...] = ()) -> None:
        """`left_on` is what tracing state was on in this process although nobody traced."""
        self.config, self.hunt, self.left_on = config, hunt, left_on

    @cached_property
    def machine(self) -> Machine:
        return this_machine()

    @cached_property
    def outline(self) -> Outline:
        """Topology, target and taps of the run."""
        assert self.config is not None
        return outline(self.config, self.machine, Ledger())

    @cached_property
    def skeleton(self) -> Any:
        """The target without weights."""
        return self.outline.spec.skeleton()

    @cached_property
    def shape(self) -> DrafterConfig:
        """The drafter's; its mask token is not the run's, nothing here depends on it."""
        assert self.config is not None
        embedding_VH, _ = frozen_weights(self.outline.spec, self.skeleton)
        known = self.outline
        return choose_shape(self.config, known.target_config, known.taps, 0, embedding_VH.shape[0])

    @cached_property
    def called(self) -> tuple[Counter[str], str]:
        """What a forward of the target calls, and in words how that was seen.

        The weights are not read: which code runs does not depend on them, and memory that nobody wrote costs none.
        """
        seen: Counter[str] = Counter()
        spec = self.outline.spec
        try:
            observe_into(seen, lambda: _forward(spec.skeleton().to_empty(device="cpu")))
        except Exception as error:  # noqa: BLE001 - a model may not run like that, for many reasons
            if seen:
                return seen, f"called in a forward that ended with {type(error).__name__}"
            observe_into(seen, lambda: _forward(spec.model_with_adapter(torch.float32)))
        return seen, f"called in a forward of {TINY_TOKENS} tokens"


def _forward(model: Any) -> None:
    with guard.shared(), torch.no_grad():
        model.eval()(input_ids=torch.zeros(1, TINY_TOKENS, dtype=torch.long), use_cache=False)


NEEDS_CONFIG = "needs a CONFIG; give one"
