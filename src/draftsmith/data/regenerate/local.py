"""Answers by a Hugging Face model in this process, many prompts to a batch."""

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig

from draftsmith.data.conversations import Prompt
from draftsmith.data.regenerate.tasks import Answer, Context, Failed, Outcome, Sampling, Task, dialogue, failed
from draftsmith.data.template import Renderer
from draftsmith.errors import InputError
from draftsmith.target.load import TargetSpec, compute_dtype

T = TypeVar("T")

BATCHES_AT_ONCE = 8  # tasks of so many batches are sorted by length together


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


@dataclass(eq=False, slots=True)
class _Open:
    """A task under way: what is asked next, and the prompt's ids."""

    task: Task
    turns: Generator[Context, Answer, Outcome]
    context: Context
    ids: list[int]


class LocalAnswers:
    """Answers tasks with one model on one device. Used by one thread.

    Tasks are taken in consecutive windows, so what shares a batch depends on the input alone; prompts of a batch are
    padded on the left, as the model's own `generate` wants them.
    """

    def __init__(
        self,
        spec: TargetSpec,
        renderer: Renderer,
        device: torch.device,
        sampling: Sampling,
        batch_size: int,
        stop: threading.Event,
    ) -> None:
        """
        Raises:
            InputError: the model cannot be loaded.
        """
        self.renderer, self.sampling, self._batch_size, self._stop = renderer, sampling, batch_size, stop
        self.model = spec.model_with_adapter(compute_dtype(device)).to(device).eval()
        config = self.model.config.get_text_config(decoder=True)
        self._positions = getattr(config, "max_position_embeddings", None) or 2**31
        own = self.model.generation_config.eos_token_id
        stops = own if isinstance(own, list) else [own]
        self.stop_ids = sorted({i for i in stops if i is not None} | renderer.stop_ids)

    def outcomes(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes, window by window. A stop request ends after the batch under way."""
        for window in _batched(tasks, BATCHES_AT_ONCE * self._batch_size):
            waiting: list[_Open] = []
            for task in window:
                turns = dialogue(task, self.sampling)
                yield from self._advance(task, turns, None, waiting)
            while waiting:  # one round: every open task gets its next answer
                asked, waiting = sorted(waiting, key=lambda o: (len(o.ids), o.task.number)), []
                for batch in _batched(asked, self._batch_size):
                    if self._stop.is_set():
                        return
                    for one, answer in zip(batch, self._answers(batch), strict=True):
                        yield from self._advance(one.task, one.turns, answer, waiting)

    def close(self) -> None:
        """Nothing is open."""

    def _advance(
        self, task: Task, turns: Generator[Context, Answer, Outcome], answer: Answer | None, waiting: list[_Open]
    ) -> Iterator[Outcome]:
        """Hands a task its answer (None: it begins) and puts it back to wait for the next, or yields its outcome."""
        try:
            context = next(turns) if answer is None else turns.send(answer)
            waiting.append(_Open(task, turns, context, self._ids(context)))
        except StopIteration as ended:
            yield ended.value
        except Failed as error:
            yield failed(task, str(error))

    def _ids(self, context: Context) -> list[int]:
        task = context.task
        prompt = Prompt(context.messages, task.prompt, None, f"{task.file}:{task.line}", task.tools)
        try:
            ids = self.renderer.prompt_ids(prompt)
        except InputError as error:
            raise Failed(str(error)) from None
        if len(ids) >= self._positions:
            raise Failed(
                f"{context.name}: its prompt has {len(ids)} tokens, the model's positions end at {self._positions}"
            )
        return ids

    def _answers(self, batch: Sequence[_Open]) -> list[Answer]:
        """An answer for every prompt of a batch."""
        longest, device = max(len(one.ids) for one in batch), self.model.device
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(batch):
            ids[row, longest - len(one.ids) :] = torch.tensor(one.ids)
            mask[row, longest - len(one.ids) :] = 1
        seed = self.sampling.seed_of(batch[0].task.number, batch[0].context.turn)
        if seed is not None:
            torch.manual_seed(seed)
        with torch.inference_mode():
            out = self.model.generate(
                ids.to(device), attention_mask=mask.to(device), generation_config=self._how(self._positions - longest)
            )
        return [self._answer(tokens) for tokens in out[:, longest:].tolist()]

    def _how(self, room: int) -> GenerationConfig:
        sampling = self.sampling
        drawn: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            drawn |= {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0, "top_k": sampling.top_k or 0}
        limit = min(sampling.max_new_tokens, room)
        return GenerationConfig(max_new_tokens=limit, eos_token_id=self.stop_ids or None, pad_token_id=0, **drawn)

    def _answer(self, tokens: list[int]) -> Answer:
        """What was generated, up to the token that ends the turn; without one it was cut."""
        end = next((place for place, token in enumerate(tokens) if token in self.stop_ids), None)
        said = tokens if end is None else tokens[:end]
        content = self.renderer.tokenizer.decode(said, skip_special_tokens=False)
        return Answer(content, "length" if end is None else "stop", len(said) + (end is not None))
