"""How a dataset lies in a Zarr group, and how it is proved.

Samples are written in batches, and a batch fills whole chunks of every array, so that no two writers ever
touch one chunk. The array ``checksums`` is the manifest: per batch and array the sha256 of what was written.
A batch's row of it is one chunk and is written last, so a batch is vouched for whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from dask_sdc.dataset.outputs import Array, Output, Sample
from dask_sdc.exceptions import CheckpointError, CorruptionError
from dask_sdc.recovery import SampleUnavailable

__all__ = ["Layout", "Spec"]

_FORMAT = "dask_sdc dataset 1"
_ATTRIBUTE = "dask_sdc"
_CHECKSUMS = "checksums"
_COMPRESSORS = (ZstdCodec(level=1), Crc32cCodec())


#: The opened arrays of a group, by name.
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """One array of the group.

    Parameters
    ----------
    name : str
        Its name.
    dtype : dtype or type
        Its dtype; ``str`` for text.
    shape, chunks : tuple of int
        Of the array; the first axis has one chunk per batch.
    dims : tuple of str
        Names of the axes.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dims: tuple[str, ...]


class Layout:
    """The arrays of a dataset.

    Parameters
    ----------
    outputs : mapping of str to Output
        What a sample consists of.
    samples : int
        How many there are.
    batch : int
        Samples that are written together.
    """

    def __init__(self, outputs: Mapping[str, Output], samples: int, batch: int) -> None:
        self.outputs, self.samples, self.batch = dict(outputs), samples, batch
        self.batches = -(-samples // batch)
        self.specs = {spec.name: spec for spec in self._specs()}

    def _specs(self) -> list[Spec]:
        per_sample = ((self.samples,), (self.batch,), ("sample",))
        specs = [
            Spec("valid", np.dtype("?"), *per_sample),
            Spec("failed", np.dtype("?"), *per_sample),
            Spec("reason", str, *per_sample),
        ]
        for name, output in self.outputs.items():
            axes = tuple(f"{name}_{k}" for k in range(len(output.row)))
            if output.variable:
                specs.append(Spec(f"{name}_length", np.dtype("<i8"), *per_sample))
            if output.layout == "ragged":
                specs.append(Spec(f"{name}_begin", np.dtype("<i8"), *per_sample))
                room = self._room(output)
                shape, chunks = (self.batches * room, *output.row), (room, *output.row)
                specs.append(Spec(name, output.dtype, shape, chunks, (f"{name}_row", *axes)))
            else:
                length = (f"{name}_position",) if output.variable else ()
                rest = ((output.max_length,) if output.max_length else ()) + output.row
                shape, chunks = (self.samples, *rest), (self.batch, *rest)
                specs.append(Spec(name, output.dtype, shape, chunks, ("sample", *length, *axes)))
        return specs

    def _room(self, output: Output) -> int:
        """Return the rows that a batch has room for in a ragged array."""
        assert output.max_length is not None
        return self.batch * output.max_length

    @property
    def _manifest(self) -> Spec:
        n = len(self.specs)
        return Spec(_CHECKSUMS, np.dtype("u1"), (self.batches, n, 32), (1, n, 32), ("batch", "array", "byte"))

    # -- making and opening ----------------------------------------------------------------------

    def create(self, store: Any, job: Mapping[str, Any], overwrite: bool = False) -> Arrays:
        """Write an empty group and return its arrays.

        Parameters
        ----------
        store : store or path
            Where to.
        job : mapping
            What the samples depend on, JSON-compatible; ``outputs``, ``samples`` and ``batch_size`` among it.
        overwrite : bool
            Whether what is there is replaced.
        """
        # Whatever happens now, it may be replaced.
        mark: dict[str, Any] = {_ATTRIBUTE: {"format": _FORMAT}}
        group = zarr.open_group(store, mode="w" if overwrite else "w-", zarr_format=3, attributes=mark)
        for spec in (*self.specs.values(), self._manifest):
            _create(group, spec)
        arrays = self.arrays(group)
        digests = {name: _metadata_digest(array) for name, array in arrays.items()}
        description: dict[str, Any] = {"format": _FORMAT, "job": dict(job), "arrays": digests}
        # Last: a group without it was not made to its end.
        group.attrs[_ATTRIBUTE] = {**description, "sha256": _sha_of(description)}
        return arrays

    @classmethod
    def of(cls, group: zarr.Group) -> tuple[Layout, dict[str, Any], Arrays]:
        """Return the layout that a group was made with, the job, and the arrays, their metadata checked.

        Raises
        ------
        CheckpointError
            If it is no dataset.
        CorruptionError
            If its attributes or the metadata of an array were changed, naming it.
        """
        found: Any = dict(group.attrs).get(_ATTRIBUTE)
        if not found or "job" not in found:
            raise CheckpointError(
                "expected a dataset, got a group that is none, or one that was not made to its end"
            )
        found = dict(found)
        digest = found.pop("sha256", None)
        if digest != _sha_of(found) or found.get("format") != _FORMAT:
            raise CorruptionError("the dataset's attributes are damaged: they do not have their sha256")
        job = found["job"]
        outputs = {
            name: Output(**{**one, "shape": tuple(one["shape"])}) for name, one in job["outputs"].items()
        }
        layout = cls(outputs, job["samples"], job["batch_size"])
        arrays = layout.arrays(group)
        for name, array in arrays.items():
            if _metadata_digest(array) != found["arrays"].get(name):
                raise CorruptionError(f"{name}: metadata are damaged: they do not have their sha256")
        return layout, job, arrays

    @staticmethod
    def unfinished(group: zarr.Group) -> bool | None:
        """Say whether a group is a dataset that was not made to its end; None if it is something else."""
        found: Any = dict(group.attrs).get(_ATTRIBUTE)
        return None if not found or found.get("format") != _FORMAT else "job" not in found

    def arrays(self, group: zarr.Group) -> Arrays:
        """Return the arrays of a group, by name.

        Raises
        ------
        CorruptionError
            If one cannot be opened, naming it.
        """
        return {name: _opened(group, name) for name in (*self.specs, _CHECKSUMS)}

    # -- batches ---------------------------------------------------------------------------------

    def samples_of(self, batch: int) -> range:
        """Return the samples of a batch."""
        return range(batch * self.batch, min(self.samples, (batch + 1) * self.batch))

    def laid_out(self, batch: int, samples: Sequence[Sample | SampleUnavailable]) -> dict[str, Array]:
        """Return what a batch writes, array by array.

        A batch of which every sample is lost is a padded, empty one.
        """
        there = [not isinstance(sample, SampleUnavailable) for sample in samples]
        lost = [
            sample if isinstance(sample, SampleUnavailable) else SampleUnavailable() for sample in samples
        ]
        made: dict[str, Array] = {
            "valid": np.array(there, "?"),
            "failed": np.array([one.counts_as_failure for one in lost], "?"),
            "reason": np.array([one.reason for one in lost], dtype=object),
        }
        for name, output in self.outputs.items():
            parts = [None if isinstance(sample, SampleUnavailable) else sample[name] for sample in samples]
            made |= self._of_output(batch, name, output, parts)
        return made

    def _of_output(
        self, batch: int, name: str, output: Output, parts: Sequence[Array | None]
    ) -> dict[str, Array]:
        if not output.variable:
            return {name: self._padded(name, [(k, part) for k, part in enumerate(parts)], len(parts))}
        lengths = np.array([0 if part is None else len(part) for part in parts], "<i8")
        made = {f"{name}_length": lengths}
        if output.layout == "padded":
            cells = [((k, slice(0, len(part))), part) for k, part in enumerate(parts) if part is not None]
            return made | {name: self._padded(name, cells, len(parts))}
        room = self._room(output)
        begins = np.cumsum(lengths) - lengths
        places = [(slice(b, b + n), part) for b, n, part in zip(begins, lengths, parts, strict=True)]
        return made | {f"{name}_begin": batch * room + begins, name: self._padded(name, places, room)}

    def _padded(self, name: str, places: Iterable[tuple[Any, Array | None]], rows: int) -> Array:
        spec = self.specs[name]
        block = np.zeros((rows, *spec.shape[1:]), spec.dtype)
        for where, part in places:
            if part is not None:
                block[where] = part
        return block

    def region(self, name: str, batch: int) -> slice:
        """Return the rows of an array that a batch fills."""
        spec = self.specs[name]
        begin = batch * spec.chunks[0]
        return slice(begin, min(begin + spec.chunks[0], spec.shape[0]))

    def write(self, arrays: Arrays, batch: int, made: Mapping[str, Array]) -> bytes:
        """Write a batch, read it back, and vouch for it; return the digest of what vouches.

        Raises
        ------
        CorruptionError
            If it does not come back as it was written, naming the array.
        """
        sums = np.zeros((len(self.specs), 32), np.uint8)
        for number, name in enumerate(self.specs):
            arrays[name][self.region(name, batch)] = made[name]
            digest = checksum(made[name])
            self._proved(arrays, name, batch, digest)
            sums[number] = np.frombuffer(digest, np.uint8)
        arrays[_CHECKSUMS][batch] = sums
        return hashlib.sha256(sums.tobytes()).digest()

    def disown(self, arrays: Arrays, batches: Iterable[int]) -> None:
        """Vouch for some batches no more: they may be wrong all the same."""
        for batch in batches:
            arrays[_CHECKSUMS][batch] = np.zeros((len(self.specs), 32), np.uint8)

    def checksums(self, arrays: Arrays, batch: int) -> dict[str, bytes]:
        """Return what proves a batch, by array; nothing if nobody vouches for it.

        Raises
        ------
        CorruptionError
            If the manifest is damaged there.
        """
        try:
            found = np.asarray(arrays[_CHECKSUMS][batch], np.uint8)
        except Exception as error:  # of a codec, or of the store
            raise CorruptionError(f"checksums: batch {batch} is damaged: {error}") from error
        return (
            {name: row.tobytes() for name, row in zip(self.specs, found, strict=True)} if found.any() else {}
        )

    def row_digest(self, arrays: Arrays, batch: int) -> bytes:
        """Return the digest of what vouches for a batch now, as `write` did; empty if it is damaged."""
        try:
            return hashlib.sha256(b"".join(self.checksums(arrays, batch).values())).digest()
        except CorruptionError:
            return b""

    def vouched(self, arrays: Arrays, batch: int) -> bool:
        """Say whether a batch is there and proved, whole; a damaged one is not."""
        try:
            return self.prove(arrays, batch)
        except CorruptionError:
            return False

    def prove(self, arrays: Arrays, batch: int) -> bool:
        """Prove every array of a batch; return whether anybody vouches for it.

        Raises
        ------
        CorruptionError
            If one is damaged, naming it and the samples.
        """
        sums = self.checksums(arrays, batch)
        for name, digest in sums.items():
            self._proved(arrays, name, batch, digest)
        return bool(sums)

    def read(self, arrays: Arrays, name: str, batch: int) -> Array:
        """Return a batch of an array, proved; zeros and empty texts where nobody vouches for it yet.

        Raises
        ------
        CorruptionError
            If it is damaged, naming the array and the samples.
        """
        digest = self.checksums(arrays, batch).get(name)
        if digest is None:
            spec, region = self.specs[name], self.region(name, batch)
            shape = (region.stop - region.start, *spec.shape[1:])
            return np.full(shape, "", object) if spec.dtype is str else np.zeros(shape, spec.dtype)
        return self._proved(arrays, name, batch, digest)

    def _proved(self, arrays: Arrays, name: str, batch: int, digest: bytes) -> Array:
        numbers = self.samples_of(batch)
        where = f"{name}: samples {numbers.start} to {numbers.stop - 1} are damaged"
        try:
            array = np.asarray(arrays[name][self.region(name, batch)])
        except Exception as error:  # of a codec, or of the store
            raise CorruptionError(f"{where}: {type(error).__name__}: {error}") from error
        if checksum(array) != digest:
            raise CorruptionError(f"{where}: they do not have the checksum that is on record")
        return array


def checksum(array: Array) -> bytes:
    """Return the sha256 of dtype, shape and elements."""
    if array.dtype.kind in "biufc":
        plain = np.ascontiguousarray(array)
        digest = hashlib.sha256(f"{plain.dtype.newbyteorder('<').str}{plain.shape}".encode())
        digest.update(plain.reshape(-1).view(np.uint8).data)
        return digest.digest()
    text = json.dumps([str(one) for one in array.tolist()])
    return hashlib.sha256(f"text {text}".encode()).digest()


def _create(group: zarr.Group, spec: Spec) -> None:
    group.create_array(
        spec.name,
        shape=spec.shape,
        chunks=spec.chunks,
        dtype=spec.dtype,
        compressors=_COMPRESSORS,
        dimension_names=spec.dims,
    )


def _opened(group: zarr.Group, name: str) -> Any:
    try:
        return group[name]
    except Exception as error:  # whatever a changed byte makes of its metadata
        raise CorruptionError(f"{name}: metadata are damaged: {type(error).__name__}: {error}") from error


def _metadata_digest(array: Any) -> str:
    text = json.dumps(array.metadata.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _sha_of(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
