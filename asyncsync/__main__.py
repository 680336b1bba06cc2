"""``python -m asyncsync``."""

from asyncsync.cli import main

main()
