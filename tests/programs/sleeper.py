"""
A rank that waits for good, beside a thread of a library.
"""

import ctypes, signal, threading, time

signal.alarm(30)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
from cli.errors import run


def main():
    print("up", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits for good
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


run(main)
