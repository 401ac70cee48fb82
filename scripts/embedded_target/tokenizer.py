"""Train the embedded target's tokenizer: byte-level BPE, 2,048 entries, single digits, chat template."""

import argparse
from pathlib import Path

from problems import DEFAULT_BUILD, train_problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
SAMPLE_COUNT = 24_000
PAD, END, MASK = "<|pad|>", "<|end|>", "<|mask|>"
ROLES = ("user", "system", "assistant")
SPECIALS = [PAD, *(f"<|{role}|>" for role in ROLES), END, MASK, *(f"<|reserved_{i}|>" for i in range(4))]

# Words with their leading space, digits one by one, punctuation with trailing newlines, runs of white space.
SPLIT = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# `generation` marks what counts as the assistant's own tokens: the answer and its <|end|>.
CHAT_TEMPLATE = r"""
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|assistant|>\n' }}
{%- generation %}
{{- message['content'] + '<|end|>' }}
{%- endgeneration %}
{{- '\n' }}
{%- elif message['role'] in ['user', 'system'] %}
{{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}
{%- else %}
{{- raise_exception('Unknown role ' + message['role'] + ': expected system, user or assistant.') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\n' }}
{%- endif %}
""".strip()


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges come from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[token for token in SPECIALS if token not in (PAD, END, MASK)],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    """Train on the first training problems and save beside the model to come."""
    parser = argparse.ArgumentParser(description="Train the tokenizer and save it in BUILD/target.")
    parser.add_argument("--build", type=Path, default=DEFAULT_BUILD, help="build folder (default: %(default)s)")
    args = parser.parse_args()
    texts = [text for problem in train_problems(SAMPLE_COUNT) for text in (problem.question, problem.answer)]
    tokenizer = train_tokenizer(texts)
    if len(tokenizer) != VOCAB_SIZE:
        raise ValueError(f"the sample gave {len(tokenizer)} vocabulary entries, not {VOCAB_SIZE}: enlarge SAMPLE_COUNT")
    tokenizer.save_pretrained(args.build / "target")


if __name__ == "__main__":
    main()
