"""Files -> documents to learn from, prompts held out, and rejects with reasons. The three add up to the input."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from draftsmith.data.conversations import Conversation, Prompt, Reject, as_prompt, hold_out, read_conversations
from draftsmith.data.hub import is_prepared
from draftsmith.data.rendered import Rendered, render
from draftsmith.data.shards import read_prepared
from draftsmith.data.template import Document, Renderer
from draftsmith.drafter.anchors import eligible_anchors
from draftsmith.errors import NothingToTrainOnError

MAX_HELD_OUT, HELD_OUT_SHARE = 64, 0.05


@dataclass(frozen=True, eq=False, slots=True)
class Corpus:
    """What became of every input conversation. `trained` of them are in `documents`.

    `truncated` counts documents cut at the row length (they are kept), `beyond` those of a kept conversation that are
    left out because no answer begins before the cut.
    """

    documents: tuple[Document, ...]
    held_out: tuple[Prompt, ...]
    rejects: tuple[Reject, ...]
    read: int
    trained: int
    held_out_lines: int
    truncated: int
    beyond: int

    @property
    def fingerprint(self) -> str:
        """Hash of all documents: a run goes on with the data it began with."""
        digest = sha256()
        for document in self.documents:
            digest.update(len(document.tokens_T).to_bytes(8, "little"))
            digest.update(document.tokens_T.tobytes())
            digest.update(document.supervised_T.tobytes())
        return digest.hexdigest()

    @property
    def summary(self) -> str:
        """One line for the log; the numbers add up."""
        assert self.trained + self.held_out_lines + len(self.rejects) == self.read
        tokens = sum(len(d.tokens_T) for d in self.documents)
        supervised = sum(int(d.supervised_T.sum()) for d in self.documents)
        return (
            f"{self.read} conversations = {self.trained} to train on + {self.held_out_lines} held out + "
            f"{len(self.rejects)} rejected; {len(self.documents)} documents, {tokens} tokens, "
            f"{supervised / max(1, tokens):.0%} supervised, {self.truncated} cut at the row length"
            + (f", {self.beyond} left out behind it" if self.beyond else "")
            + (f"; first reject {self.rejects[0]}" if self.rejects else "")
        )


def build_corpus(
    names: Sequence[str],
    renderer: Renderer,
    *,
    mask_token: int,
    row_tokens: int,
    hold_out_prompts: bool,
    form: str | None = None,
) -> Corpus:
    """Reads, renders and checks every conversation.

    Args:
        names: files, folders, hub data sets, folders made by `data prepare`, or `demo`.
        renderer: the target's tokenizer and template.
        mask_token: a conversation that contains it is rejected.
        row_tokens: longer documents are cut there; the cut end is not an end of turn and none is supervised as one.
        hold_out_prompts: split off evaluation prompts, the min(64, 5 %) chats with the smallest content hash.
        form: how records are read, instead of finding out for each file.

    Raises:
        InputError: a file cannot be read, or a folder was prepared with another tokenizer or template.
        NothingToTrainOnError: nothing is left to train on.
    """
    rejects: list[Reject] = []
    usable: list[tuple[Rendered, Prompt | None]] = []
    for item, prompt in _items(names, renderer, form):
        problem = item if isinstance(item, Reject) else _problem(item, mask_token, row_tokens)
        if problem is not None:
            rejects.append(problem)
        elif isinstance(item, Rendered):
            usable.append((item, prompt))
    read = len(rejects) + len(usable)
    chats = [(item.content_hash, item.askable) for item, _ in usable if item.chat]
    held = hold_out(chats, HELD_OUT_SHARE, MAX_HELD_OUT) if hold_out_prompts else frozenset()
    prompts = {item.content_hash: prompt for item, prompt in usable if item.content_hash in held}
    trained = [item for item, _ in usable if item.content_hash not in held]
    whole = [document for item in trained for document in item.documents]
    documents = tuple(cut for document in whole if (cut := _cut(document, row_tokens)) is not None)
    if not documents:
        first = rejects[0] if rejects else "none was rejected"
        raise NothingToTrainOnError(
            f"data.train: {', '.join(names)} leaves nothing to train on: {read} records read, {len(rejects)} rejected, "
            f"{len(usable) - len(trained)} held out; first reason: {first}",
            [reject.to_json() for reject in rejects],
        )
    return Corpus(
        documents=documents,
        held_out=tuple(prompt for prompt in prompts.values() if prompt is not None),
        rejects=tuple(rejects),
        read=read,
        trained=len(trained),
        held_out_lines=len(usable) - len(trained),
        truncated=sum(len(document.tokens_T) > row_tokens for document in whole) - (len(whole) - len(documents)),
        beyond=len(whole) - len(documents),
    )


def _items(
    names: Sequence[str], renderer: Renderer, form: str | None
) -> Iterator[tuple[Rendered | Reject, Prompt | None]]:
    """What becomes of every record, with the prompt that asks for a chat's last answer."""
    for name in names:
        if is_prepared(name):
            for item in read_prepared(Path(name), renderer.key):
                yield item, _prompt_of(item) if isinstance(item, Rendered) and item.askable else None
            continue
        for read in read_conversations([name], form):
            made = render(read, renderer) if isinstance(read, Conversation) else read
            yield made, as_prompt(read) if isinstance(read, Conversation) else None


def _prompt_of(item: Rendered) -> Prompt:
    """The prompt of a prepared conversation: the same ids that rendering it would give."""
    last = item.documents[-1]
    ids = tuple(last.tokens_T[: last.prompt_tokens].tolist())
    return Prompt(ids=ids, source=f"{item.file}:{item.line}")


def _problem(item: Rendered, mask_token: int, row_tokens: int) -> Reject | None:
    if any((document.tokens_T == mask_token).any() for document in item.documents):
        return Reject(item.file, item.line, f"contains the mask token (id {mask_token})")
    if all(_cut(document, row_tokens) is None for document in item.documents):
        cut = " before the row length" if any(len(d.tokens_T) > row_tokens for d in item.documents) else ""
        return Reject(item.file, item.line, f"no two neighbouring supervised tokens{cut}")
    return None


def _cut(document: Document, row_tokens: int) -> Document | None:
    """The document up to the row length; None if nothing can be learned there."""
    supervised_T = document.supervised_T[:row_tokens]
    if not len(eligible_anchors(supervised_T)):
        return None
    return Document(document.tokens_T[:row_tokens], supervised_T, document.prompt_tokens)
