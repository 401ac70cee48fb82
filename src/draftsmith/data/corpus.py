"""Files -> documents to learn from, prompts held out, and rejects with reasons. The three add up to the input."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.data.conversations import Conversation, Prompt, Reject, as_prompt, hold_out, read_conversations
from draftsmith.data.template import Document, Renderer, Unusable
from draftsmith.drafter.anchors import eligible_anchors
from draftsmith.errors import InputError

MAX_HELD_OUT, HELD_OUT_SHARE = 64, 0.05


@dataclass(frozen=True, eq=False, slots=True)
class Corpus:
    """What became of every input line. `truncated` counts documents cut at the row length (they are kept)."""

    documents: tuple[Document, ...]
    held_out: tuple[Prompt, ...]
    rejects: tuple[Reject, ...]
    read: int
    held_out_lines: int
    truncated: int

    @property
    def summary(self) -> str:
        """One line for the log; the numbers add up."""
        assert len(self.documents) + self.held_out_lines + len(self.rejects) == self.read
        tokens = sum(len(d.tokens_T) for d in self.documents)
        supervised = sum(int(d.supervised_T.sum()) for d in self.documents)
        return (
            f"{self.read} conversations = {len(self.documents)} to train on + {self.held_out_lines} held out + "
            f"{len(self.rejects)} rejected; {tokens} tokens, {supervised / max(1, tokens):.0%} supervised, "
            f"{self.truncated} cut at the row length"
        )


def build_corpus(
    files: Sequence[str], renderer: Renderer, *, mask_token: int, row_tokens: int, hold_out_prompts: bool
) -> Corpus:
    """Reads, renders and checks every conversation.

    Args:
        files: JSONL files, or `demo`.
        renderer: the target's tokenizer and template.
        mask_token: a conversation that contains it is rejected.
        row_tokens: longer documents are cut there; the cut end is not an end of turn and none is supervised as one.
        hold_out_prompts: split off evaluation prompts, the min(64, 5 %) chats with the smallest content hash.

    Raises:
        InputError: a file cannot be read, or nothing is left to train on.
    """
    items = list(read_conversations(files))
    rejects = [item for item in items if isinstance(item, Reject)]
    conversations = [item for item in items if isinstance(item, Conversation)]
    held: list[Conversation] = []
    if hold_out_prompts:
        chats = sum(bool(c.messages) for c in conversations)
        conversations, held = hold_out(conversations, min(MAX_HELD_OUT, int(chats * HELD_OUT_SHARE)))
    documents, truncated = [], 0
    for conversation in conversations:
        outcome = _document(conversation, renderer, mask_token, row_tokens)
        if isinstance(outcome, Reject):
            rejects.append(outcome)
        else:
            truncated += len(outcome.tokens_T) > row_tokens
            documents.append(Document(outcome.tokens_T[:row_tokens], outcome.supervised_T[:row_tokens]))
    if not documents:
        reasons = {reject.reason for reject in rejects}
        raise InputError(
            f"data.train: {', '.join(files)} leaves nothing to train on: {len(items)} lines read, {len(rejects)} "
            f"rejected, {len(held)} held out; first reason: {next(iter(sorted(reasons)), 'the files are empty')}"
        )
    prompts = {c.content_hash: as_prompt(c) for c in held}
    return Corpus(tuple(documents), tuple(prompts.values()), tuple(rejects), len(items), len(held), truncated)


def _document(conversation: Conversation, renderer: Renderer, mask_token: int, row_tokens: int) -> Document | Reject:
    try:
        document = renderer.document(conversation)
    except Unusable as error:
        return Reject(conversation.file, conversation.line, str(error))
    if (document.tokens_T == mask_token).any():
        return Reject(conversation.file, conversation.line, f"contains the mask token (id {mask_token})")
    if not len(eligible_anchors(document.supervised_T[:row_tokens])):
        cut = " before the row length" if len(document.tokens_T) > row_tokens else ""
        return Reject(conversation.file, conversation.line, f"no two neighbouring supervised tokens{cut}")
    return document
