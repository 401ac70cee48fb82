"""A conversation that has become documents, with what is needed to hold it out."""

from dataclasses import dataclass

from draftsmith.data.conversations import Conversation, Reject
from draftsmith.data.template import Document, Renderer, Unusable


@dataclass(frozen=True, slots=True)
class Rendered:
    """Documents of one conversation. `chat`: it was messages, not text or tokens."""

    file: str
    line: int
    content_hash: str
    chat: bool
    documents: tuple[Document, ...]

    @property
    def askable(self) -> bool:
        """Whether its last answer can be asked for with the first tokens of its last document."""
        return self.chat and self.documents[-1].prompt_tokens > 0


def render(conversation: Conversation, renderer: Renderer) -> Rendered | Reject:
    """Documents of a conversation, or why there are none."""
    try:
        documents = renderer.documents(conversation)
    except Unusable as error:
        return Reject(conversation.file, conversation.line, str(error))
    chat = bool(conversation.messages)
    return Rendered(conversation.file, conversation.line, conversation.content_hash, chat, documents)
