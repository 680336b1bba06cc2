"""asyncsync against what others offer: run it with ``python -m benchmarks.peers``.

Each peer is called as its documentation says, in a module of its own here. What is not installed, or does not run, is
named with the reason.
"""
