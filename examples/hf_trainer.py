"""Hugging Face's Trainer inside a budget: text classification. `python examples/hf_trainer.py state_25`."""

import os
import sys
import tempfile

if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # scripts beside this one have the names of libraries
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from baoc.integrations.hf import with_budget  # line 1

POSITIVE, NEGATIVE = range(2, 40), range(40, 78)  # words that decide the label; a real script has a tokenizer


def sentences(number: int) -> list[dict]:
    rng, found = torch.Generator().manual_seed(0), []
    for index in range(number):
        words = POSITIVE if index % 2 else NEGATIVE
        chosen = torch.randint(words.start, words.stop, (16,), generator=rng)
        found.append({"input_ids": chosen, "labels": index % 2})
    return found


def main(budget: str = "state_25", steps: int = 30) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=80, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            weight_decay=0.1,
            warmup_steps=5,
            max_grad_norm=1.0,
            logging_steps=10,
            report_to=[],
        )
        trainer = Trainer(model, arguments, train_dataset=sentences(128), eval_dataset=sentences(32))
        trainer = with_budget(trainer, budget=budget)  # line 2
        trainer.train()
        print(f"loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
