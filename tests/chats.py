"""Small real tokenizers with the chat templates people have: with and without generation marks."""

from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
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


def chat(*turns: str) -> list[dict[str, str]]:
    """Messages from `role: content` strings, the role by its first letter (s, u, a, t)."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]
