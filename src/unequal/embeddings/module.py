"""uq.Embeddings: all features of a model in one module. Forward looks rows up; backward updates them in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, Jagged
from ..errors import CheckpointError, DataError, RecipeError, UserError, nearest
from ..kernels import backend
from ..kernels.request import FeatureSpec, FeatureSpecs, Request, capturing
from ..optim import Optimizer, RowWiseAdagrad
from ..plan.placement import Shard
from ..schedule import Schedule
from ..storage import Storage, make_storage
from ..storage.memory import OutputPool
from ..storage.narrow import Narrowing, NarrowStorage
from ..storage.narrow_device import DeviceLocator
from ..storage.narrow_host import HostLocator
from ..tables import Feature, Table
from ..width import Rounds, Width
from .device import CHECK_EVERY, DeviceSide, bytes_of, out_of_memory
from .narrow import SHOWN, NarrowTables
from .output import Output


def exact_device(device: torch.device | str) -> torch.device:
    """With its number: 'cuda' and 'cuda:0' are the same device, but do not compare equal."""
    device = torch.device(device)
    return (
        torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
    )


class Embeddings(NarrowTables):
    """Embedding tables and the features that read them.

    In training mode, `backward` through the output updates the rows that were read, once each; there is no gradient tensor
    and no parameter, so the tables need no torch optimizer. In evaluation mode nothing changes.
    """

    def __init__(
        self,
        features: Mapping[str, Feature],
        *,
        optimizer: Optimizer | None = None,
        schedule: Schedule | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        output_dtype: torch.dtype = torch.float32,
        width: Width | None = None,
    ) -> None:
        """`width`: a budget, inside which rows are as wide as they deserve; without it all are whole."""
        super().__init__()
        if not features:
            raise RecipeError("Embeddings features", "at least one feature", dict(features))
        self.features: dict[str, Feature] = dict(features)
        self.optimizer = RowWiseAdagrad() if optimizer is None else optimizer
        self.schedule = schedule
        self.seed = seed
        self.device = exact_device(device)
        if output_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise RecipeError("Embeddings output_dtype", "torch.float32, float16 or bfloat16", output_dtype)
        self.output_dtype = output_dtype
        self._step = 0
        self._generation = 0
        self.tables: dict[str, Table] = {}
        for feature in self.features.values():
            known = self.tables.setdefault(feature.table.name, feature.table)
            if known != feature.table:
                raise RecipeError(f"table '{known.name}'", "one definition", f"two: {known} and {feature.table}")
        # On 'meta' there is no memory and nothing to compute: such a module is there to be sharded.
        self.optimizers = {name: table.optimizer or self.optimizer for name, table in self.tables.items()}
        """of every table: its own, or the module's; inside a width budget tables learn by another rate, see width/rates.py"""
        self._kernels = backend("cpu" if self.device.type == "meta" else self.device)
        self.width = width
        self._rounds = None if width is None else self._make_rounds(width)
        self._storages = {} if self.device.type == "meta" else self._make_storages()
        if self._rounds is not None:
            self._rounds.attach(self._narrow_storages())
        self._side = DeviceSide(self.device, len(self.features)) if self._kernels.on_device else None
        self._specs = self._lay_out()
        self._spec_list = FeatureSpecs(self._specs.values())
        self._columns = sum(spec.dim for spec in self._specs.values() if spec.pooling is not None)
        self._listed = any(spec.pooling is None for spec in self._specs.values())
        self._hashed = width is not None or any(table.rows is None for table in self.tables.values())
        self._rows = [storage.rows for storage in self._storages.values()]
        self._readers = [
            [f for f, spec in enumerate(self._spec_list) if spec.table == t] for t in range(len(self.tables))
        ]
        self._outputs = OutputPool()
        self._locator: DeviceLocator | None = None
        self._host_locator: HostLocator | None = None
        # Autograd calls backward only for a graph that ends in something that wants a gradient.
        self._anchor = torch.zeros(0, device=self.device, requires_grad=True)
        self._known_order: tuple[str, ...] = ()
        self._index = np.empty(0, np.int64)

    def _make_storages(self) -> dict[str, Storage]:
        sizes = {name: (table, bytes_of(table, self.optimizers[name])) for name, table in self.tables.items()}
        try:
            return {
                name: make_storage(
                    table, self.optimizers[name], self.seed, self._kernels, self.device, self._narrowing(name)
                )
                for name, table in self.tables.items()
            }
        except torch.OutOfMemoryError:
            raise out_of_memory(self.device, sizes, "while the tables were made") from None

    def _make_rounds(self, width: Width) -> Rounds:
        return Rounds(width, self.tables, self.optimizers, features=self.features)

    def _narrowing(self, table: str) -> Narrowing | None:
        return None if self._rounds is None else self._rounds.how[table]

    @property
    def step(self) -> int:
        """Updates done. After a step was captured in a CUDA graph, reading it waits for the device."""
        if self._side is not None and self._side.captured:
            self._step = int(self._side.clock[0])
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._side is not None:
            self._side.set_step(step)

    def before_replay(self) -> None:
        """To be called before a captured step is replayed where a schedule changes the learning rate: graphs hold it fixed."""
        assert self._side is not None, "only a module on a GPU can be captured"
        if self.schedule is not None:
            self._side.set_factor(self.schedule(self.step))

    def check(self) -> None:
        """Raises where a table was asked for an id that it does not hold. On a GPU this waits for the device; without it, such
        an id is noticed some steps later. It reads as zeros and updates nothing."""
        if self._side is not None:
            self._refuse_noted(wait=True)

    def _apply(self, fn: Any, recurse: bool = True) -> Embeddings:
        """Follows .to(device), .cuda() and .cpu() with its tables; their dtype is theirs alone."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = exact_device(fn(torch.zeros(0, device=self.device)).device)
        if device != self.device:
            kernels = backend(device)
            step = self.step
            try:
                for storage in self._storages.values():
                    storage.move(kernels, device)
            except torch.OutOfMemoryError:
                raise out_of_memory(device, self._sizes(), "while the tables were moved there") from None
            self.device, self._kernels = device, kernels
            self._side = DeviceSide(device, len(self.features)) if kernels.on_device else None
            self._locator = self._host_locator = None
            self._anchor = torch.zeros(0, device=device, requires_grad=True)
            self._spec_list = FeatureSpecs(self._specs.values())
            self.step = step
        return self

    def _sizes(self) -> dict[str, tuple[Table, int]]:
        return {name: (storage.table, sum(storage.memory().values())) for name, storage in self._storages.items()}

    def _lay_out(self) -> dict[str, FeatureSpec]:
        numbers = {name: number for number, name in enumerate(self.tables)}
        specs, column, sequence = {}, 0, 0
        for name, feature in self.features.items():
            dim, pooled = feature.table.dim, feature.pooling is not None
            specs[name] = FeatureSpec(
                name, numbers[feature.table.name], feature.pooling, dim, column if pooled else sequence
            )
            column, sequence = column + dim * pooled, sequence + (not pooled)
        return specs

    def forward(self, batch: Batch | Mapping[str, Jagged | Tensor]) -> Output:
        if self.device.type == "meta":
            raise UserError("these tables are on 'meta', which holds nothing; give them memory with uq.shard")
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):  # kernels are launched on the current device
                return self.forward(batch)
        if not isinstance(batch, Batch):
            batch = Batch.from_jagged({name: batch[name] for name in self.features if name in batch})
        update = self.training and torch.is_grad_enabled()
        request = self._request(batch, insert=update)
        if update:
            weights = request.weights if request.weights is not None else self._anchor
            outputs = _Lookup.apply(self._anchor, weights, self, request)  # type: ignore[no-untyped-call]
        else:
            outputs = self._look_up(request)
        pooled = outputs[0] if self._columns else None
        return Output(self._specs, batch, pooled, list(outputs[1:] if self._columns else outputs))

    def _check(self, batch: Batch) -> Tensor | None:
        """Refuses a batch that cannot be looked up; gives its weights as the kernels read them."""
        if batch.features != self._known_order:
            missing = [name for name in self.features if name not in batch.features]
            if missing:
                raise DataError(
                    f"the batch lacks feature '{missing[0]}'; {nearest(missing[0], batch.features)}"
                    if len(missing) == 1
                    else f"the batch lacks the features {missing}; it has {list(batch.features)}"
                )
            self._index = np.array([batch.features.index(name) for name in self.features], np.int64)
            self._known_order = batch.features
        if batch.ids.device != self.device:
            raise DataError(
                f"the batch is on '{batch.ids.device}', the tables are on '{self.device}'",
                remedy=f"move the batch with batch.to('{self.device}')",
            )
        if batch.ids.dtype != torch.int64 or not batch.ids.is_contiguous():
            batch.check()
            raise DataError("ids must be one contiguous int64 tensor; call .contiguous() on it")
        weights = batch.weights
        if weights is not None and (weights.dtype != torch.float32 or not weights.is_contiguous()):
            weights = weights.float().contiguous()
        if weights is not None and weights.numel() != batch.ids.numel():
            batch.check()
        if self._kernels.offsets is not None:
            offsets, smallest = self._kernels.offsets(batch.lengths)
            if smallest < 0 or int(offsets[-1]) != batch.ids.numel():
                batch.check()
            batch._offsets = offsets
        return weights

    def _request(self, batch: Batch, insert: bool) -> Request:
        weights = self._check(batch)
        listed = self._side is None or self._listed
        request = Request(
            self._rows, self._spec_list, batch.size, self._index, batch.ids, None, batch.offsets, weights,
            batch.bounds if listed else None,
        )  # fmt: skip
        if self._hashed:
            self._locate(request, insert)
        return request

    def _locate(self, request: Request, insert: bool) -> None:
        """Resolves ids to slots for the tables where the two differ."""
        request.generation = self._generation
        if self._side is not None and self._rounds is not None:
            if self._locator is None:
                self._locator = DeviceLocator(self._narrow_storages().values())
            try:
                request.slots = self._locator.locate(request, insert, self._side.wrong)
            except torch.OutOfMemoryError:
                raise out_of_memory(self.device, self._sizes(), "while rows were added") from None
            return
        if self._rounds is not None and self._kernels.Finder is not None:
            if self._host_locator is None:
                self._host_locator = HostLocator(self._narrow_storages().values(), self._readers)
            request.slots, wrong = self._host_locator.locate(request, insert)
            if wrong is not None:
                self._refuse_place(request, *wrong)
            return
        # The kernels for GPUs read slots only, so that they hold the ids of the other tables, too.
        request.slots = request.ids.clone() if self._side is not None else torch.empty_like(request.ids)
        for t, storage in enumerate(self._storages.values()):
            if storage.rows.strict:
                continue
            # All of a table's ids at once: admission counts a step's reads before it looks them up.
            spans = [slice(int(request.starts[f]), int(request.ends[f])) for f in self._readers[t]]
            if storage.table.rows is not None:
                for f, span in zip(self._readers[t], spans):
                    self._refuse_outside(request, f, request.ids[span], storage.table.rows)
            if len(spans) == 1 and isinstance(storage, NarrowStorage):
                storage.locate(request.ids[spans[0]], insert, out=request.slots[spans[0]])
                continue
            if len(spans) == 1:
                request.slots[spans[0]] = storage.locate(request.ids[spans[0]], insert)
                continue
            found = storage.locate(torch.cat([request.ids[span] for span in spans]), insert)
            for span, part in zip(spans, torch.split(found, [span.stop - span.start for span in spans])):
                request.slots[span] = part

    def _look_up(self, request: Request) -> tuple[Tensor, ...]:
        if self._side is not None:
            return self._look_up_on_device(request, self._side)
        counts = request.counts()
        pooled = self._outputs.take(request.size, self._columns) if self._columns else None
        sequences = [
            self._outputs.take(int(counts[f]), spec.dim)
            for f, spec in enumerate(request.features)
            if spec.pooling is None
        ]
        wrong = self._kernels.lookup(request, pooled, sequences)
        if wrong >= 0:
            self._refuse(request, wrong)
        outputs = (pooled, *sequences) if pooled is not None else tuple(sequences)
        if self.output_dtype != torch.float32:
            outputs = tuple(part.to(self.output_dtype) for part in outputs)
        return outputs

    def _look_up_on_device(self, request: Request, side: DeviceSide) -> tuple[Tensor, ...]:
        """Sequence outputs lie one after the other, so that one kernel can reach them all from one address."""
        kind: dict[str, Any] = {"dtype": self.output_dtype, "device": self.device}
        try:
            pooled = torch.empty(request.size, self._columns, **kind) if self._columns else None
            sequences: tuple[Tensor, ...] = ()
            if self._listed:
                counts = request.counts()
                shapes = [(int(counts[f]), spec.dim) for f, spec in enumerate(request.features) if spec.pooling is None]
                joined = torch.empty(sum(rows * dim for rows, dim in shapes), **kind)
                parts = torch.split(joined, [rows * dim for rows, dim in shapes])
                sequences = tuple(part.view(shape) for part, shape in zip(parts, shapes))
        except torch.OutOfMemoryError:
            raise out_of_memory(self.device, self._sizes(), "while a batch was looked up") from None
        self._kernels.lookup(request, pooled, sequences, side.wrong)
        self._refuse_noted(wait=False)
        return sequences if pooled is None else (pooled, *sequences)

    def _refuse_noted(self, wait: bool) -> None:
        assert self._side is not None
        noted = self._side.wrong_id(wait)
        if noted is not None:
            feature, id_ = noted
            spec = self._spec_list[feature]
            table = self.features[spec.name].table
            raise DataError(
                f"feature '{spec.name}' of a batch in the last {CHECK_EVERY * 2} or since the last check: id {id_} is not in "
                f"[0, {table.rows}) of table '{table.name}'; give the table more rows, or none for unbounded ids"
            )

    def _refuse(self, request: Request, position: int) -> None:
        counts = request.counts()
        f = int(np.searchsorted(counts.cumsum(), position, side="right"))
        self._refuse_place(request, f, position - int(counts[:f].sum()))

    def _refuse_place(self, request: Request, f: int, place: int) -> None:
        """`place`: of the wrong id among the feature's."""
        sample = int(torch.searchsorted(request.offsets_of(f), place, right=True)) - 1
        id_ = int(request.ids[int(request.starts[f]) + place])
        raise DataError(self._wrong_id(request.features[f].name, sample, id_))

    def _refuse_outside(self, request: Request, f: int, ids: Tensor, rows: int) -> None:
        """Ids of a table with a fixed number of rows that go through a directory, which knows any id."""
        if not ids.numel():
            return
        least, most = ids.aminmax()
        if int(least) >= 0 and int(most) < rows:
            return
        self._refuse_place(request, f, int(((ids < 0) | (ids >= rows)).nonzero()[0, 0]))

    def _wrong_id(self, feature: str, sample: int, id_: int) -> str:
        table = self.features[feature].table
        return (
            f"feature '{feature}', sample {sample} of the batch: id {id_} is not in [0, {table.rows}) of table '{table.name}'; "
            "give the table more rows, or none for unbounded ids"
        )

    def _update(self, request: Request, pooled: Tensor | None, sequences: list[Tensor | None]) -> None:
        if request.generation != self._generation and self._hashed:
            # Rows were laid out anew since they were looked up. What has no row by now is not updated.
            self._locate(request, insert=False)
        side, captures = self._side, capturing(self.device)
        # A captured step does not run now, and its factor must not be fixed: before_replay sets it.
        factor = 1.0 if self.schedule is None or captures else self.schedule(self.step)
        if side is None:
            self._kernels.update(request, pooled, sequences, lr_factor=factor, step=self._step)
        else:
            if captures:
                side.captured = True
            else:
                side.set_factor(factor)
            try:
                self._kernels.update(request, pooled, sequences, clock=side.clock)
            except torch.OutOfMemoryError:
                raise out_of_memory(self.device, self._sizes(), "while rows were updated") from None
        self._step += not captures
        if self._rounds is not None and self._rounds.after_step(self._step) is not None:
            self._generation += 1

    def _weight_gradients(self, request: Request, pooled: Tensor | None) -> Tensor | None:
        """Gradients of the per-id weights: each id's row times its bag's gradient. Rows are read before they change."""
        assert request.weights is not None
        gradient = torch.zeros_like(request.weights)
        if pooled is None:
            return gradient
        for f, spec in enumerate(request.features):
            if spec.pooling is None:
                continue
            span = slice(int(request.starts[f]), int(request.ends[f]))
            alone = FeatureSpec(spec.name, spec.table, None, spec.dim, 0)
            rows = torch.empty(int(request.counts()[f]), spec.dim, device=self.device)
            part = Request(
                request.tables, FeatureSpecs([alone]), request.size, request.index[f : f + 1], request.ids, request.slots,
                request.offsets, bounds=request.bounds,
            )  # fmt: skip
            self._kernels.lookup(part, None, [rows])
            lengths = request.offsets_of(f).diff()
            upstream = pooled[:, spec.place : spec.place + spec.dim]
            if spec.pooling == "mean":
                upstream = upstream / lengths.clamp(min=1)[:, None]
            gradient[span] = (rows * upstream.repeat_interleave(lengths, 0)).sum(1)
        return gradient

    def shard_storages(self) -> list[tuple[Shard, Storage]]:
        """Every table's storage and which part of the table it is: here the whole."""
        return [(Shard(name, 0, storage.table.dim, 0, 1, 0), storage) for name, storage in self._storages.items()]

    def memory(self) -> dict[str, int]:
        """Bytes of weights, optimizer state and directories over all tables."""
        parts = [storage.memory() for storage in self._storages.values()]
        return {name: sum(part[name] for part in parts) for name in ("weights", "optimizer", "directory")}

    def rows(self) -> dict[str, int]:
        """Live rows of each table."""
        return {name: storage.live for name, storage in self._storages.items()}

    def _key(self, name: str) -> str:
        """What the tensors of a storage are called in a state_dict."""
        return name

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, storage in self._storages.items():
            for part, tensor in storage.state().items():
                destination[f"{prefix}{self._key(name)}.{part}"] = tensor
        destination[f"{prefix}step"] = torch.tensor(self.step, dtype=torch.int64)
        destination |= {prefix + name: numbers for name, numbers in self._shown_numbers().items()}

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # arguments: local metadata, strict, missing keys, unexpected keys, error messages
        strict, missing, unexpected, errors = arguments[-4:]
        known = {f"{prefix}{name}" for name in ("step", *SHOWN)}
        for name, storage in self._storages.items():
            # By exact name: a table may be called "a.b" beside one called "a".
            keys = {part: f"{prefix}{self._key(name)}.{part}" for part in storage.parts}
            known |= set(keys.values())
            parts = {part: state[key] for part, key in keys.items() if key in state}
            if not parts:
                missing.append(keys["weight"])
                continue
            try:
                storage.load(parts)
            except CheckpointError as error:
                errors.append(str(error))
        if f"{prefix}step" in state:
            self.step = int(state[f"{prefix}step"])
        else:
            missing.append(f"{prefix}step")
        self.tables_filled(shown=self._shown_of({name: state.get(prefix + name) for name in SHOWN}))
        if strict:
            unexpected += [key for key in state if key.startswith(prefix) and key not in known]

    def extra_repr(self) -> str:
        tables = ", ".join(f"{t.name}[{t.rows if t.rows else 'unbounded'} × {t.dim}]" for t in self.tables.values())
        return f"features={list(self.features)}, tables={tables}, optimizer={self.optimizer}"


class _Lookup(torch.autograd.Function):
    """Lookup whose backward is the update."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor, module: Embeddings, request: Request) -> tuple[Tensor, ...]:
        ctx.module, ctx.request = module, request
        ctx.set_materialize_grads(False)
        outputs = module._look_up(request)
        ctx.sampled = module._sampled(outputs)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        module, request = ctx.module, ctx.request
        pooled = gradients[0] if module._columns else None
        sequences = list(gradients[1:] if module._columns else gradients)
        if ctx.sampled is not None:
            module._note_savings(ctx.sampled, gradients, request.size)
        wanted = ctx.needs_input_grad[1] and request.weights is not None
        weights = module._weight_gradients(request, pooled) if wanted else None
        module._update(request, pooled, sequences)
        return None, weights, None, None
