"""Train a causal language model of Hugging Face's transformers, with random weights, on bytes of text:

    deepspeed --num_accelerators 4 examples/train_hf.py --deepspeed_config configs/aiao.json --stages 4 --model llama

Needs ``pip install 'ds_fold[transformers]'``. Data are those of train_gpt.py: no tokenizer, and nothing is downloaded. With a
model of your own, ``from_transformers(model)`` takes its weights along.
"""

import json
import time
from pathlib import Path

import deepspeed
import torch
from tqdm import tqdm
from train_gpt import VOCABULARY, common_parser, load_text, micro_batches, parsed, seed_cpu
from transformers import GPT2Config, LlamaConfig

import ds_fold


def model_config(args):
    """The model's config; any that ds_fold.models knows can stand here."""
    special = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    if args.model == "gpt2":
        return GPT2Config(vocab_size=VOCABULARY, n_positions=args.sequence, n_embd=args.hidden, n_layer=args.layers,
                          n_head=args.heads, **special)
    return LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=args.sequence, hidden_size=args.hidden,
                       intermediate_size=3 * args.hidden, num_hidden_layers=args.layers, num_attention_heads=args.heads,
                       tie_word_embeddings=args.tied, **special)


def parse_args():
    parser = common_parser(__doc__)
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--tied", action="store_true", help="llama: the head is the embedding, as it always is for gpt2")
    parser.add_argument("--report", metavar="FILE", help="write losses as JSON")
    return parsed(parser)


def main():
    args = parse_args()
    deepspeed.init_distributed()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    layers, loss_fn = ds_fold.models.from_transformers(model_config(args))
    net = ds_fold.PipelineModule(layers, loss_fn=loss_fn, num_stages=args.stages, config=args.deepspeed_config,
                                 partition_method="uniform", seed_layers=True, base_seed=args.seed, seed_fn=seed_cpu)
    engine, *_ = ds_fold.initialize(args=args, model=net, model_parameters=list(net.parameters()))

    text, held_out = load_text(args.text, args.sequence)
    replica, size, count = engine.grid.get_data_parallel_rank(), engine.train_micro_batch_size_per_gpu(), engine.micro_batches
    shown = torch.distributed.get_rank() == 0

    def batch(data, index):
        # the loss shifts labels itself, so they are the tokens
        return ((tokens, tokens) for tokens, _ in micro_batches(data, args, index, replica, size, count))

    losses, start = [], time.perf_counter()
    progress = tqdm(range(args.steps), disable=not shown, unit="step")
    for step in progress:
        losses.append(float(engine.train_batch(batch(text, 1 + step))))
        progress.set_postfix(loss=f"{losses[-1]:.4f}")
    seconds = time.perf_counter() - start
    evaluated = float(engine.eval_batch(batch(held_out, 0)))
    if shown and losses:
        tokens = args.steps * engine.train_batch_size() * args.sequence
        print(f"{args.model}, step {args.steps}: loss {losses[-1]:.4f}, held-out loss {evaluated:.4f}, "
              f"{tokens / seconds:.0f} tokens/s")
    if shown and args.report:
        Path(args.report).write_text(json.dumps({"losses": losses, "evaluated": evaluated}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
