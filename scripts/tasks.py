"""
An adapter for lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), which is
an optional install; scripts/evaluate.py --tasks runs it. The numbers are those of the harness's own
`hf` model, but a context that several choices share is read once.

Shapes: P contexts, n choices of each, T tokens of the longest choice, V vocabulary.
"""

if __name__ == "__main__":
    import sys

    said = "tasks.py is no command: pip install lm_eval, then scripts/evaluate.py --tasks runs it"
    print(said, file=sys.stderr)
    raise SystemExit(2)

from collections import defaultdict
from dataclasses import fields
from itertools import groupby

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from generate import Sampling
from hub.generation import inert
from llm import Completion
from model import DeltaCache, KVCache


class Harness(TemplateLM):
    """llm: an llm.LLM whose weights are loaded."""

    eot_token_id = prefix_token_id = None

    def __init__(self, llm):
        super().__init__()
        self.llm, self.encoder = llm, llm.tokenizer
        self.kind = llm.options.kv_cache or "16-bit"
        config = llm.checkpoint.config
        self.cache_bytes = KVCache.bytes_per_token(config, llm.dtype, self.kind)
        self.batch_tokens = 2048 if llm.device.type == "cpu" else 65536
        # A row's recurrent layers count as so many tokens, of 512 KiB: see generate_until().
        self.row_tokens = DeltaCache.bytes_per_row(config, llm.dtype) // 2**19
        bos, eos = (self.encoder.special_tokens.get(name) for name in ("bos_token", "eos_token"))
        if not (eos or self.encoder.stops):
            raise ValueError(
                "the checkpoint's files name no token that ends a text: tasks want one"
            )
        self.eot_token_id = self.encoder.backend.id(eos) if eos else min(self.encoder.stops)
        self.prefix_token_id = (
            self.encoder.bos if bos or self.encoder.add_bos else self.eot_token_id
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        if add_special_tokens is False:
            return self.encoder.backend.encode(string)
        return self.encoder.encode_text(string)

    def batches(self, items: list, size):
        """As many items at a time as have batch_tokens tokens if each has size(the first one)."""
        while items:
            yield items[: (count := max(1, self.batch_tokens // size(items[0])))]
            items = items[count:]

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[tuple], **_) -> list[tuple[float, bool]]:
        """(any, context, continuation) each -> its log-probability, and whether it is what greedy
        decoding gives."""
        choices, results = defaultdict(list), {}  # context -> its continuations and their places
        for place, (_, context, continuation) in enumerate(requests):
            n, most = len(continuation), self.llm.context
            if not context or not 0 < n <= most:
                raise ValueError(
                    f"a task asks for {n} tokens behind {len(context)}: want 1 to {most}, the "
                    "model's context, behind 1 at least; leave the task out"
                )
            context = [*context, *continuation][
                -self.llm.context - 1 : -len(continuation)
            ]  # the last one is not read
            # Of a context of one token there is nothing to share, and a whole corpus may begin with
            # it.
            choices[place if len(context) == 1 else None, *context].append((continuation, place))
        groups = [(context, found) for (_, *context), found in choices.items()]
        # Contexts with equally many choices go together, the longest first.
        groups.sort(
            key=lambda group: (len(group[1]), len(group[0]), len(group[1][0][0])), reverse=True
        )
        with tqdm(total=len(requests), desc="loglikelihood", disable=self.llm.team.rank > 0) as bar:
            for _, same in groupby(groups, key=lambda group: len(group[1])):
                for batch in self.batches(list(same), self.tokens_of):
                    self.score(batch, results)
                    bar.update(len(results) - bar.n)
        return [results[place] for place in range(len(requests))]

    def tokens_of(self, group: tuple) -> int:
        """Of a context and its choices, each of which has a row."""
        context, choices = group
        return len(context) + sum(len(choice) + self.row_tokens for choice, _ in choices)

    def score(self, batch: list[tuple], results: dict) -> None:
        """Reads each context but for its last token, then that token and a continuation in a row
        each; results gets, by place, what _loglikelihood_tokens() gives."""
        model, device = self.llm.model, self.llm.device
        rows = [
            (context, continuation, place)
            for context, choices in batch
            for continuation, place in choices
        ]
        # A context of one token is read twice, each time at position 0.
        shared = [context[:-1] or context for context, _ in batch]
        contexts, read = (
            torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, tokens)), batch_first=True)
            for tokens in (
                shared,
                [[context[-1], *continuation[:-1]] for context, continuation, _ in rows],
            )
        )
        self.llm.engine = self.llm.speculator = None  # they lose their cache
        model.setup(contexts.shape[1] + read.shape[1], len(rows), cache=self.kind)
        at = torch.arange(contexts.shape[1], device=device)[None]
        # A recurrent layer's states end with each context: no padding goes into them.
        ends = torch.tensor([len(tokens) for tokens in shared], device=device)
        model(contexts.to(device), at, last=torch.zeros_like(ends), ends=ends)
        model.arrange_rows(
            [row for row, (_, choices) in enumerate(batch) for _ in choices], contexts.shape[1]
        )
        starts = torch.tensor([len(context) - 1 for context, _, _ in rows], device=device)
        logits = model(
            read.to(device), starts[:, None] + torch.arange(read.shape[1], device=device)
        )  # [P n, T, V]
        for (_, continuation, place), row in zip(rows, logits):
            logprobs = (
                row[: len(continuation)].float().log_softmax(-1)
            )  # as the harness: 2e-6 off, all in one direction
            total = logprobs[range(len(continuation)), continuation].sum().item()
            results[place] = total, logprobs.argmax(-1).tolist() == list(continuation)

    def loglikelihood_rolling(self, requests: list, **_) -> list[float]:
        windows, totals = [], [0.0] * len(requests)
        for place, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(
                tokens, self.prefix_token_id, self.llm.context, context_len=1
            ):
                windows.append((place, *make_disjoint_window(window)))
        for (place, _, _), (total, _) in zip(windows, self._loglikelihood_tokens(windows)):
            totals[place] += total
        return totals

    def settings(self, given: dict):
        """A task's generation_kwargs -> how many tokens at most, what ends a text, llm.Options.
        ValueError for what the harness refuses, too, and for what it does and we do not."""
        settings = normalize_gen_kwargs(given, 256)
        limit, most = settings["max_gen_toks"], self.llm.context
        if not 0 < limit < most:
            raise ValueError(
                f"max_gen_toks={limit}: want 1 to {most - 1}, as the model's context is {most}; "
                "set it in the task's generation_kwargs"
            )
        if unknown := inert(settings):
            raise ValueError(f"generation_kwargs: {', '.join(unknown)}: not done here")
        wanted = {each.name: settings.get(each.name) for each in fields(Sampling)}
        wanted["temperature"] = wanted["temperature"] if settings["do_sample"] else 0.0
        return limit, list(filter(None, settings["until"])), self.llm._options(wanted)

    def generate_until(self, requests: list, **_) -> list[str]:
        kinds, texts = defaultdict(list), {}
        for place, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0]) or [self.prefix_token_id]
            kinds[repr(request.args[1])].append((tokens, place))
        # All of them, before the first text is generated.
        how = [self.settings(requests[items[0][1]].args[1]) for items in kinds.values()]
        with tqdm(
            total=len(requests), desc="generate_until", disable=self.llm.team.rank > 0
        ) as bar:
            for items, (limit, stops, options) in zip(kinds.values(), how):
                items.sort(key=lambda item: -len(item[0]))
                # As many rows as a KV cache of 512 KiB for each of batch_tokens holds: a step reads
                # all weights.
                for batch in self.batches(
                    items,
                    lambda item: (
                        1 + (len(item[0]) + limit) * self.cache_bytes // 2**19 + self.row_tokens
                    ),
                ):
                    done = [
                        Completion("", ids[limit - self.llm.context :], self.encoder, limit, stops)
                        for ids, _ in batch
                    ]
                    for _ in self.llm._steps(done, options):
                        pass
                    bar.update(len(done))
                    for completion, (_, place) in zip(done, batch):
                        text = self.encoder.decode(
                            completion.tokens
                        )  # as the harness decodes: without the prompt
                        texts[place] = text[
                            : min(
                                (at for stop in stops if (at := text.find(stop)) >= 0), default=None
                            )
                        ]
        return [texts[place] for place in range(len(requests))]
