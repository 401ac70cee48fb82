"""Write conversations.jsonl.gz: training questions with the target's own greedy answers."""

import argparse
import gzip
import json
import time
from pathlib import Path

import torch
from decoding import greedy_answers, load_target, prompt_ids
from problems import DEFAULT_BUILD, train_problems


def write_conversations(path: Path, conversations: list[list[dict[str, str]]]) -> None:
    """One `{"messages": [...]}` per line; the same bytes for the same conversations."""
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in conversations]
    path.write_bytes(gzip.compress("".join(lines).encode(), compresslevel=9, mtime=0))


def main() -> None:
    """Answer the first training questions; keep the answers that ended and that re-encode to the same tokens."""
    parser = argparse.ArgumentParser(description="Write BUILD/conversations.jsonl.gz and BUILD/answers.json.")
    parser.add_argument("--build", type=Path, default=DEFAULT_BUILD, help="build folder (default: %(default)s)")
    parser.add_argument("--count", type=int, default=14_500, help="training questions to answer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_target(args.build / "target")
    # A question that occurs twice has one answer: keep it once.
    problems = list({problem.question: problem for problem in train_problems(args.count)}.values())
    prompts = prompt_ids(tokenizer, problems)
    kept: dict[int, str] = {}
    unended, reencoded_otherwise, prompt_tokens, answer_tokens, generated_tokens = 0, 0, 0, 0, 0
    start_s = time.perf_counter()
    for done, (index, answer) in enumerate(greedy_answers(model, prompts), start=1):
        generated_tokens += len(answer)
        if done % 1280 == 0:
            print(f"{done}/{len(prompts)} answers, {time.perf_counter() - start_s:.0f} s", flush=True)
        if answer[-1] != tokenizer.eos_token_id:
            unended += 1
            continue
        text = tokenizer.decode(answer[:-1])
        if tokenizer.encode(text, add_special_tokens=False) != answer[:-1]:
            reencoded_otherwise += 1
            continue
        kept[index] = text
        prompt_tokens += len(prompts[index])
        answer_tokens += len(answer)
    seconds = time.perf_counter() - start_s
    write_conversations(
        args.build / "conversations.jsonl.gz",
        [[problems[index].user_turn, {"role": "assistant", "content": kept[index]}] for index in sorted(kept)],
    )
    figures = {
        "conversations": len(kept),
        "dropped_unended": unended,
        "dropped_reencoded_otherwise": reencoded_otherwise,
        "prompt_tokens_mean": round(prompt_tokens / len(kept), 1),
        "answer_tokens_mean": round(answer_tokens / len(kept), 1),
        "seconds": round(seconds),
        "batched_tokens_per_s": round(generated_tokens / seconds),
    }
    (args.build / "answers.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
