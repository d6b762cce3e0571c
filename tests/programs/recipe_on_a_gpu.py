"""
README's sampler recipe on a GPU: python recipe_on_a_gpu.py TINY DRAFT
"""

import json, sys
from llm import LLM

tiny, draft = sys.argv[1:]
for options in ({}, dict(draft=draft, draft_tokens=3)):
    llm = LLM(tiny, device="cuda", compile=True, quiet=True, max_new_tokens=40, **options)
    told = []
    for how in (dict(temperature=0), dict(epsilon=1), dict(temperature=0)):
        made = llm("One day", **how)
        told.append((llm.engine.captures, llm.engine.kernels, made.tokens))
    print(json.dumps([made.prompt_tokens, told]))
