"""
What README's recipes add, used from Python: python recipes.py TINY DRAFT UNIT
"""

import json, sys
import torch
from llm import LLM

tiny, draft, unit = sys.argv[1:]
llm = LLM(tiny, device="cpu", quiet=True, max_new_tokens=20)
told = dict(
    greedy=llm("One day", temperature=0).tokens,
    always=LLM(tiny, device="cpu", quiet=True, max_new_tokens=20, epsilon=1)("One day").tokens,
    call=llm("One day", epsilon=1).tokens,
    stream="".join(llm.stream("One day", epsilon=1)) == llm("One day", temperature=0).text,
    fp8=LLM(tiny, device="cpu", quiet=True, max_new_tokens=20, kv_cache="fp8")(
        "One day", temperature=0
    ).tokens,
    int2=LLM(tiny, device="cpu", quiet=True, max_new_tokens=20, quantize="int2")("One day").tokens,
)
for name, options in dict(
    draft=dict(draft=draft),
    repeat=dict(draft="repeat", draft_tokens=2),
    growing=dict(draft=draft, draft_tokens="growing"),
).items():
    made = LLM(tiny, device="cpu", quiet=True, max_new_tokens=20, **options)
    told[name] = made("One day", epsilon=1).tokens
    told[name + " k"] = made.speculator.policy.k
model = LLM(unit, device="cpu", quiet=True)
model.prepare(1, 20)
logits = model.model(torch.tensor([[1, 2]]), torch.arange(2)[None])[0]
# The state of which the head makes them.
states = torch.linalg.lstsq(model.model.head.weight, logits.T).solution
told["lengths"] = states.norm(dim=0).tolist()
try:
    llm("One day", epsilon=2)
except ValueError as error:
    told["refused"] = str(error)
print(json.dumps(told))
