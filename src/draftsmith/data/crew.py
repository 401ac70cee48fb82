"""Worker processes that turn chunks into shards."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, resource_tracker
from pathlib import Path
from typing import Any

from draftsmith.data.contamination import PromptIndex
from draftsmith.data.conversations import Conversation, Reject, chunk_conversations
from draftsmith.data.rendered import Rendered, render
from draftsmith.data.shards import Contained, ShardCounts, write_shard
from draftsmith.data.sources import Chunk
from draftsmith.data.template import Renderer
from draftsmith.errors import InputError

WORTH_OTHERS_BYTES = 8 * 2**20
STOPPING = (signal.SIGINT, signal.SIGTERM)
DIED = (
    "a worker process died (killed, or out of memory); the same command goes on from here, with fewer --processes if "
    "memory is short"
)


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """What is done to every chunk: rendered, and compared with evaluation prompts if there are any."""

    renderer: Renderer
    prompts: PromptIndex | None = None
    drop: bool = False

    @property
    def key(self) -> str:
        """Hash of all that decides what becomes of a record."""
        if self.prompts is None:
            return self.renderer.key
        return f"{self.renderer.key} {self.prompts.key} {self.drop}"

    def make_shard(self, chunk: Chunk, path: Path) -> ShardCounts:
        """One chunk's work."""
        contains: list[Contained] = []
        items = [self._item(item, contains) for item in chunk_conversations(chunk)]
        return write_shard(path, chunk.source.name, items, contains)

    def _item(self, item: Conversation | Reject, contains: list[Contained]) -> Rendered | Reject:
        if isinstance(item, Reject):
            return item
        made = render(item, self.renderer)
        if self.prompts is None or isinstance(made, Reject):
            return made
        found = self.prompts.find(item)
        contains += [Contained(item.line, f.prompt, round(f.overlap, 4), self.drop) for f in found]
        if not (found and self.drop):
            return made
        share = f"{found[0].overlap:.0%} of its n-grams"
        return Reject(item.file, item.line, f"contains the evaluation prompt {found[0].prompt} ({share})")


class Alone:
    """The work done here and now, for small data."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def make(self, number: int, chunk: Chunk, path: Path) -> Iterator[tuple[int, ShardCounts]]:
        """Makes one shard."""
        yield number, self._work.make_shard(chunk, path)

    def finish(self) -> Iterator[tuple[int, ShardCounts]]:
        """Nothing is left to do."""
        return iter(())

    def close(self) -> None:
        """Nothing to end."""


class Crew:
    """Processes of their own, spawned (never forked: threads may be alive), one chunk at a time each.

    Owned by one thread. A worker sees the end of its pipe when its parent ends, however that happens, and ends too.
    Results come in any order.
    """

    def __init__(self, work: Work, processes: int) -> None:
        context = get_context("spawn")
        resource_tracker.ensure_running()  # started by the first worker, it would unblock what `_deaf` blocks
        self._idle: list[Any] = []
        self._busy: dict[Any, int] = {}  # pipe -> number of its chunk
        self._workers: list[Any] = []
        for number in range(processes):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_run, args=(theirs,), name=f"prepare {number}", daemon=True)
            with _deaf():
                worker.start()
            theirs.close()
            self._idle.append(ours)
            self._workers.append(worker)
        try:
            for pipe in self._idle:  # not as an argument: a worker that dies while it starts would block its parent
                _send(pipe, work)
        except InputError:
            self.close()
            raise

    def make(self, number: int, chunk: Chunk, path: Path) -> Iterator[tuple[int, ShardCounts]]:
        """Gives a chunk to an idle worker; waits for one if need be, and yields what has been finished.

        Raises:
            InputError: a worker died.
        """
        if not self._idle:
            yield from self._collect()
        pipe = self._idle.pop()
        self._busy[pipe] = number
        _send(pipe, (chunk, path))

    def finish(self) -> Iterator[tuple[int, ShardCounts]]:
        """Waits for all chunks that are under way."""
        while self._busy:
            yield from self._collect()

    def close(self) -> None:
        """Ends all workers, at once."""
        for pipe in [*self._idle, *self._busy]:
            pipe.close()
        for worker in self._workers:
            worker.kill()
            worker.join()

    def _collect(self) -> Iterator[tuple[int, ShardCounts]]:
        ready: list[Any] = connection.wait(self._busy)
        for pipe in ready:
            try:
                result = pipe.recv()
            except (EOFError, OSError):
                raise InputError(DIED) from None
            if isinstance(result, Exception):
                raise result
            self._idle.append(pipe)
            yield self._busy.pop(pipe), result


def _send(pipe: Any, value: Any) -> None:
    try:
        pipe.send(value)
    except OSError:
        raise InputError(DIED) from None


@contextmanager
def _deaf() -> Iterator[None]:
    """A process started here is born with stop signals blocked; those of its parent come after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(pipe: Any) -> None:
    """A worker's life. Ctrl-C and SIGTERM may reach the whole group; the parent decides when the work ends."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    try:
        work: Work = pipe.recv()
    except (EOFError, OSError):
        return
    while True:
        try:
            chunk, path = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result: Any = work.make_shard(chunk, path)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            result = error
        pipe.send(result)


def processes_for(total_bytes: int, cores: int) -> int:
    """As many as there are cores, and one where starting others would take longer than the work."""
    return cores if total_bytes > WORTH_OTHERS_BYTES else 1
