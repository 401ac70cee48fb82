"""Files -> documents to learn from, prompts held out, and rejects with reasons. The three add up to the input."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from draftsmith.data.conversations import Conversation, Prompt, Reject, as_prompt, hold_out, read_conversations
from draftsmith.data.template import Document, Renderer, Unusable
from draftsmith.drafter.anchors import eligible_anchors
from draftsmith.errors import NothingToTrainOnError

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
        assert len(self.documents) + self.held_out_lines + len(self.rejects) == self.read
        tokens = sum(len(d.tokens_T) for d in self.documents)
        supervised = sum(int(d.supervised_T.sum()) for d in self.documents)
        return (
            f"{self.read} conversations = {len(self.documents)} to train on + {self.held_out_lines} held out + "
            f"{len(self.rejects)} rejected; {tokens} tokens, {supervised / max(1, tokens):.0%} supervised, "
            f"{self.truncated} cut at the row length" + (f"; first reject {self.rejects[0]}" if self.rejects else "")
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
        InputError: a file cannot be read.
        NothingToTrainOnError: nothing is left to train on.
    """
    read, rejects = 0, []
    usable: list[tuple[Conversation, Document]] = []
    for item in read_conversations(files):
        read += 1
        outcome = item if isinstance(item, Reject) else _document(item, renderer, mask_token, row_tokens)
        if isinstance(item, Conversation) and isinstance(outcome, Document):
            usable.append((item, outcome))
        elif isinstance(outcome, Reject):
            rejects.append(outcome)
    held = hold_out((c for c, _ in usable), HELD_OUT_SHARE, MAX_HELD_OUT) if hold_out_prompts else frozenset()
    prompts: dict[str, Prompt | None] = {}
    documents, truncated = [], 0
    for conversation, document in usable:
        if conversation.content_hash in held:
            prompts[conversation.content_hash] = as_prompt(conversation)
        else:
            truncated += len(document.tokens_T) > row_tokens
            documents.append(Document(document.tokens_T[:row_tokens], document.supervised_T[:row_tokens]))
    held_lines = len(usable) - len(documents)
    if not documents:
        first = rejects[0] if rejects else "none was rejected"
        raise NothingToTrainOnError(
            f"data.train: {', '.join(files)} leaves nothing to train on: {read} lines read, {len(rejects)} rejected, "
            f"{held_lines} held out; first reason: {first}",
            [reject.to_json() for reject in rejects],
        )
    held_out = tuple(prompt for prompt in prompts.values() if prompt is not None)
    return Corpus(tuple(documents), held_out, tuple(rejects), read, held_lines, truncated)


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
