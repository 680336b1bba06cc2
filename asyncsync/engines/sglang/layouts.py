"""The layout that an SGLang engine has accepted: its names compared before anything is sent, its checksums after."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncsync.buckets import Plan, TensorSpec, list_names
from asyncsync.engines.sglang.calls import Selector, SGLangClient, SGLangFacts, UnsupportedBySGLangError
from asyncsync.engines.sglang.names import ParameterNames, Targets, differing, key_of, match_names, parts_of
from asyncsync.errors import PlanError
from asyncsync.messages import ChecksumPart, Checksums, Layout

_log = logging.getLogger("asyncsync")


@dataclass(frozen=True, slots=True)
class Accepted:
    """A layout that fits.

    Attributes:
        plan: How it is cut.
        partial: Whether it was accepted as a partial one.
        targets: Where each tensor goes; None if names were not compared.
    """

    plan: Plan
    partial: bool
    targets: Targets | None

    @property
    def names(self) -> tuple[str, ...]:
        """Under which name each tensor is sent."""
        return self.targets.names if self.targets else tuple(spec.name for spec in self.plan.specs)


class LayoutCheck:
    """Compares what is sent with what an engine holds.

    Args:
        client: Calls it.
        facts: What it is.
        selector: Which of its models updates are for.
        check_names: Whether names are compared.
        parameter_names: The caller's own rule for them.
    """

    def __init__(
        self,
        client: SGLangClient,
        facts: SGLangFacts,
        *,
        selector: Selector,
        check_names: bool,
        parameter_names: ParameterNames | None,
    ) -> None:
        self._client = client
        self._facts = facts
        self._selector: Selector = selector
        self._check_names = check_names
        self._parameter_names = parameter_names
        self._parameters: tuple[frozenset[str], ...] | None = None  # of each rank
        self._tells = facts.checksums
        self._untold: set[str] = set()  # not compared, which was said

    @property
    def checks(self) -> bool:
        """Whether checksums can be compared: on a CPU they are of the bytes as they are, if those are not quantized."""
        plain = self._facts.device == "cpu" and self._facts.quantization is None
        return plain and self._tells and self._check_names and self._parameter_names is None

    async def accept(self, layout: Layout) -> Accepted | None:
        """Compare a layout with the engine.

        Returns:
            What was accepted; None if the tensors fit, but not the buckets: an engine that joins others is asked before
            an update in which buckets are as it needs them.

        Raises:
            PlanError: It does not fit.
            SGLangError: The engine was not asked for its names, or did not answer.
        """
        plan = await asyncio.to_thread(layout.agreed_plan)
        if (
            layout.whole_tensors
            and not self._facts.flattened_buckets
            and any(len(bucket.whole) > 1 for bucket in plan.buckets)
        ):
            raise PlanError(
                "this engine's update_weights_from_distributed takes no load_format, so tensors must come one by one: "
                "give the synchronizer bucket_size=1, or use asyncsync.SGLangActor"
            )
        if self._check_names:
            self._refuse_dtype(plan.specs)
        parameters = await self._known_parameters()
        targets = None
        if parameters is not None:
            known = frozenset[str]().union(*parameters)
            rule = self._parameter_names
            targets = match_names(plan.specs, known, partial=layout.partial, parameter_names=rule)
        return Accepted(plan, layout.partial, targets) if layout.whole_tensors else None

    async def learn_names(self) -> None:
        """Ask for the names of its parameters, while it has them: it reads the weights for that.

        Raises:
            SGLangError: It did not answer.
        """
        if self._check_names and self._tells:
            await self._known_parameters()

    def _refuse_dtype(self, specs: Sequence[TensorSpec]) -> None:
        """Refuse weights of which none has the engine's dtype, where it tells one.

        It tells one for all: that some are held in another (a router's, say) is nothing it would tell.
        """
        held = getattr(torch, self._facts.dtype or "auto", None)
        floats = [spec for spec in specs if spec.dtype.is_floating_point]
        if self._facts.quantization is None and held and floats and all(spec.dtype != held for spec in floats):
            raise PlanError(
                f"the engine's weights are {held}: give the synchronizer dtype={held}, "
                f"or send them so, not {list_names({str(spec) for spec in floats})}",
                names=sorted(spec.name for spec in floats),
            )

    async def _known_parameters(self) -> tuple[frozenset[str], ...] | None:
        if self._check_names and self._tells and self._parameters is None:
            try:
                ranks = await self._client.weights_checksums(self._selector)
                self._parameters = tuple(frozenset(rank) for rank in ranks)
            except UnsupportedBySGLangError:
                self._tells = False
        if self._parameters is None:
            _log.warning(
                "SGLangEngine of %r: names are not compared with those of its parameters, nor is what it has loaded",
                self._client,
            )
        return self._parameters

    def wanted(self, accepted: Accepted | None) -> Checksums:
        """What checksums of the trainer's are wanted, to compare what the engine has loaded."""
        if not self.checks or accepted is None or accepted.targets is None or self._parameters is None:
            return {}
        wanted: dict[str, tuple[ChecksumPart, ...]] = {}
        untold: set[str] = set()
        for parameter, sources in accepted.targets.sources.items():
            specs = [accepted.plan.specs[index] for index in sources]
            for rank, held in enumerate(self._parameters):
                ways = parts_of(parameter, specs, rank, len(self._parameters)) if parameter in held else ()
                wanted |= {key_of(rank, way, parameter): parts for way, parts in enumerate(ways)}
                if not ways:
                    untold.add(parameter)
        if untold - self._untold:
            self._untold |= untold
            _log.warning("SGLangEngine of %r: not compared after it has loaded: %s", self._client, list_names(untold))
        return wanted

    async def differing(self, accepted: Accepted | None, sent: Mapping[str, str]) -> list[str]:
        """The parameters that are not what was sent, by name.

        Raises:
            SGLangError: The engine did not answer.
        """
        wanted = self.wanted(accepted)
        return differing(wanted, sent, await self._client.weights_checksums(self._selector)) if wanted else []
