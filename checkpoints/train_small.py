"""Trains the small checkpoint that ships: `python -m checkpoints.train_small --out FOLDER`.

Text -> tokeniser -> windows -> Flax model, Optax optimiser -> Orbax folder with config, tokeniser
and samples. The same seed gives the same data in the same order; the weights agree between
machines up to rounding. Must know nothing of serving.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import sentencepiece as spm
from flax import nnx
from tqdm import tqdm

from checkpoints.errors import CheckpointError
from checkpoints.orbax_writer import write_checkpoint
from checkpoints.reader import TokenizerFiles
from checkpoints.small_data import (
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    EOS,
    EOS_ID,
    MIDDLE,
    ROLES,
    batches,
    encode_document,
    load_tokenizer,
    train_tokenizer,
)
from checkpoints.small_model import SmallConfig, SmallModel, set_tensors, to_config, to_tensors
from checkpoints.small_samples import make_samples, read_prompts, write_samples
from checkpoints.small_text.generate import CHAT_MARK, read_documents

STEPS = 1300
PEAK_LEARNING_RATE = 4e-3
SHIPPED_SAMPLES = pathlib.Path(__file__).parent / "small" / "samples.json"


def make_schedule(steps: int) -> Callable[[int], jax.Array]:
    """Learning rate: linear warm-up over a twentieth of the steps, then a cosine down to 2 %."""
    schedule: Callable[[int], jax.Array] = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=PEAK_LEARNING_RATE,
        warmup_steps=max(1, steps // 20),
        decay_steps=steps,
        end_value=PEAK_LEARNING_RATE / 50,
    )
    return schedule


def loss_of(model: SmallModel, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token over windows [rows, tokens + 1].

    A window holds parts of several documents; each is learned as if it stood alone.
    """
    ids = windows[:, :-1]
    logits = model(ids, jnp.cumsum(ids == BOS_ID, axis=1))
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return losses.mean()


def _update(model: SmallModel, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """One update in place; returns the loss before it."""
    loss: jax.Array
    loss, gradients = nnx.value_and_grad(loss_of)(model, windows)
    optimizer.update(model, gradients)
    return loss


_train_step = nnx.jit(_update)
_measure = nnx.jit(loss_of)


def train(
    documents_of: Callable[[int], Sequence[Sequence[int]]],
    config: SmallConfig,
    *,
    steps: int,
    seed: int,
    progress: bool = True,
) -> tuple[SmallModel, list[float]]:
    """A model trained from scratch, and the loss of each step.

    documents_of: tokenised documents by epoch.
    """
    model = SmallModel(config, seed=seed)
    schedule = make_schedule(steps)
    rule = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    )
    optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)
    losses: list[float] = []
    data = batches(documents_of, steps=steps, seed=seed)
    with tqdm(data, "training", steps, unit="step", disable=not progress) as bar:
        for step, windows in enumerate(bar):
            losses.append(float(_train_step(model, optimizer, jnp.asarray(windows))))
            if progress:
                rate = float(schedule(step))
                bar.set_postfix(loss=f"{np.mean(losses[-50:]):.3f}", learning_rate=f"{rate:.1e}")
    return model, losses


def evaluate(model: SmallModel, documents: Sequence[Sequence[int]]) -> float:
    """Mean loss over all documents, in order, cut into windows."""
    rows, window = MIDDLE
    flat = np.asarray([token for ids in documents for token in ids], np.int32)
    count = len(flat) // (rows * (window + 1))
    windows = flat[: count * rows * (window + 1)].reshape(count, rows, window + 1)
    return float(np.mean([float(_measure(model, jnp.asarray(part))) for part in windows]))


def save(
    folder: pathlib.Path, tensors: dict[str, np.ndarray], config: SmallConfig, tokenizer: bytes
) -> None:
    """Writes the checkpoint folder; raises CheckpointError if it exists or cannot be written."""
    stored = to_config(config, bos_id=BOS_ID, eos_id=EOS_ID)
    stored["generation_config"] = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    special = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "additional_special_tokens": list(ROLES),
        "model_max_length": config.max_position,
    }
    files = TokenizerFiles(
        sentencepiece_model=tokenizer, chat_template=CHAT_TEMPLATE, special=special
    )
    write_checkpoint(
        folder, convention="hf", config=stored, tensors=tensors.items(), tokenizer=files
    )


def finish(
    folder: pathlib.Path, model: SmallModel, tokenizer_model: bytes, config: SmallConfig
) -> SmallModel:
    """Rounds the weights to bfloat16, saves them with samples, and returns the rounded model."""
    tensors = {name: v.astype(ml_dtypes.bfloat16) for name, v in to_tensors(model).items()}
    save(folder, tensors, config, tokenizer_model)
    set_tensors(model, tensors)
    tokenizer: spm.SentencePieceProcessor = load_tokenizer(tokenizer_model)
    samples = make_samples(model, tokenizer, read_prompts())
    write_samples(folder / "samples.json", samples)
    for sample in samples:
        print(f"  {sample['name']}: {sample['greedy_text']!r}")
    if SHIPPED_SAMPLES.is_file():
        shipped = json.loads(SHIPPED_SAMPLES.read_text(encoding="utf-8"))
        answers = {sample["name"]: sample["greedy_ids"] for sample in shipped}
        same = sum(answers.get(s["name"]) == s["greedy_ids"] for s in samples)
        print(f"{same} of {len(samples)} greedy answers are those of the checkpoint that ships")
    return model


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m checkpoints.train_small", description=__doc__)
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("small"),
        help="folder to write (%(default)s)",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="updates on text (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    if options.out.exists():
        parser.error(f"--out {options.out} exists already; choose another name or remove it first")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parse(arguments)
    start = time.monotonic()
    config = SmallConfig()
    texts = read_documents()
    tokenizer_model = train_tokenizer(
        [text.removeprefix(CHAT_MARK) for text in texts], vocab_size=config.vocab_size
    )
    tokenizer = load_tokenizer(tokenizer_model)

    def documents_of(epoch: int) -> list[list[int]]:
        return [encode_document(tokenizer, text) for text in read_documents(epoch)]

    documents = documents_of(0)
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens in an epoch")
    model, losses = train(documents_of, config, steps=options.steps, seed=options.seed)
    print(f"training loss {losses[0]:.3f} -> {np.mean(losses[-50:]):.3f} (last 50 steps)")
    print(f"loss over the first epoch's text: {evaluate(model, documents):.4f} in float32")
    try:
        model = finish(options.out, model, tokenizer_model, config)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"loss over the first epoch's text: {evaluate(model, documents):.4f} as stored (bfloat16)"
    )
    print(f"{options.out} written; {time.monotonic() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
