"""A folder of safetensors files: a source writes each version there, and engines read it, and other readers.

While it is written a version lies in a hidden folder beside the others, where the engines of that update read it. It is
renamed when they serve it (R3): a reader sees the whole of a published version, or none. Then ``latest``, a link, is
made to point to it. What was published before stays, and what was before that goes.

Engines that hold the update which it is compared with read what differs, in a file beside it
(:mod:`~asyncsync.transports.changes_file`) that is taken away before the version gets its name.

A hidden folder that nobody writes to any more is taken away by the next update: who writes holds a lock on a file in
it, which ends with his process.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncsync.buckets import Bucket, Plan
from asyncsync.errors import LinkLostError, TransferError
from asyncsync.messages import Stored, UpdateOrder
from asyncsync.report import format_bytes
from asyncsync.transports.changes_file import Parcel, changes_head, changes_name, read_parcels
from asyncsync.transports.stored import FetchingLink, StoringLink
from asyncsync.weight_files import INDEX, FileLayout, FileLayouts, Run, read_run, sliced, write_run

LATEST = "latest"
"""The link to the version that was published last."""

FORMAT = 1
"""Of what the index tells beside what Hugging Face's does."""

PUBLISHED = re.compile(r"v\d{8,}-[0-9a-f]{16,}")
"""The name of a version's folder: its number, and the epoch of the update that brought it."""

PART_KEYS = ("layout", "aliases", "raw")
"""What the index tells of each source's part, beside how many of the tensors are its own."""

_HIDDEN = re.compile(r"\.asyncsync-v\d{8,}-[0-9a-f]{16,}")
_LOCK = ".writing"


def folder_name(order: UpdateOrder) -> str:
    """The name of an update's folder."""
    return f"v{order.version:08}-{order.epoch:016x}"


def _metadata(version: int, epoch: int, plan: Plan) -> dict[str, str]:
    """What each file tells of the version that it is part of."""
    return {"version": str(version), "epoch": f"{epoch:x}", "layout": plan.layout_digest}


class FolderSourceLink(StoringLink):
    """A source's end of a folder.

    Args:
        connection: Its name.
        folder: The folder; made if it is not there.
        source: The source's number.

    Raises:
        OSError: It cannot be written to.
    """

    def __init__(self, connection: str, folder: Path, source: int) -> None:
        super().__init__(connection)
        self._folder = folder
        self._source = source
        self._layouts = FileLayouts()
        self._layout: FileLayout | None = None
        self._writing: _Writing | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written to")

    def _begin(self, plan: Plan) -> None:
        assert self.order is not None
        layout = self._layout = self._layouts.of(plan, self._source)
        path = self._folder / f".asyncsync-{folder_name(self.order)}"
        try:
            self._give_up()
            self._sweep(path)
            disk = os.statvfs(self._folder)
            if (free := disk.f_bavail * disk.f_frsize) < layout.nbytes:
                raise OSError(f"{format_bytes(free)} are free")
            metadata = _metadata(self.order.version, self.order.epoch, plan)
            self._writing = _Writing(path, layout, metadata, self._changes_head(plan, metadata))
        except OSError as error:
            raise self._failed(error) from error

    def _changes_head(self, plan: Plan, metadata: Mapping[str, str]) -> bytes | None:
        """What the file of what differs begins with; None if nobody is to read one."""
        assert self.order is not None
        against = self.order.against if self.connection in self.order.deltas else None
        return None if against is None else changes_head(plan, against, metadata)

    def _failed(self, error: OSError) -> TransferError:
        size = "" if self._layout is None else f", {format_bytes(self._layout.nbytes)},"
        return TransferError(f"the weights{size} cannot be written to {self._folder}: {error}")

    def _sweep(self, own: Path) -> None:
        """Take away what was left behind by those who are gone."""
        for path in self._folder.iterdir():
            if path != own and _HIDDEN.fullmatch(path.name) and _is_left(path):
                shutil.rmtree(path, ignore_errors=True)

    def _store(self, flat: Tensor) -> None:
        self._write(lambda writing: writing.write(_view(flat)))

    def start_send_changes(self, flat: Tensor) -> Future[None]:
        """Start to store a part of what differs, beside the buckets: an envelope, or what it speaks of."""
        return self.submit(lambda: self._write(lambda writing: writing.write_changes(_view(flat))))

    def _complete(self) -> None:
        self._write(lambda writing: writing.complete(self._source))

    def _write(self, job: Callable[[_Writing], None]) -> None:
        if self._writing is None:
            raise TransferError("the folder was given up")
        try:
            job(self._writing)
        except OSError as error:
            raise self._failed(error) from error

    def _give_up(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()
            shutil.rmtree(writing.path, ignore_errors=True)

    def place(self) -> Stored:
        """The hidden folder."""
        assert self._writing is not None
        assert self.order is not None
        return Stored(folder=str(self._writing.path), version=self.order.version, epoch=self.order.epoch)

    def release(self) -> None:
        """Nothing: what is published in the end is kept until then, or until the next update."""

    def publish(self, epoch: int, digest: str, sources: int) -> Future[None]:
        """Start to have readers find what was written.

        Args:
            epoch: In which update.
            digest: Of the whole set of weights.
            sources: How many have written.

        Returns:
            What to wait for; a TransferError in it says that it could not be.
        """
        return self.submit(lambda: self._publish(epoch, digest, sources))

    def _publish(self, epoch: int, digest: str, sources: int) -> None:
        if (writing := self._writing) is None or self.order is None or not self.stores(epoch):
            raise TransferError("what is to be published was given up")
        try:
            _write_index(writing.path, self.order, digest, sources)
            _publish(self._folder, writing.path, folder_name(self.order))
        except (OSError, ValueError) as error:
            raise TransferError(
                f"version {self.order.version} cannot be published in {self._folder}: {error}"
            ) from error
        if self._writing is writing:
            self._writing = None
        writing.close()


class _Writing:
    """A version that is being written.

    Args:
        path: Its hidden folder; other sources may have made it.
        layout: What lies where.
        metadata: What each file tells of it.
        changes: What the file of what differs begins with; None: there is none.

    Raises:
        OSError: It cannot be written.

    Attributes:
        path: Its hidden folder.
    """

    def __init__(
        self, path: Path, layout: FileLayout, metadata: Mapping[str, str], changes: bytes | None = None
    ) -> None:
        self.path = path
        self._layout = layout
        self._files: list[tuple[int, int]] = []  # each one's descriptor, and where its head ends
        self._written = 0
        self._changes = 0  # bytes of what differs
        path.mkdir(exist_ok=True)
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with suppress(OSError):  # where there are no locks, what is left behind stays
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            for number, file in enumerate(layout.files):
                self._make(file.name, layout.header(number, metadata))
            if changes is not None:
                self._make(changes_name(layout.source), changes)
        except BaseException:
            self.close()
            shutil.rmtree(path, ignore_errors=True)
            raise

    def _make(self, name: str, head: bytes) -> None:
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._files.append((fd, len(head)))
        write_run(fd, 0, Run(0, 0, ((0, len(head)),)), memoryview(head))

    def write(self, bucket: memoryview) -> None:
        """Write the next bucket."""
        for run in self._layout.runs(self._layout.plan.buckets[self._written]):
            fd, at = self._files[run.file]
            write_run(fd, at, run, bucket)
        self._written += 1

    def write_changes(self, part: memoryview) -> None:
        """Write the next part of what differs."""
        fd, at = self._files[len(self._layout.files)]
        write_run(fd, at, Run(0, self._changes, ((0, part.nbytes),)), part)
        self._changes += part.nbytes

    def complete(self, source: int) -> None:
        """Have all of it be on the disk, for whoever reads it there."""
        part = self.path / _part(source)
        part.write_text(json.dumps({"nbytes": self._layout.nbytes, **self._layout.describe()}))
        _sync(part)
        while self._files:
            fd, _ = self._files.pop()
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        _sync(self.path)

    def close(self) -> None:
        """Close all files. Then whoever finds the hidden folder may take it away."""
        for fd, _ in self._files:
            os.close(fd)
        self._files = []
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def _view(flat: Tensor) -> memoryview:
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers


def _part(source: int) -> str:
    return f".part-{source}.json"


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_left(path: Path) -> bool:
    """Whether nobody writes to a hidden folder any more."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        with suppress(OSError):
            path.rmdir()  # it has come as far as that
        return False
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _write_index(path: Path, order: UpdateOrder, digest: str, sources: int) -> None:
    """Write the index of all sources' files, and take away what only this update has needed."""
    parts: list[dict[str, Any]] = []
    for source in range(sources):
        try:
            parts.append(json.loads((path / _part(source)).read_text()))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"source {source} has not written there: is it another folder where it is?"
            ) from error
    weight_map = {name: file for part in parts for name, file in part["weight_map"].items()}
    own = {
        "format": FORMAT,
        "version": order.version,
        "epoch": f"{order.epoch:x}",
        "digest": digest,
        "parts": [{"tensors": len(part["weight_map"]), **{key: part[key] for key in PART_KEYS}} for part in parts],
    }
    metadata = {"total_size": sum(part["nbytes"] for part in parts), "asyncsync": own}
    index = path / INDEX
    index.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    _sync(index)
    for source in range(sources):
        (path / _part(source)).unlink()
        (path / changes_name(source)).unlink(missing_ok=True)
    _sync(path)


def _publish(folder: Path, path: Path, name: str) -> None:
    """Give a hidden folder its name, and let go of what is two versions older."""
    latest = folder / LATEST
    before = os.readlink(latest) if latest.is_symlink() else None
    path.rename(folder / name)
    link = folder / f".asyncsync-{LATEST}-{name}"
    link.symlink_to(name)
    link.replace(latest)
    _sync(folder)
    with suppress(FileNotFoundError):
        (folder / name / _LOCK).unlink()
    for other in folder.iterdir():
        if PUBLISHED.fullmatch(other.name) and other.name not in (name, before):
            shutil.rmtree(other, ignore_errors=True)


class FolderEngineLink(FetchingLink):
    """An engine's way to the files of a source. They are read, not mapped: one that is cut off meanwhile is an error.

    Args:
        connection: The store's.
        plan: The source's plan.
        stored: Where they are.
        source: The source's number.
        layouts: Those of the last update.
        against: The update that this engine takes what differs from; None: it takes the whole.
    """

    def __init__(
        self, connection: str, plan: Plan, stored: Stored, source: int, layouts: FileLayouts, against: int | None
    ) -> None:
        super().__init__(connection, plan)
        self._path = Path(stored.folder)
        self._metadata = _metadata(stored.version, stored.epoch, plan)
        self._source = source
        self._layouts = layouts
        self._against = against
        self._layout: FileLayout | None = None
        self._parcels: Sequence[Parcel] = plan.buckets
        self._files: list[tuple[int, int]] = []  # each one's descriptor, and where its head ends
        self._mutex = threading.Lock()

    def _open(self) -> None:
        layout = self._layout = self._layouts.of(self.plan, self._source)
        for number, file in enumerate(layout.files):
            header = layout.header(number, self._metadata)
            with self._opening(file.name, header) as fd:
                found = os.pread(fd, len(header), 0), os.fstat(fd).st_size
                if found != (header, len(header) + file.nbytes):
                    raise TransferError(f"{self._path / file.name} holds something else than what was written there")
        if self._against is not None:
            name = changes_name(self._source)
            head = changes_head(self.plan, self._against, self._metadata)
            with self._opening(name, head) as fd:
                try:
                    self._parcels = list(read_parcels(fd, head, self.plan, len(layout.files)))
                except TransferError as error:
                    raise TransferError(f"{self._path / name}: {error}") from error

    @contextmanager
    def _opening(self, name: str, head: bytes) -> Iterator[int]:
        """A file that is looked at, and kept if it turns out to be what it should be."""
        try:
            fd = os.open(self._path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                yield fd
                with self._mutex:
                    if self.closed:
                        raise LinkLostError("fetching the weights was stopped")
                    self._files.append((fd, len(head)))
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise TransferError(f"the weights cannot be read: {error}") from error

    def start_receive(self, flat: Tensor) -> tuple[Parcel, Tensor]:
        """Note that the next bucket is wanted, or the next part of what differs."""
        return self._parcels[self._next()], flat

    def wait(self, handle: tuple[Parcel, Tensor], stop: threading.Event) -> None:
        """Read it. Blocks.

        Raises:
            LinkLostError: It was stopped.
            TransferError: It is not there whole.
        """
        parcel, flat = handle
        assert self._layout is not None
        view = _view(flat)
        if isinstance(parcel, bytes):
            self.check(stop)
            view[:] = parcel
            return
        for run in self._layout.runs(parcel) if isinstance(parcel, Bucket) else (parcel,):
            for slice_ in sliced(run):
                with self._mutex:  # lest a descriptor be closed, and be another's, as it is read
                    self.check(stop)
                    fd, at = self._files[slice_.file]
                    try:
                        read_run(fd, at, slice_, view)
                    except (OSError, EOFError) as error:
                        raise TransferError(f"the weights in {self._path} cannot be read: {error}") from error

    def close(self) -> None:
        """Close all files."""
        self.closed = True
        with self._mutex:
            for fd, _ in self._files:
                os.close(fd)
            self._files = []
