"""Small real tokenizers with the chat templates people have: with and without generation marks."""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{%- if messages and messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' "
    "+ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Drops the thinking of every answer but the last, as Qwen3 does.
THINKING = (
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{%generation -%}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_TOOLS = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<|reserved_special_token_0|>"]  # fmt: skip


# As Gemma: turns must alternate, contents lose white space at their borders, the assistant is called model.
GEMMA = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim "
    "+ '<end_of_turn>\n' }}{% endfor %}{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def shipped(name: str) -> str:
    """A template of `tests/data/templates`."""
    return (Path(__file__).parent / "data" / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer(template: str | None, **more: Any) -> Any:
    """Byte-level BPE whose only merge joins two newlines, so that a token can cross a border."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab | {"ĊĊ": len(vocab)}, [("Ċ", "Ċ")]))
    lines_apart = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|[^\r\n]+"), "isolated")  # as Llama 3 and Qwen do
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([lines_apart, bytes_only])
    core.decoder = ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", bos_token="<|begin|>", **more)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = template
    return made


def sentencepiece(template: str | None, special: list[str]) -> Any:
    """As Llama 2, Gemma and Mistral have it: spaces are ▁, unknown characters fall back to bytes."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *map(chr, range(33, 127)), "▁", "▁the", "▁▁"]
    vocab = {word: i for i, word in enumerate(words)} | {"th": len(words), "the": len(words) + 1}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    core = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.add_special_tokens({"additional_special_tokens": special})
    made.chat_template = template
    return made


def chat(*turns: str) -> list[dict[str, str]]:
    """Messages from `role: content` strings, the role by its first letter (s, u, a, t)."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]
