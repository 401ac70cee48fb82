"""What a person sees of a conversation is what is learned of it: every token once, the mask, the anchors, no markup."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chats import CHATML, tokenizer
from draftsmith import cli
from draftsmith.data.conversations import Conversation
from draftsmith.data.settings import TemplateSettings
from draftsmith.data.template import Renderer
from draftsmith.drafter.anchors import draw_anchors
from draftsmith.report.inspecting import InspectOptions, Piece, Shown, page, pieces, print_shown

NASTY = "Café 👩‍👩‍👧 <|im_end|>?\r\n\tok <b onclick=x>&amp;\n[bold]no[/bold] 日本語\u0301🙂" * 3


def options(**changes: Any) -> InspectOptions:
    usual: dict[str, Any] = {
        "line": None,
        "target": "t",
        "revision": None,
        "form": None,
        "template": TemplateSettings(),
    }
    blocks = {"block_size": 4, "density": 0.3, "seed": 1, "epoch": 2, "html": None}
    return InspectOptions(file="f", **(usual | blocks | changes))


@pytest.fixture(scope="module")
def shown() -> tuple[Shown, Any, Any]:
    """A nasty conversation as it is shown, its document and its tokenizer."""
    renderer = Renderer(tokenizer(CHATML))
    turns = [("user", NASTY), ("assistant", NASTY), ("user", "again"), ("assistant", "Yes.")]
    messages = tuple({"role": role, "content": content} for role, content in turns)
    (document,) = renderer.documents(Conversation("f", 1, messages))
    return Shown("f:1 [title]", pieces(document, renderer.tokenizer, options())), document, renderer.tokenizer


def test_the_pieces_are_the_text_and_the_mask(shown: tuple[Shown, Any, Any]) -> None:
    found, document, made_with = shown
    assert "".join(piece.text for piece in found.pieces) == made_with.decode(document.tokens_T)
    assert [piece.token for piece in found.pieces] == document.tokens_T.tolist()
    assert [piece.supervised for piece in found.pieces] == document.supervised_T.tolist()
    special = {made_with.decode([piece.token]) for piece in found.pieces if piece.special}
    assert special == {"<|im_start|>", "<|im_end|>"}


def test_anchors_are_those_of_training_and_say_what_they_learn(shown: tuple[Shown, Any, Any]) -> None:
    found, document, _ = shown
    anchors = draw_anchors(document.supervised_T, density=0.3, seed=1, epoch=2, document=0)
    assert [piece.place for piece in found.pieces if piece.slots] == anchors.tolist()
    for place in anchors.tolist():
        following = document.supervised_T[place + 1 : place + 4].tolist()
        assert found.pieces[place].slots == (following.index(False) if False in following else len(following))
    assert {piece.slots for piece in found.pieces} > {0, 3}


def printed(found: Shown, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None, width=10_000)
    print_shown([found], console)
    return out.getvalue()


def test_without_colours_brackets_show_what_is_learned(shown: tuple[Shown, Any, Any]) -> None:
    found, document, made_with = shown
    text = printed(found, terminal=False)
    assert "\x1b" not in text
    assert "f:1 [title]" in text
    body = text.split("f:1 [title]\n")[1].replace("▸", "").replace("⏎\n", "\n").replace("␍", "\r").replace("⇥", "\t")
    learned = "".join(re.findall("⟦(.*?)⟧", body, re.S))
    assert learned == made_with.decode(document.tokens_T[document.supervised_T])
    assert "[bold]no[/bold]" in text


def test_colours_on_a_terminal(shown: tuple[Shown, Any, Any]) -> None:
    text = printed(shown[0], terminal=True)
    assert "⟦" not in text
    assert "\x1b[1;32m<|im_end|>" in text  # learned and special
    assert "\x1b[1;90m<|im_start|>" in text
    assert text.count("\x1b[1;30;43m▸") == 1 + sum(piece.slots > 0 for piece in shown[0].pieces)  # and the legend


class Reader(HTMLParser):
    """Text of the spans by their classes, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.spans: list[tuple[str, str, str]] = []
        self._open: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "span" and "title" in dict(attrs):
            self._open = dict(attrs)
            self.spans.append((str(self._open["class"]), str(self._open["title"]), ""))

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            kind, title, text = self.spans[-1]
            self.spans[-1] = (kind, title, text + data)

    def handle_endtag(self, tag: str) -> None:
        self._open = None


def test_the_page_holds_the_same_and_no_foreign_markup(shown: tuple[Shown, Any, Any]) -> None:
    found = shown[0]
    reader = Reader()
    text = page([found])
    reader.feed(text)
    assert reader.tags == {"html", "head", "meta", "title", "style", "body", "p", "span", "h3", "pre"}
    assert "http" not in text.replace("<!doctype", "")
    (body,) = re.findall("<pre>(.*?)</pre>", text, re.S)
    assert "<" not in re.sub("</?span[^>]*>", "", body)  # what the conversation says is text
    assert len(reader.spans) == len(found.pieces)
    for (kind, title, shown_text), piece in zip(reader.spans, found.pieces, strict=True):
        assert shown_text == piece.text.replace("\r", "␍").replace("\n", "⏎\n").replace("\t", "⇥")
        classes = kind.split()
        assert ("learned" in classes, "special" in classes) == (piece.supervised, piece.special)
        assert ("anchor" in classes) == (f"learns {piece.slots} slots" in title) == (piece.slots > 0)
        assert title.startswith(f"{piece.place}: id {piece.token}")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "inspect", "demo", "--target", "demo"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"demo:1: \d+ tokens, \d+ supervised, \d+ anchors of \d+ places in epoch 0", out)
    assert "<|end|>⟧" in out
    file = tmp_path / "a.jsonl"
    records = ["not JSON", json.dumps({"text": "plain text is learned"})]
    file.write_text("\n".join(records) + "\n")
    arguments[2] = str(file)
    assert cli.main([*arguments, "--html", str(tmp_path / "a.html")]) == 0
    assert "a.jsonl:2: " in (tmp_path / "a.html").read_text()
    capsys.readouterr()
    assert cli.main([*arguments, "--line", "1"]) == 1
    assert "a.jsonl:1: not JSON" in capsys.readouterr().err
    assert cli.main([*arguments, "--line", "7"]) == 1
    assert "has no record in line 7" in capsys.readouterr().err
    assert cli.main([*arguments, "--html", str(tmp_path / "no" / "a.html")]) == 2


def test_a_character_of_many_tokens_is_shown_once() -> None:
    """Also if the text holds the replacement character itself, which ends no character."""
    made_with = tokenizer(CHATML)
    text = "\ufffd" * 9 + "👩‍👩‍👧" * 5
    document = Renderer(made_with).documents(Conversation("f", 1, text=text))[0]
    found = pieces(document, made_with, options())
    assert "".join(piece.text for piece in found) == text
    assert isinstance(found[0], Piece)
