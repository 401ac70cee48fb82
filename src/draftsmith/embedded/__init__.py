"""The target, conversations and prompts that ship inside the package, so that the first run needs nothing else."""

from pathlib import Path

_HERE = Path(__file__).parent

TARGET = _HERE / "target"  # a Hugging Face folder, see its README.md
CONVERSATIONS = _HERE / "conversations.jsonl.gz"  # train prompts with the target's own greedy answers
PROMPTS = _HERE / "prompts.jsonl"  # held out
CONFIG = _HERE / "demo.yaml"
