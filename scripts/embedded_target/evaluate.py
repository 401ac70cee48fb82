"""Measure the saved target on held-out problems and write its model card and figures."""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from decoding import greedy_answers, greedy_batch, load_target, prompt_ids
from problems import DEFAULT_BUILD, PROMPT_COUNT, Problem, final_result, held_out_problems, train_problems
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

SINGLE_STREAM_PROMPTS = 16
CARD = Path(__file__).with_name("model_card.md")


def repeated_share(answer: Sequence[int], width: int = 4) -> tuple[int, int]:
    """(4-grams of the answer that already occurred in it, all its 4-grams)."""
    grams = list(zip(*(answer[offset:] for offset in range(width)), strict=False))
    return len(grams) - len(set(grams)), len(grams)


@torch.inference_mode()
def reference_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
) -> list[tuple[float, int]]:
    """(summed nats, tokens) of each worked answer with its end token, given its question."""
    results = []
    for problem in problems:
        encoded = tokenizer.apply_chat_template(
            problem.messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        ids, mask = encoded["input_ids"], torch.as_tensor(encoded["assistant_masks"]).bool().reshape(1, -1)
        nats = cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")[mask[0, 1:]]
        results.append((float(nats.sum()), len(nats)))
    return results


def single_stream_speed(model: Qwen3ForCausalLM, prompts: Sequence[list[int]]) -> float:
    """Plain greedy decoding, one prompt at a time: new tokens per second."""
    greedy_batch(model, prompts[:1])
    start_s = time.perf_counter()
    tokens = sum(len(greedy_batch(model, [prompt])[0]) for prompt in prompts)
    return tokens / (time.perf_counter() - start_s)


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> dict[str, Any]:
    """Loss, exact results, repetition and share ended, over all problems and by task."""
    prompts = prompt_ids(tokenizer, problems)
    answers = dict(greedy_answers(model, prompts))
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for index, (problem, (nats, tokens)) in enumerate(
        zip(problems, reference_loss(model, tokenizer, problems), strict=True)
    ):
        answer = answers[index]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        repeated, grams = repeated_share(answer)
        reference_repeated, reference_grams = repeated_share(tokenizer.encode(problem.answer + tokenizer.eos_token))
        for name in ("all", problem.task):
            total = sums[name]
            total["problems"] += 1
            total["nats"] += nats
            total["tokens"] += tokens
            total["right"] += final_result(text) == final_result(problem.answer)
            total["same"] += text == problem.answer
            total["ended"] += answer[-1] == tokenizer.eos_token_id
            total["repeated"] += repeated
            total["grams"] += grams
            total["reference_repeated"] += reference_repeated
            total["reference_grams"] += reference_grams
    return {
        name: {
            "problems": int(total["problems"]),
            "reference_nats_per_token": round(total["nats"] / total["tokens"], 4),
            "exact_result": round(total["right"] / total["problems"], 4),
            "same_text_as_reference": round(total["same"] / total["problems"], 4),
            "ended": round(total["ended"] / total["problems"], 4),
            "repeated_4grams": round(total["repeated"] / total["grams"], 4),
            "repeated_4grams_of_references": round(total["reference_repeated"] / total["reference_grams"], 4),
        }
        for name, total in sums.items()
    }


def write_card(target: Path, training: dict[str, Any], figures: dict[str, Any]) -> None:
    """Fill the model card's figures in."""
    rows = [
        f"| {name} | {f['problems']} | {f['reference_nats_per_token']:.3f} | {f['exact_result']:.1%} "
        f"| {f['repeated_4grams']:.1%} |"
        for name, f in figures["held_out"].items()
    ]
    values = {
        **{name: f"{value:,}" for name, value in training.items()},
        "minutes": f"{training['seconds'] / 60:.0f}",
        "rows": "\n".join(rows),
        "prompts_loss": f"{figures['prompts']['all']['reference_nats_per_token']:.3f}",
        "prompts_exact": f"{figures['prompts']['all']['exact_result']:.1%}",
        "single_stream": f"{figures['single_stream_tokens_per_s']:.0f}",
        **{name: version(name.replace("_", "-")) for name in ("reasoning_gym", "torch", "transformers", "tokenizers")},
    }
    (target / "README.md").write_text(CARD.read_text().format(**values))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure BUILD/target; writes its README.md and BUILD/figures.json.")
    parser.add_argument("--build", type=Path, default=DEFAULT_BUILD, help="build folder (default: %(default)s)")
    parser.add_argument("--count", type=int, default=768, help="held-out problems to measure (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    args = parser.parse_args()
    if args.count < PROMPT_COUNT:
        raise ValueError(f"--count {args.count}: the {PROMPT_COUNT} shipped prompts are part of what is measured")
    torch.set_num_threads(args.threads)
    target = args.build / "target"
    model, tokenizer = load_target(target)
    problems = held_out_problems(args.count, train_problems())
    shipped = problems[:PROMPT_COUNT]
    figures = {
        "held_out": measure(model, tokenizer, problems),
        "prompts": measure(model, tokenizer, shipped),
        "single_stream_tokens_per_s": round(
            single_stream_speed(model, prompt_ids(tokenizer, shipped[:SINGLE_STREAM_PROMPTS])), 1
        ),
        "bytes": {path.name: path.stat().st_size for path in sorted(target.iterdir()) if path.name != "README.md"},
    }
    (args.build / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    write_card(target, json.loads((args.build / "training.json").read_text()), figures)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
