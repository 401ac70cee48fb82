"""Problems with worked answers for the embedded target, from reasoning-gym's procedural generators.

Most problems are word problems (`gsm_symbolic`, which brings its own worked answers); the rest are short arithmetic
tasks whose worked answers are composed here. Every answer ends with a line `#### <result>`.
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.arithmetic.leg_counting import ANIMALS

DEFAULT_BUILD = Path(".cache/embedded_target")
# reasoning-gym seeds item i with seed + i, so the two ranges never meet.
TRAIN_SEED = 1
HELD_OUT_SEED = 1_000_000_000
TRAIN_COUNT = 60_000
PROMPT_COUNT = 96

_GSM_SUFFIX = " Give the result as your final answer. Do not include units."
_LONG_DECIMAL = re.compile(r"\.\d{4}")


@dataclass(frozen=True)
class Problem:
    """One question and its worked answer."""

    task: str
    question: str
    answer: str

    @property
    def user_turn(self) -> dict[str, str]:
        """The question as a chat message."""
        return {"role": "user", "content": self.question}

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation: question, then worked answer."""
        return [self.user_turn, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True)
class Task:
    """One reasoning-gym task: its share of each block of problems, its settings, and how to word an item."""

    per_block: int
    settings: dict[str, Any]
    word: Callable[[dict[str, Any]], tuple[str, str]]


def final_result(answer: str) -> str | None:
    """The text after the last `####` of an answer, or None where there is none."""
    _, mark, result = answer.rpartition("#### ")
    return result.strip() if mark else None


def _gsm(item: dict[str, Any]) -> tuple[str, str]:
    answer = item["metadata"]["answer_cot"].strip().replace("•", "-")
    answer = re.sub(r"[ \t]+$", "", answer, flags=re.MULTILINE)
    answer = re.sub(r"(\d)\.0\b", r"\1", answer)
    return item["question"].removesuffix(_GSM_SUFFIX), answer


def _legs(item: dict[str, Any]) -> tuple[str, str]:
    question = "How many legs" + item["question"].strip().partition("how many legs are there in total")[2]
    lines, total = [], 0
    for animal, count in item["metadata"]["animals"].items():
        legs = count * ANIMALS[animal]
        line = f"{animal}: {count} * {ANIMALS[animal]} = {legs}"
        lines.append(line if not lines else f"{line}, {total} + {legs} = {total + legs}")
        total += legs
    return question.replace("How many legs if", "How many legs are there if"), "\n".join([*lines, f"#### {total}"])


def _euclid(a: int, b: int) -> tuple[list[str], int]:
    lines = []
    while b:
        lines.append(f"{a} mod {b} = {a % b}")
        a, b = b, a % b
    return lines, a


def _gcd(item: dict[str, Any]) -> tuple[str, str]:
    numbers = item["metadata"]["numbers"]
    lines, result = _euclid(max(numbers), min(numbers))
    question = item["question"].removesuffix(" Give only the GCD as your final answer.")
    return question, "\n".join([*lines, f"#### {result}"])


def _lcm(item: dict[str, Any]) -> tuple[str, str]:
    a, b = item["metadata"]["numbers"]
    lines, common = _euclid(max(a, b), min(a, b))
    lines += [f"The GCD is {common}.", f"{a} / {common} = {a // common}", f"{a // common} * {b} = {a // common * b}"]
    return item["question"], "\n".join([*lines, f"#### {a // common * b}"])


def _sum(item: dict[str, Any]) -> tuple[str, str]:
    first, *rest = item["metadata"]["expression"].split()
    lines, total = [], int(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {after}")
        total = after
    question = item["question"].replace("State the final answer to the following arithmetic problem:", "Calculate")
    return question.removesuffix(" =") + ".", "\n".join([*lines, f"#### {total}"])


TASKS = {
    "gsm_symbolic": Task(17, {}, _gsm),
    "leg_counting": Task(2, {"min_animals": 2, "max_animals": 5}, _legs),
    "gcd": Task(2, {"min_value": 10, "max_value": 500}, _gcd),
    "chain_sum": Task(2, {"min_terms": 3, "max_terms": 6, "min_digits": 1, "max_digits": 3}, _sum),
    "lcm": Task(1, {"min_value": 4, "max_value": 200}, _lcm),
}


def _worded(name: str, seed: int, size: int) -> Iterator[Problem]:
    """Problems of one task, `size` and some to spare, without answers that run into decimals such as 32.9166667."""
    task = TASKS[name]
    for item in reasoning_gym.create_dataset(name, seed=seed, size=size + size // 2, **task.settings):
        question, answer = task.word(item)
        if not _LONG_DECIMAL.search(answer):
            yield Problem(name, question, answer)


def _stream(seed: int, count: int) -> Iterator[Problem]:
    """`count` problems; every block of 24 holds the same task mix in its own order."""
    block = [name for name, task in TASKS.items() for _ in range(task.per_block)]
    sizes = {name: (count // len(block) + 1) * task.per_block for name, task in TASKS.items()}
    worded = {name: _worded(name, seed, sizes[name]) for name in TASKS}
    rng = random.Random(seed)
    for place in range(count):
        if place % len(block) == 0:
            rng.shuffle(block)
        yield next(worded[block[place % len(block)]])


def train_problems(count: int = TRAIN_COUNT) -> list[Problem]:
    """The first `count` training problems."""
    return list(_stream(TRAIN_SEED, count))


def held_out_problems(count: int, train: list[Problem]) -> list[Problem]:
    """The first `count` held-out problems whose question is new: neither in `train` nor among the earlier ones.

    A dropped question is replaced by the next one of the same task, so the task mix stays that of training.
    """
    seen = {problem.question for problem in train}
    spare: dict[str, list[Problem]] = {name: [] for name in TASKS}
    kept_tasks = []
    for place, problem in enumerate(_stream(HELD_OUT_SEED, 3 * count + 240)):
        if place < count:
            kept_tasks.append(problem.task)
        if problem.question not in seen:
            seen.add(problem.question)
            spare[problem.task].append(problem)
    queues = {name: iter(problems) for name, problems in spare.items()}
    return [next(queues[task]) for task in kept_tasks]


def write_prompts(path: Path, problems: list[Problem]) -> None:
    """One `{"messages": [user turn], "reference": worked answer}` per line."""
    lines = [
        json.dumps({"messages": [problem.user_turn], "reference": problem.answer}, ensure_ascii=False)
        for problem in problems
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Write the held-out prompts."""
    parser = argparse.ArgumentParser(description="Write prompts.jsonl: held-out prompts with reference answers.")
    parser.add_argument("--build", type=Path, default=DEFAULT_BUILD, help="build folder (default: %(default)s)")
    args = parser.parse_args()
    args.build.mkdir(parents=True, exist_ok=True)
    write_prompts(args.build / "prompts.jsonl", held_out_problems(PROMPT_COUNT, train_problems()))


if __name__ == "__main__":
    main()
