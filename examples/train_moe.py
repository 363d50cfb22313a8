"""Train a small mixture of experts: each dialect has a permutation of the words, from word to next.

python examples/train_moe.py              # on a GPU, else tiny in Triton's interpreter
torchrun --standalone --nproc-per-node 2 examples/train_moe.py    # ranks share the experts
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

from moe_fast import MoELayer  # noqa: E402
from moe_ref.config import LayerConfig, RouterConfig  # noqa: E402

SIZES = {"steps": (300, 20), "words": (512, 16), "dialects": (16, 4), "length": (64, 8), "batch": (64, 8)}  # GPU, CPU
SIZES |= {"blocks": (2, 2), "hidden": (256, 16), "width": (256, 16), "experts": (16, 4), "topk": (2, 2)}


class Model(nn.Module):
    """Embeddings of word and dialect, residual blocks with a layer each, and a head."""

    def __init__(self, o: argparse.Namespace, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        scores = {"score_function": "sigmoid", "expert_bias": True, "aux_loss_coeff": 1e-3}
        config = LayerConfig(router=RouterConfig(num_experts=o.experts, topk=o.topk, **scores))
        options = {"group": group, "recompute": o.recompute, "init_std": o.hidden**-0.5}
        self.words, self.dialects = nn.Embedding(o.words, o.hidden), nn.Embedding(o.dialects, o.hidden)
        self.layers = nn.ModuleList(MoELayer(config, o.hidden, o.width, **options) for _ in range(o.blocks))
        self.head = nn.Linear(o.hidden, o.words)

    def forward(self, words_SB: Tensor, dialects_B: Tensor) -> Tensor:
        x_SBH = self.words(words_SB) + self.dialects(dialects_B)
        for layer in self.layers:
            x_SBH = x_SBH + layer(nn.functional.rms_norm(x_SBH, x_SBH.shape[-1:]))
        return self.head(x_SBH)

    def parameters_of_all_ranks(self) -> list[nn.Parameter]:
        of_experts = {parameter for layer in self.layers for parameter in layer.expert_parameters()}
        return [parameter for parameter in self.parameters() if parameter not in of_experts]


def average_gradients(model: Model, group: dist.ProcessGroup) -> None:
    """An expert is on one rank, and has met the tokens of all: its gradient is the sum already."""
    for parameter in model.parameters_of_all_ranks():
        dist.all_reduce(parameter.grad, group=group)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size(group)


def sentences(o: argparse.Namespace, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words [S+1,B], and the dialect of each of the B sentences."""
    orders = [torch.randperm(o.words, generator=torch.Generator().manual_seed(d)) for d in range(o.dialects)]
    dialects_B, first_B = (torch.randint(n, (o.batch,), generator=noise) for n in (o.dialects, o.words))
    words = [first_B]
    for _ in range(o.length):
        words.append(torch.stack(orders)[dialects_B, words[-1]])
    return torch.stack(words), dialects_B


def train(o: argparse.Namespace, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    rank = dist.get_rank(group) if group else 0
    torch.manual_seed(rank)  # other experts on each rank, and other sentences
    model, noise = Model(o, group).to(device), torch.Generator().manual_seed(rank)
    for parameter in model.parameters_of_all_ranks() if group else ():
        dist.broadcast(parameter.data, 0, group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.08 / o.hidden**0.5, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=o.steps)
    for step in range(o.steps):
        words, dialects = (x.to(device) for x in sentences(o, noise))
        loss = nn.functional.cross_entropy(model(words[:-1], dialects).flatten(0, 1), words[1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # the balancing losses ride on the layers' outputs
        if group:
            average_gradients(model, group)
        optimizer.step()
        decay.step()
        for layer in model.layers:
            layer.finish_batch()  # the expert bias takes its step
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}  aux {model.layers[0].losses.aux_loss:.5f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (large, small) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=large if GPU else small)
    parser.add_argument("--recompute", choices=["moe_act", "permute", "moe"])
    device, by_torchrun = torch.device("cuda" if GPU else "cpu"), "RANK" in os.environ
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) if GPU else -1)  # -1: does nothing
    if by_torchrun:
        dist.init_process_group("nccl" if GPU else "gloo")
    train(parser.parse_args(), device, dist.group.WORLD if by_torchrun else None)
    if by_torchrun:
        gc.collect()  # layers hold the group, whose threads must end before Python does
        dist.barrier()
        dist.destroy_process_group()
