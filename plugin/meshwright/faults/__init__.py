"""Raises an error on every rank when one rank fails or the ranks differ, and reports the first cause.

The hub, a thread of rank 0, knows which processes are alive and at which point each group waits. The runtime's
collectives are logged, and a digest of the log is compared at each meeting: a point in a step at which ranks wait until
the hub has compared their statements. The program's own collectives are compared before they run, since gloo aborts the
process on a wrong size. A statement is a value that must be equal on all ranks; a claim describes the arguments of one
rank's call; a wish is what one rank asks all to do together after a step, such as a save or an end.

    a rank dies or hangs           referee.py says which and since when; link.py carries the heartbeats;
                                   guard.py raises on the other ranks; ending.py ends a process that cannot raise
    the first cause is reported    referee.py; equal_errors.py prints equal tracebacks of a host once
    a collective differs           interpose.py sees every call; collective_log.py has the log; its timeouts
    values differ at a meeting     statement.py; memory_digest.py makes digests of tensors
    one step fails on one rank     together.py: succeed_together, texts_of_all, Claim
    only some ranks make a call    every_rank.py: on_every_rank, wishes
    a scheduler ends the job       preemption.py
    the hub's thread and sockets   referee_server.py
"""
