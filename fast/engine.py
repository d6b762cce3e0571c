"""
The captured engine: generate.Engine with this folder's modules in the model and, on a GPU with its
kernels, a decode step as one CUDA graph. llm.py imports this file, at one guarded place; what
others want of fast/ is here, too: optimize() and read_bandwidth().
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from fast import optimize, read_bandwidth
from generate import PREFILL_TOKENS, Engine, Sampling, choose, decode_one_token
from model import Transformer

__all__ = ["FastEngine", "optimize", "read_bandwidth"]


class FastEngine(Engine):
    """What a step runs:

                         forward                 sampling functions    one CUDA graph is
        captured         self.decoder            fast/sampling.py      the whole step
        not captured     torch.compile of it     generate.py           the forward

    decoder: a second module over the model's weights and caches. captures: kernels do all of a
    step, and know all values of Sampling.
    """

    def __init__(self, *args, **options):
        """As Engine, which is compiled here."""
        super().__init__(*args, compile=True, **options)

    def compile(self) -> None:
        super().compile()
        self.fast = optimize(self.model)
        self.decoder = self.fast.decoder if self.fast else self.model
        self.kernels = bool(self.fast and self.fast.kernels)
        self.compiled_decoder = self.compile_whole(self.decoder)
        self.settings = torch.zeros(7, device=self.device)  # the kernels' values of Sampling
        self.graphs = {}  # of a step, with penalties and without
        self.pool = None

    def set_sampling(self, sampling: Sampling) -> None:
        super().set_sampling(sampling)
        values = self.fast.settings(sampling) if self.kernels else None
        self.captures = values is not None
        self.forward = self.decoder if self.captures else self.compiled_decoder
        if self.captures:
            self.settings.copy_(values)
            self.sampling = self.settings
            if self.penalties is not None:
                self.penalties = self.settings[4:]

    def twin(self, function: Callable) -> Callable:
        """The function of that name in fast/sampling.py, while kernels sample."""
        return getattr(self.fast, function.__name__) if self.captures else function

    def faster(self, model: Transformer) -> Callable:
        return self.fast.faster(model) if self.kernels else model

    def penalized(self, logits: Tensor, at: Tensor) -> Tensor:
        """In fp16 while kernels sample, which read 16 bits: of a logit of 40 bf16 takes no 0.1."""
        found = super().penalized(logits, at)
        return found.clamp(-65504, 65504).half() if self.captures else found

    def slots(self, n: int) -> Tensor:
        """Empty where kernels find the slots in use by themselves, also those that are in the model
        for prefill."""
        finds = self.fast and self.fast.finds_slots
        return self.model.slots[:0] if finds else super().slots(n)

    def decode(self) -> tuple[Tensor, Tensor]:
        """The first captured step runs as it is, which compiles the kernels.

        torch.compile would trace all layers to record the same launches: Llama-2-7B would be ready
        in 17 s with empty caches and in 6 with full ones, captured it is in 8.5 and 2.6 (H200). The
        graph has no arguments: it reads tokens, positions and settings where they are, and changes
        the first two there. With penalties it is another one."""
        if not self.captures:
            return super().decode()
        penalized = self.penalties is not None
        if penalized in self.graphs:
            return self.graphs[penalized]()
        parts = self.read, *self.state, self.slots(0), partial(self.sample, choose)
        step = partial(decode_one_token, *parts)
        chosen = step()
        self.graphs[penalized] = self.capture(step, chosen)
        return chosen

    def capture(self, step: Callable, results: tuple[Tensor, ...]) -> Callable:
        """As graph.CapturedStep. All graphs of an engine share their memory."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        return self.fast.capture(step, results, self.pool)

    @torch.no_grad()
    def warm_up(self, prompts: int, alone: bool = True) -> None:
        """alone: kernels are compiled beside prefill, see FusedDecoder.beside(). Ranks that compile
        and run at once would exchange their sums out of order."""
        beside = []
        if self.kernels:
            beside.append(partial(self.warm_up_prompts, prompts))
        if self.captures and alone:
            beside += self.decoder.step(self.batch_size, self.twin(choose), self.sampling)
        with self.decoder.beside(beside) if beside else nullcontext():
            self.begin([[0, 0]] * prompts, 4, 0, 1)
        while self.step():
            pass

    def warm_up_prompts(self, prompts: int) -> None:
        if self.kernels:
            self.decoder.try_prompts(min(prompts * self.max_seq_len, PREFILL_TOKENS))
