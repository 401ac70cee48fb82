"""A model in this process: a batch answers as one prompt alone does, in context, cut answers are never kept."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import cli
from draftsmith.data.conversations import Conversation, Prompt, read_conversations
from draftsmith.data.regenerate.local import LocalAnswers
from draftsmith.data.regenerate.record import ANSWERS, REJECTS
from draftsmith.data.regenerate.run import Inputs, Regenerated, regenerate
from draftsmith.data.regenerate.tasks import Sampling
from draftsmith.data.template import Renderer
from draftsmith.decode.speculate import plain_generate
from draftsmith.target.load import Target, TargetSpec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def questions() -> list[list[dict[str, str]]]:
    """Chats of one and of two answers, of different lengths."""
    first = [f"What is {a} + {a * 3}?" + " Think." * (a % 3) for a in range(7)]
    chats = [[{"role": "user", "content": text}] for text in first]
    old = {"role": "assistant", "content": "an old answer"}
    return chats + [[*chat, old, {"role": "user", "content": "And twice that?"}] for chat in chats[:3]]


def ask(
    tmp_path: Path, chats: list[Any], sampling: Sampling, name: str = "out", batch_size: int = 4
) -> tuple[Regenerated, list[Any]]:
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    spec, stop = TargetSpec("demo"), threading.Event()
    answers = LocalAnswers(spec, Renderer(spec.tokenizer()), CPU, sampling, batch_size, stop)
    done = regenerate(Inputs([str(file)], None, None), tmp_path / name, {}, answers, stop)
    assert done is not None
    return done, [json.loads(line)["messages"] for line in (tmp_path / name / ANSWERS).read_text().splitlines()]


def test_every_turn_is_what_the_target_says_there(demo_target: Target, questions: list[Any], tmp_path: Path) -> None:
    """Against plain decoding one prompt at a time, along the regenerated conversation."""
    limit = 120
    done, chats = ask(tmp_path, questions, Sampling(limit))
    assert done.success + done.error == done.total == len(questions)
    assert done.success >= 6
    renderer = Renderer(demo_target.tokenizer)
    turns = 0
    for chat in chats:
        for place, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            ids = renderer.prompt_ids(Prompt(tuple(chat[:place])))
            tokens = plain_generate(demo_target, ids, limit).tokens
            assert tokens[-1] in demo_target.stop_ids
            assert demo_target.tokenizer.decode(tokens[:-1]) == message["content"]
            turns += 1
    assert turns > len(chats)  # some have two
    asked = [chat[0]["content"] for chat in questions]
    places = [asked.index(chat[0]["content"], 0) for chat in chats]
    assert places[:6] == sorted(places[:6])


def test_a_cut_answer_is_an_error_not_an_end(questions: list[Any], tmp_path: Path) -> None:
    done, chats = ask(tmp_path, questions, Sampling(3))
    assert (done.success, done.error, chats) == (0, len(questions), [])
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out" / REJECTS).read_text().splitlines()]
    assert set(reasons) == {"answer 1 was cut at 3 tokens; raise --max-new-tokens 3"}


def test_a_prompt_beyond_the_positions_is_an_error(tmp_path: Path, questions: list[Any]) -> None:
    done, _ = ask(tmp_path, [[{"role": "user", "content": "a b c " * 3000}], questions[0]], Sampling(120))
    assert (done.success, done.error) == (1, 1)
    assert "the model's positions end at" in (tmp_path / "out" / REJECTS).read_text()


def test_sampled_answers_follow_the_seed(tmp_path: Path, questions: list[Any]) -> None:
    def sampled(name: str, seed: int) -> list[Any]:
        return ask(tmp_path, questions[:4], Sampling(120, temperature=1.0, seed=seed), name)[1]

    first = sampled("a", 1)
    assert first == sampled("b", 1)
    assert first != sampled("c", 2)
    assert first != ask(tmp_path, questions[:4], Sampling(120), "d")[1]


def test_the_command_answers_the_embedded_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["data", "regenerate", "demo", "--target", "demo", "--limit", "4", "--out", str(out)]
    assert cli.main([*arguments, "--max-new-tokens", "200", "--device", "cpu"]) == 0
    assert "= 4 records" in capsys.readouterr().out.splitlines()[-1]
    assert json.loads((out / "settings.json").read_text())["model"] == "demo"
    found = list(read_conversations([str(out / ANSWERS)]))
    assert found
    assert all(isinstance(c, Conversation) for c in found)
