"""
generate.py, which says in the end what each turn was.
"""

import json
import generate
from cli.chat import Chat
from cli.errors import run


def watch(chat, before, text):
    turns.append(text)
    turn(chat, before, text)


turns, turn, Chat.turn = [], Chat.turn, watch
run(generate.main)
print("turns:", json.dumps(turns))
