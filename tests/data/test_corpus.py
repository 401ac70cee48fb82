"""Nothing vanishes: every line is trained on, held out or rejected, and the three add up."""

import json
from pathlib import Path
from typing import Any

import pytest

from chats import CHATML, NO_TOOLS, chat, tokenizer
from draftsmith.data.corpus import Corpus, build_corpus
from draftsmith.data.template import Renderer
from draftsmith.errors import InputError

MASK = 264


@pytest.fixture
def renderer() -> Renderer:
    made = Renderer(tokenizer(NO_TOOLS))
    assert made.tokenizer.convert_tokens_to_ids("<|reserved_special_token_0|>") == MASK
    return made


def corpus(tmp_path: Path, renderer: Renderer, lines: list[Any], row_tokens: int = 10_000, held: bool = True) -> Corpus:
    path = tmp_path / "a.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return build_corpus([str(path)], renderer, mask_token=MASK, row_tokens=row_tokens, hold_out_prompts=held)


def ask(*turns: str) -> dict[str, Any]:
    return {"messages": chat(*turns)}


def texts(made: Corpus, renderer: Renderer) -> list[str]:
    return [renderer.tokenizer.decode(d.tokens_T.tolist()) for d in made.documents]


def test_three_counts_add_up_and_every_reject_says_why(tmp_path: Path, renderer: Renderer) -> None:
    bad = {
        "{broken": "not JSON",
        json.dumps(ask("u:only a question")): "no assistant turn",
        json.dumps(ask("u:x", "a:call", "t:r", "a:y")): "the chat template refuses it: no tools here",
        json.dumps(ask("u:<|reserved_special_token_0|>", "a:y")): f"contains the mask token (id {MASK})",
        json.dumps(ask("u:x", "a:")): "no two neighbouring supervised tokens",
        json.dumps({"text": "a"}): "no two neighbouring supervised tokens",
    }
    good = [ask(f"u:question {i}", "a:answer") for i in range(40)]
    made = corpus(tmp_path, renderer, [*bad, "", *good, {"text": "plain words"}])
    assert (made.read, len(made.documents), made.held_out_lines, len(made.rejects)) == (47, 39, 2, 6)
    assert [(r.line, reason in r.reason) for r, reason in zip(made.rejects, bad.values(), strict=True)] == [
        (i, True) for i in range(1, 7)
    ]
    assert made.summary.startswith("47 conversations = 39 to train on + 2 held out + 6 rejected")


def test_held_out_chats_are_not_trained_on_and_their_copies_neither(tmp_path: Path, renderer: Renderer) -> None:
    good = [ask(f"u:question {i}", "a:answer") for i in range(40)]
    made = corpus(tmp_path, renderer, good * 3)
    trained = texts(made, renderer)
    assert len(made.held_out) == 6
    assert made.held_out_lines == 18
    assert len(trained) + made.held_out_lines == made.read == 120
    for prompt in made.held_out:
        assert not any(prompt.messages[0]["content"] + "<" in text for text in trained)
    assert len(corpus(tmp_path, renderer, good, held=False).documents) == 40


def test_what_cannot_be_rendered_is_never_held_out(tmp_path: Path, renderer: Renderer) -> None:
    """A chat that the template refuses must not come back as an evaluation prompt and stop the run."""
    bad = [ask(f"u:{i}", "a:call", "t:r", "a:y") for i in range(200)]
    made = corpus(tmp_path, renderer, bad + [ask(f"u:question {i}", "a:answer") for i in range(20)])
    assert (len(made.rejects), len(made.held_out), len(made.documents)) == (200, 1, 19)
    assert all(renderer.prompt_ids(prompt) for prompt in made.held_out)


def test_half_a_turn_is_kept_without_an_end_of_turn(tmp_path: Path, renderer: Renderer) -> None:
    """A long answer is learned up to the cut; the cut itself is no end."""
    long = ask("u:x", "a:" + "word " * 50)
    (whole,) = corpus(tmp_path, renderer, [long]).documents
    made = corpus(tmp_path, renderer, [long], row_tokens=100)
    (cut,) = made.documents
    assert made.truncated == 1
    assert "1 cut at the row length" in made.summary
    assert len(cut.tokens_T) == len(cut.supervised_T) == 100
    assert (cut.tokens_T == whole.tokens_T[:100]).all()
    assert (cut.supervised_T == whole.supervised_T[:100]).all()
    assert not set(cut.tokens_T[cut.supervised_T].tolist()) & renderer.stop_ids
    assert corpus(tmp_path, renderer, [long], row_tokens=len(whole.tokens_T)).truncated == 0


def test_an_answer_wholly_beyond_the_cut_is_a_reject(tmp_path: Path, renderer: Renderer) -> None:
    lines = [ask("u:" + "word " * 50, "a:y"), ask("u:x", "a:yes")]
    made = corpus(tmp_path, renderer, lines, row_tokens=100)
    assert [(r.line, r.reason) for r in made.rejects] == [
        (1, "no two neighbouring supervised tokens before the row length")
    ]


def test_only_questions_with_an_answer_are_held_out(tmp_path: Path, renderer: Renderer) -> None:
    greetings = [ask(f"a:greeting {i}") for i in range(50)]
    monologues = [ask("u:x", "a:y", f"a:more {i}") for i in range(50)]
    texts = [{"text": f"text {i}"} for i in range(50)]
    made = corpus(tmp_path, renderer, greetings + monologues + texts)
    assert (len(made.held_out), len(made.documents)) == (0, 150)


def test_two_supervised_tokens_apart_are_a_reject_not_a_crash(tmp_path: Path) -> None:
    """One-token answers without an end of turn: supervised, but never two in a row."""
    template = "{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" \
               "{% endgeneration %}{% endif %}{% endfor %}"  # fmt: skip
    lines = [ask("u:x", "a:1", "u:y", "a:2"), ask("u:x", "a:12")]
    made = corpus(tmp_path, Renderer(tokenizer(template)), lines)
    assert [(r.line, r.reason) for r in made.rejects] == [(1, "no two neighbouring supervised tokens")]
    assert len(made.documents) == 1


def test_nothing_left_is_an_error_that_shows_the_first_reason(tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(
        InputError, match=r"a\.jsonl leaves nothing .*: 2 records read, 2 rejected, .*a\.jsonl:1: not JS"
    ):
        corpus(tmp_path, renderer, ["{z", "[1]"])
    with pytest.raises(InputError, match=r"0 records read, 0 rejected, 0 held out"):
        corpus(tmp_path, renderer, [])


def test_changing_the_template_changes_the_documents(tmp_path: Path, renderer: Renderer) -> None:
    lines = [ask("u:x", "a:y")]
    other = Renderer(tokenizer(CHATML))
    assert texts(corpus(tmp_path, renderer, lines), renderer) != texts(corpus(tmp_path, other, lines), other)


def test_the_embedded_conversations_are_all_usable() -> None:
    from transformers import AutoTokenizer

    from draftsmith import embedded

    renderer = Renderer(AutoTokenizer.from_pretrained(embedded.TARGET))
    mask = renderer.tokenizer.mask_token_id
    made = build_corpus(["demo"], renderer, mask_token=mask, row_tokens=2048, hold_out_prompts=True)
    assert not made.rejects
    assert made.truncated == 0
    assert len(made.held_out) == 64
