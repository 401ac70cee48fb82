"""Train the embedded target from scratch on the CPU: a deep and thin Qwen3 of 2.2 M parameters.

One epoch over fresh problems: whole conversations packed into rows, loss on every token, Muon for the matrices and
AdamW for the rest, learning rate warm-up, plateau, linear decay to zero.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from problems import DEFAULT_BUILD, Problem, train_problems
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from draftsmith.pipeline.optim import Muon

SEED = 0
ROW_TOKENS = 512
BATCH_ROWS = 4
WARMUP_STEPS = 50
DECAY_SHARE = 0.6
IGNORED = -100


def make_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """The target's architecture. Deep and thin: better at this size, and the shape for which drafting pays."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=10,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def pack_rows(conversations: Sequence[list[int]], row_tokens: int, pad_id: int, open_rows: int = 32) -> Tensor:
    """Whole conversations, first fit, into rows [R, row_tokens + 1]; the rest of a row is padding."""
    closed: list[list[int]] = []
    opened: list[list[int]] = []
    for conversation in conversations:
        if len(conversation) > row_tokens + 1:
            continue
        fitting = (row for row in opened if len(row) + len(conversation) <= row_tokens + 1)
        row = next(fitting, None)
        if row is None:
            row = []
            opened.append(row)
        row.extend(conversation)
        if len(opened) > open_rows:
            closed.append(opened.pop(0))
    rows = closed + opened
    return torch.tensor([row + [pad_id] * (row_tokens + 1 - len(row)) for row in rows], dtype=torch.int16)


def encode(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[list[int]]:
    """Token ids of each whole conversation."""
    texts = [tokenizer.apply_chat_template(problem.messages, tokenize=False) for problem in problems]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def learning_rate_share(step: int, steps: int) -> float:
    """Warm-up, plateau, linear decay to zero, as a share of the peak."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))


def make_loss(model: Qwen3ForCausalLM) -> Callable[[Tensor], Tensor]:
    """Mean cross-entropy over the real tokens of rows [B, row_tokens + 1]."""
    pad_id = model.config.pad_token_id

    def loss(rows: Tensor) -> Tensor:
        inputs, labels = rows[:, :-1], rows[:, 1:]
        logits = model(input_ids=inputs, use_cache=False).logits
        labels = labels.masked_fill(labels == pad_id, IGNORED)
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    return loss


def train(model: Qwen3ForCausalLM, rows: Tensor, steps: int, peak_lr: float) -> dict[str, float]:
    """Run `steps` steps over `rows`; returns the figures of the run."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        Muon(matrices, lr=peak_lr, weight_decay=0.05),
        torch.optim.AdamW(others, lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    loss_of = torch.compile(make_loss(model))
    pad_id = model.config.pad_token_id
    token_count, smooth, start_s = 0, 0.0, 0.0
    for step in range(steps):
        batch = rows[step * BATCH_ROWS : (step + 1) * BATCH_ROWS].long()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * learning_rate_share(step, steps)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if step == 0:
            start_s = time.perf_counter()  # after compilation
        else:
            token_count += int((batch[:, 1:] != pad_id).sum())
        if step % 50 == 49:
            rate = token_count / (time.perf_counter() - start_s)
            print(f"step {step + 1}/{steps}  loss {smooth:.3f}  {rate:.0f} tokens/s", flush=True)
    seconds = time.perf_counter() - start_s
    return {
        "steps": steps,
        "tokens": token_count,
        "seconds": round(seconds),
        "tokens_per_s": round(token_count / seconds),
        "train_loss_all_tokens": round(smooth, 4),
    }


def main() -> None:
    """Make the problems, train, and save bfloat16 weights in BUILD/target."""
    parser = argparse.ArgumentParser(description="Train the embedded target; writes BUILD/target and training.json.")
    parser.add_argument("--build", type=Path, default=DEFAULT_BUILD, help="build folder (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=3000, help="training steps of 4 x 512 tokens (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(SEED)
    target = args.build / "target"
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = pack_rows(encode(tokenizer, train_problems()), ROW_TOKENS, tokenizer.pad_token_id)
    rows = rows[torch.randperm(len(rows))]
    if len(rows) < args.steps * BATCH_ROWS:
        raise ValueError(
            f"--steps {args.steps} needs {args.steps * BATCH_ROWS} rows, there are {len(rows)}: raise TRAIN_COUNT"
        )
    print(f"{len(rows)} rows, {float((rows != tokenizer.pad_token_id).float().mean()):.1%} filled", flush=True)
    model = Qwen3ForCausalLM(make_config(tokenizer))
    figures = train(model, rows, args.steps, args.lr)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(target)
    figures["parameters"] = model.num_parameters()
    (args.build / "training.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
