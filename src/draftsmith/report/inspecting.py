"""`draftsmith data inspect`: one conversation as the drafter meets it, on a terminal or as an HTML page."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from tokenizers.decoders import DecodeStream

from draftsmith.data.conversations import Conversation, read_conversations
from draftsmith.data.settings import TemplateSettings
from draftsmith.data.template import Document, Renderer, Unusable
from draftsmith.drafter.anchors import draw_anchors, eligible_anchors
from draftsmith.errors import ConfigError, InputError
from draftsmith.report.console import console
from draftsmith.target.load import TargetSpec

STYLES = {"context": "bright_black", "learned": "green", "special": "bold", "anchor": "bold black on yellow"}


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """What `data inspect` was asked for. `line` None: the first conversation that can be used."""

    file: str
    line: int | None
    target: str
    revision: str | None
    form: str | None
    template: TemplateSettings
    block_size: int
    density: float
    seed: int
    epoch: int
    html: Path | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A token as it is shown. `text` is empty where it is only a part of a character; `slots` counts what the block of
    an anchor learns, 0 for other tokens."""

    place: int
    token: int
    text: str
    supervised: bool
    special: bool
    slots: int


@dataclass(frozen=True, eq=False, slots=True)
class Shown:
    """A document with its title."""

    title: str
    pieces: tuple[Piece, ...]


def inspect_and_show(options: InspectOptions) -> None:
    """Prints the conversation, or writes the page."""
    shown = inspect(options)
    if options.html is None:
        print_shown(shown, console)
        return
    try:
        options.html.write_text(page(shown), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {options.html} cannot be written: {error.strerror}") from None
    console.print(f"wrote {options.html}", markup=False, highlight=False, soft_wrap=True)


def inspect(options: InspectOptions) -> list[Shown]:
    """The documents that a conversation becomes.

    Raises:
        InputError: it cannot be used; says why.
    """
    renderer = Renderer(TargetSpec(options.target, options.revision).tokenizer(), options.template)
    conversation = _find(options)
    try:
        documents = renderer.documents(conversation)
    except Unusable as error:
        raise InputError(f"{conversation.file}:{conversation.line}: {error}") from None
    found = []
    for number, document in enumerate(documents, 1):
        made = pieces(document, renderer.tokenizer, options)
        anchors = sum(piece.slots > 0 for piece in made)
        part = f", document {number} of {len(documents)}" if len(documents) > 1 else ""
        counts = f"{len(made)} tokens, {int(document.supervised_T.sum())} supervised, {anchors} anchors"
        drawn = f"of {len(eligible_anchors(document.supervised_T))} places in epoch {options.epoch}"
        found.append(Shown(f"{conversation.file}:{conversation.line}{part}: {counts} {drawn}", made))
    return found


def _find(options: InspectOptions) -> Conversation:
    first = None
    for item in read_conversations([options.file], options.form):
        if item.line == options.line or (options.line is None and isinstance(item, Conversation)):
            if isinstance(item, Conversation):
                return item
            raise InputError(str(item))
        first = first or item
    if options.line is None:
        raise InputError(f"{options.file} holds no conversation; first reason: {first or 'it is empty'}")
    raise InputError(f"{options.file} has no record in line {options.line}")


def pieces(document: Document, tokenizer: Any, options: InspectOptions) -> tuple[Piece, ...]:
    """Every token of a document. Anchors are drawn as for the first document of a corpus."""
    tokens, supervised = document.tokens_T.tolist(), document.supervised_T
    drawn: set[int] = set()
    if len(eligible_anchors(supervised)):
        anchors = draw_anchors(supervised, density=options.density, seed=options.seed, epoch=options.epoch, document=0)
        drawn = set(anchors.tolist())
    special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special} | set(tokenizer.all_special_ids)
    return tuple(
        Piece(
            place=place,
            token=tokens[place],
            text=text,
            supervised=bool(supervised[place]),
            special=tokens[place] in special,
            slots=_learned(supervised.tolist(), place, options.block_size) if place in drawn else 0,
        )
        for place, text in enumerate(_texts(tokens, tokenizer))
    )


def _texts(tokens: Sequence[int], tokenizer: Any) -> Iterator[str]:
    """What each token adds to the text: nothing while it is only a part of a character."""
    backend, stream, length = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=False), 0
    for token in tokens[:-1]:
        text = stream.step(backend, token) or ""
        length += len(text)
        yield text
    yield backend.decode(tokens, skip_special_tokens=False)[length:]


def _learned(supervised: Sequence[bool], anchor: int, block_size: int) -> int:
    """Slots behind the anchor that are learned: up to the first unsupervised token or the end."""
    following = supervised[anchor + 1 : anchor + block_size]
    return next((count for count, learned in enumerate(following) if not learned), len(following))


def _kind(piece: Piece) -> str:
    return "learned" if piece.supervised else "context"


def _visible(text: str) -> str:
    """Line breaks and tabs as signs, before the break itself."""
    return text.replace("\r", "␍").replace("\n", "⏎\n").replace("\t", "⇥")


def print_shown(shown: Sequence[Shown], console: Console) -> None:
    """With colours on a terminal; elsewhere what is learned stands in ⟦ ⟧. An anchor follows a ▸ in both."""
    legend = Text("context", STYLES["context"]) + " · " + Text("learned", STYLES["learned"])
    if not console.is_terminal:
        legend = Text("⟦learned⟧")
    console.print(legend + " · " + Text("▸anchor", STYLES["anchor"]) + " · " + Text("<special>", STYLES["special"]))
    for document in shown:
        console.print(Text(document.title, "bold"), soft_wrap=True)
        console.print(_text(document.pieces, brackets=not console.is_terminal), soft_wrap=not console.is_terminal)


def _text(shown: Sequence[Piece], *, brackets: bool) -> Text:
    text = Text()
    for supervised, run in groupby(shown, lambda piece: piece.supervised):
        text.append("⟦" if supervised and brackets else "")
        for piece in run:
            style = STYLES[_kind(piece)] + (f" {STYLES['special']}" if piece.special else "")
            text.append("▸" if piece.slots else "", STYLES["anchor"])
            text.append(_visible(piece.text), STYLES["anchor"] if piece.slots else style)
        text.append("⟧" if supervised and brackets else "")
    return text


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>draftsmith data inspect</title><style>
body { font: 15px/1.6 ui-monospace, monospace; margin: 2em auto; max-width: 70em; padding: 0 1em;
       color-scheme: light dark; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.context { opacity: .6; }
.learned { background: #2a93; }
.special { font-weight: bold; border: 1px solid #8888; border-radius: 3px; }
.anchor { background: #fb08; outline: 1px solid #c80; }
</style></head><body>
<p><span class="context">context</span> · <span class="learned">learned</span> · <span class="learned anchor">anchor of
a block</span> · <span class="special">special token</span>; the pointer shows place and id.</p>
"""


def page(shown: Sequence[Shown]) -> str:
    """A page of its own: no script, nothing loaded from anywhere."""
    parts = [_PAGE]
    for document in shown:
        spans = "".join(map(_span, document.pieces))
        parts.append(f"<h3>{html.escape(document.title)}</h3>\n<pre>{spans}</pre>\n")
    return "".join(parts) + "</body></html>\n"


def _span(piece: Piece) -> str:
    names = [_kind(piece)] + ["special"] * piece.special + ["anchor"] * (piece.slots > 0)
    note = f"{piece.place}: id {piece.token}" + (f", its block learns {piece.slots} slots" if piece.slots else "")
    return f'<span class="{" ".join(names)}" title="{note}">{html.escape(_visible(piece.text))}</span>'
