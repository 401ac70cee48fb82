"""Temperature, top-k and top-p, and how a token is drawn from what they leave."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import ConfigError

LEAST_TEMPERATURE = 1e-6  # logits divided by less may be infinite in fp32


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution to draw from. `temperature` 0 means greedy; `top_k` 0 and `top_p` 1 leave everything in.

    Applied in this order, as transformers does: temperature, the `top_k` most likely, then the smallest set of the
    most likely whose share reaches `top_p`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature and not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise ConfigError(
                f"--temperature is {self.temperature}: give 0 (greedy) or a positive number from {LEAST_TEMPERATURE}"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p}: give a share above 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"--top-k is {self.top_k}: give 0 (no limit) or a positive number")
        if self.greedy and (self.top_p != 1 or self.top_k):
            raise ConfigError("--top-p and --top-k have no effect without --temperature; set it or leave them out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits_TV: Tensor) -> Tensor:
        """The filtered distribution of each row, fp32, zero where a token is left out. Not defined for greedy."""
        probabilities_TV = (logits_TV.float() / self.temperature).softmax(-1)
        if self.top_k or self.top_p < 1:
            size = min(self.top_k or probabilities_TV.shape[-1], probabilities_TV.shape[-1])
            ranked_TK, order_TK = probabilities_TV.topk(size)
            ranked_TK /= ranked_TK.sum(-1, keepdim=True)
            ranked_TK *= ranked_TK.cumsum(-1) - ranked_TK < self.top_p
            ranked_TK /= ranked_TK.sum(-1, keepdim=True)
            probabilities_TV = torch.zeros_like(probabilities_TV).scatter_(-1, order_TK, ranked_TK)
        return probabilities_TV


GREEDY = Sampling()


class Dice:
    """Draws tokens as a `Sampling` says, reproducibly from a seed, without waiting for the device."""

    def __init__(self, sampling: Sampling, seed: int, device: torch.device) -> None:
        self.sampling = sampling
        self._generator = torch.Generator(device).manual_seed(seed)

    def choose(self, logits_TV: Tensor) -> Tensor:
        """A token per row [T]: the most likely one, or one drawn from the filtered distribution."""
        if self.sampling.greedy:
            return logits_TV.argmax(-1)
        return self.draw(self.sampling.probabilities(logits_TV))

    def draw(self, weights_TV: Tensor) -> Tensor:
        """An index per row [T], with probability proportional to its weight.

        The index that wins a race: waiting times are exponential with the weights as rates.
        """
        waits_TV = torch.empty_like(weights_TV).exponential_(generator=self._generator)
        return (weights_TV / waits_TV.clamp_min_(torch.finfo(weights_TV.dtype).tiny)).argmax(-1)

    def uniform(self, like_T: Tensor) -> Tensor:
        """Numbers in [0, 1), one per element."""
        return torch.rand(like_T.shape, generator=self._generator, device=like_T.device)
