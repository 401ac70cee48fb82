"""Evaluation prompts in training data are found, reported with their place, and dropped if asked."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from chats import CHATML, chat, tokenizer
from draftsmith.data.contamination import PromptIndex
from draftsmith.data.conversations import Conversation, Prompt, find_sources
from draftsmith.data.crew import Work
from draftsmith.data.prepare import Prepared, Preparer
from draftsmith.data.template import Renderer

LONG = "Alice has three apples and gives two of them to Bob, who already had five. How many apples does Bob have now?"


def asked(text: str, source: str = "p.jsonl:1") -> Prompt:
    return Prompt(messages=tuple(chat("s:Be exact.", f"u:{text}")), source=source)


def found(prompt: Prompt, *turns: str, **more: Any) -> list[tuple[str, float]]:
    conversation = Conversation("f", 1, tuple(chat(*turns)), **more)
    return [(f.prompt, round(f.overlap, 2)) for f in PromptIndex([prompt]).find(conversation)]


def test_a_prompt_is_found_wherever_it_stands() -> None:
    whole = [("p.jsonl:1", 1.0)]
    assert found(asked(LONG), f"u:{LONG}", "a:7") == whole
    assert found(asked(LONG), "u:Solve:", f"a:The task was: {LONG} It is 7.") == whole
    assert found(asked(LONG), text=f"# Tasks\n{LONG}\n") == whole
    assert found(asked(LONG), text="x", completion=LONG) == whole
    assert found(Prompt(text=LONG, source="p.jsonl:1"), f"u:{LONG}", "a:7") == whole
    assert found(asked(LONG), f"u:{LONG.upper().replace(',', ' --').replace(' ', '  ')}", "a:7") == whole


def test_half_of_the_n_grams_is_enough_and_less_is_not() -> None:
    words = LONG.split()
    assert found(asked(LONG), f"u:{' '.join(words[:18])}", "a:7") == [("p.jsonl:1", 0.6)]
    assert found(asked(LONG), f"u:{' '.join(words[:14])}", "a:7") == []
    assert found(asked(LONG), f"u:{' '.join(words[:12])}", f"a:{' '.join(words[12:])}") == [], (
        "across turns is no n-gram"
    )


def test_short_prompts_count_whole() -> None:
    assert found(asked("What is two plus two?"), "u:Tell me: what is two plus two? Now!", "a:4") == [("p.jsonl:1", 1.0)]
    assert found(asked("What is two plus two?"), "u:What is two plus three?", "a:5") == []
    assert found(asked("Hi there!"), "u:hi there", "a:Hello.") == [("p.jsonl:1", 1.0)]
    assert found(asked("Hi there!"), "u:hi there, friend", "a:Hello.") == []
    assert found(asked("!"), "u:?", "a:!") == [], "no word is no prompt to look for"


def test_only_the_question_is_looked_for() -> None:
    """A system prompt that all conversations share is no contamination."""
    prompt = Prompt(messages=tuple(chat(f"s:{LONG}", "u:What is two plus two?")), source="p.jsonl:1")
    assert found(prompt, f"s:{LONG}", "u:Something else entirely here?", "a:7") == []


@pytest.mark.parametrize("drop", [False, True])
def test_what_is_found_is_reported_and_dropped_if_asked(drop: bool, tmp_path: Path) -> None:
    prompts = [asked(LONG, "p.jsonl:1"), asked("Name the largest planet of them all.", "p.jsonl:2")]
    lines = [chat("u:clean", "a:yes"), chat(f"u:{LONG}", "a:7"), chat("u:clean too", "a:yes"), chat("u:x", f"a:{LONG}")]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in lines))
    work = Work(Renderer(tokenizer(CHATML)), PromptIndex(prompts), drop)
    made = Preparer(find_sources([str(path)]), work, tmp_path / "out", 1).run(threading.Event(), lambda progress: None)
    assert isinstance(made, Prepared)
    assert (made.contaminated, made.prompts_found) == (2, 1)
    assert (made.kept, made.rejected) == ((2, 2) if drop else (4, 0))
    entries = [json.loads(line) for line in (tmp_path / "out" / "contamination.jsonl").read_text().splitlines()]
    assert [(e["file"], e["line"], e["prompt"], e["overlap"], e["dropped"]) for e in entries] == [
        (str(path), 2, "p.jsonl:1", 1.0, drop), (str(path), 4, "p.jsonl:1", 1.0, drop)
    ]  # fmt: skip
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    reason = "contains the evaluation prompt p.jsonl:1 (100% of its n-grams)"
    assert [(r["line"], r["reason"]) for r in rejects] == ([(2, reason), (4, reason)] if drop else [])


def test_the_prompts_are_part_of_what_a_folder_is_made_from() -> None:
    renderer = Renderer(tokenizer(CHATML))
    one, other = PromptIndex([asked("a b c d e f")]), PromptIndex([asked("g")])
    works = [Work(renderer), Work(renderer, one), Work(renderer, one, drop=True), Work(renderer, other)]
    assert len({work.key for work in works}) == 4
