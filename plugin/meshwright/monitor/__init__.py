"""Monitoring of a run: a card at the start, a line per interval, and a log of JSON lines.

It costs no collective: hooks count steps, tokens and time, and every rank sends its figures to rank 0 over the guard's
connection and does not wait.

    step_observer.py  hooks that count              reporter.py     rank 0's thread that makes lines of numbers
    monitor.py        the monitor of a run          figures.py      the line of an interval
    card.py           the card, with the estimate   held_memory.py  measured memory
    records.py        the log                       read_out.py     what a program may ask
"""
