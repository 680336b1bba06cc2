"""Two demonstrations of weight updates in a running loop: a policy that learns, and a real language model.

They need a Ray cluster to be connected, and print nothing: what happens is told to an
:class:`~asyncsync.demo.progress.Observer`. The command line (:mod:`asyncsync.cli`) shows it.
"""
