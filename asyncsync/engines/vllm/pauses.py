"""Which update has paused an engine: vLLM's own calls know no epochs, so whoever makes one asks here first."""

from __future__ import annotations

from asyncsync.engines.record import WeightRecord
from asyncsync.errors import OutOfStepError


class PauseNote:
    """What is noted of an engine's pauses, beside its record.

    Args:
        record: Knows the newest epoch.

    Attributes:
        paused: Whether an update has paused it, as far as is known.
    """

    def __init__(self, record: WeightRecord) -> None:
        self._record = record
        self._newest = 0  # that has paused it
        self.paused = False

    def note(self, epoch: int, paused: bool) -> None:
        """Note that an update pauses the engine now, or has resumed it.

        Raises:
            OutOfStepError: A newer update has been here.
        """
        self._record.see(epoch)
        self.paused = paused
        self._newest = epoch

    def check(self, epoch: int) -> None:
        """See whether the pause is still an update's own.

        Raises:
            OutOfStepError: A newer one has paused the engine since, and will resume it.
        """
        if self._newest > epoch:
            raise OutOfStepError(f"epoch {self._newest} has paused this engine since epoch {epoch} did")
