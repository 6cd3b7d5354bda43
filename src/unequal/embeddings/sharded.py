"""The tables of a module spread over the ranks of a job, behind the same interface.

A step, on every rank: the ids of each table are made unique; each goes once to its owner and its row comes back once; pooling and
lists are made here from those rows. Backward goes the same way: gradients are summed per distinct id, go to the owner once, and
there the row is updated once with the sum over all ranks, in rank order. Tables placed with `sums` are pooled by their owners.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, offsets_of
from ..errors import DataError
from ..exchange.columns import Gathered, sum_by_row
from ..exchange.hop import Routed
from ..exchange.mesh import Ints
from ..exchange.rare import share_rare
from ..exchange.rows import Journey, matrix_rows, read
from ..exchange.sums import Delivered
from ..kernels.request import FeatureSpec, FeatureSpecs, Request, TableRows
from .spread import Entries, Part, Step
from .widths import TablesOfWidth


class ShardedEmbeddings(TablesOfWidth):
    """`Embeddings` of which every rank holds a part. All ranks call forward and backward the same number of times; a rank without
    samples gives an empty batch. Gradients are averaged over the ranks, as torch's DistributedDataParallel does."""

    # Forward

    def _request(self, batch: Batch, insert: bool) -> Step:  # type: ignore[override]
        weights = self._check(batch)
        self._bring_copies()
        step = Step(batch, weights, insert, by_sums=weights is None and self._sum_exchange is not None)
        step.generation = self._generation
        if insert and self._rounds is not None:
            counts = np.bincount(self._table_of, np.diff(batch.bounds)[self._index], len(self.tables))
            self._rounds.reads.note(list(self.tables), counts.astype(np.int64).tolist())
        with self._timed("unique"):
            self._watch_drift(step)
            problem = self._make_unique(step)
            if problem is None:
                self._route(step, self._together)
        self._ask(step, problem)
        step.places = self._find_places(step)
        return step

    def _make_unique(self, step: Step) -> str | None:
        """Distinct ids of every table that is read by rows; gives what is wrong with an id, if one is."""
        if self._kernels.unique_tables is not None and self.placement.unique != "none":
            return self._make_all_unique(step)
        batch, bounds = step.batch, step.batch.bounds
        for t, (name, table) in enumerate(self.tables.items()):
            spans = [slice(int(bounds[self._index[f]]), int(bounds[self._index[f] + 1])) for f in self._readers[t]]
            parts = [batch.ids[span] for span in spans]
            ids = parts[0] if len(parts) == 1 else torch.cat(parts)
            if table.rows is not None and ids.numel():
                low, high = torch.aminmax(ids)
                if int(low) < 0 or int(high) >= table.rows:
                    return self._describe_wrong(batch, t, table.rows)
            if step.by_sums and name in self._summed:
                continue
            if self._watch is not None and step.insert:
                self._watch.note(self._step, name, ids)
            step.distinct[name], inverse, step.counts[name] = self._unique(name, ids)
            for f, part in zip(self._readers[t], torch.split(inverse, [part.numel() for part in parts])):
                step.inverses[self._spec_list[f].name] = part
        return None

    def _make_all_unique(self, step: Step) -> str | None:
        """The same in one call."""
        batch, bounds = step.batch, step.batch.bounds
        order = self._index[self._table_order]
        spans = np.stack([bounds[order], bounds[order + 1]], 1)
        asked = [name for name in self.tables if not (step.by_sums and name in self._summed)]
        wrong, found, inverse = self._kernels.unique_tables(batch.ids, spans, self._table_shapes[step.by_sums])
        if wrong is not None:
            rows = list(self.tables.values())[wrong].rows
            assert rows is not None
            return self._describe_wrong(batch, wrong, rows)
        for name, (distinct, counts) in zip(asked, found):
            step.distinct[name], step.counts[name] = distinct, counts
        parts = torch.split(inverse, np.diff(bounds).tolist())
        step.inverse, step.inverses = inverse, {n: parts[k] for n, k in zip(self._specs, self._index.tolist())}
        if self._watch is not None and step.insert:
            for name in asked:
                ids = [batch[self._spec_list[f].name].values for f in self._readers[self._numbers[name]]]
                self._watch.note(self._step, name, torch.cat(ids))
        return None

    def _describe_wrong(self, batch: Batch, table: int, rows: int) -> str:
        for f in self._readers[table]:
            spec = self._spec_list[f]
            part = batch[spec.name]
            outside = ((part.values < 0) | (part.values >= rows)).nonzero()
            if outside.numel():
                place = int(outside[0])
                sample = int(torch.searchsorted(part.offsets, place, right=True)) - 1
                return self._wrong_id(spec.name, sample, int(part.values[place]))
        raise AssertionError("no id is outside")

    def _ask(self, step: Step, problem: str | None) -> None:
        header = np.array([problem is not None, step.weights is not None], np.int64)
        for part in self._exchanges:
            distinct: list[Tensor | Routed | None] = [None] * len(part.numbers)
            counts: list[Tensor | None] = [None] * len(part.numbers)
            for k, p in enumerate(part.numbers):
                piece = self._wire[p]
                # Replicas are read where they are; only training tells the others what it will update.
                if problem is None and piece.table in self.copies:
                    distinct[k], counts[k] = step.routed.get(p), step.rest_counts.get(p)
                elif problem is None and (step.insert or not piece.replicated):
                    distinct[k], counts[k] = step.distinct.get(piece.table), step.counts.get(piece.table)
            journey = part.exchange.ask(distinct, counts, header)
            self._agree(journey.headers, problem, step)
            step.journeys.append(journey)
        delivered: Delivered | None = None
        exchange = self._sum_exchange if step.by_sums else None
        if exchange is not None:
            with self._timed("bags"):
                parts = {name: step.batch[name] for name in self.features}
                ids, lengths = ({n: getattr(part, what) for n, part in parts.items()} for what in ("values", "lengths"))
                delivered = exchange.ask(ids, lengths, step.size)
        with self._timed("locate"):
            if self._rounds is not None and step.insert:
                self._admit(step.journeys, delivered)
            for part, journey in zip(self._exchanges, step.journeys):
                journey.slots = part.owner.locate(journey.asked[-1], step.insert)
            if exchange is not None and delivered is not None:
                step.delivered = None if self._rounds is None else delivered
                storages = [self._storages[self._name_of(*shard)] for shard in exchange.tables]
                step.bags = exchange.locate(delivered, storages, step.insert)

    def _agree(self, headers: Ints, problem: str | None, step: Step) -> None:
        """All ranks refuse together, so that none waits for one that has stopped."""
        if headers[:, 0].any():
            told = self.mesh.gather(problem)
            rank, first = next((rank, text) for rank, text in enumerate(told) if text is not None)
            raise DataError(first if self.mesh.world == 1 else f"rank {rank}: {first}")
        if (headers[:, 1] != (step.weights is not None)).any():
            raise DataError("some ranks' batches have weights for their ids and some have none; give all the same")

    def _look_up(self, step: Step) -> tuple[Tensor, ...]:  # type: ignore[override]
        came: dict[int, list[Tensor]] = {}
        self.wait_for_copies()
        with self._timed("read"):
            for part, journey in zip(self._exchanges, step.journeys):
                for width, block in part.exchange.fetch(journey, part.owner.tables).items():
                    came.setdefault(width, []).append(block)
            rows = {width: blocks[0] if len(blocks) == 1 else torch.cat(blocks) for width, blocks in came.items()}
        with self._timed("pool"):
            entries = self._with_sums if step.by_sums else self._without_sums
            pooled, sequences = self._outputs_for(step)
            tables = [matrix_rows(rows.get(width, self._nothing(width))) for width in self._widths]
            tables += [self._storage_of(p).rows for p in self._replicas]
            step.local = self._local(step, entries, entries.forward, tables, updating=False)
            parts = [sequences[k][:, first:last] for k, first, last in entries.sequences]
            if entries.features:
                read(self._kernels, step.local, pooled, parts)
        if step.bags is not None and self._sum_exchange is not None:
            assert pooled is not None
            with self._timed("read"):
                sums = self._sum_exchange.pool(step.bags)
            with self._timed("bags"):
                self._sum_exchange.fetch(step.bags, sums, pooled)
                for name, lengths in self._mean_lengths(step).items():
                    if lengths is not None:
                        spec = self._specs[name]
                        pooled[:, spec.place : spec.place + spec.dim] /= lengths
        outputs = sequences if pooled is None else [pooled, *sequences]
        if self.output_dtype != torch.float32:
            outputs = [part.to(self.output_dtype) for part in outputs]
        self._count_repeated(step)
        return tuple(outputs)

    def _outputs_for(self, step: Step) -> tuple[Tensor | None, list[Tensor]]:
        like = torch.empty(0, device=self.device)
        take = self.mesh.empty
        pooled = take((step.size, self._columns), like) if self._columns else None
        listed = [spec for spec in self._spec_list if spec.pooling is None]
        return pooled, [take((step.batch[spec.name].values.numel(), spec.dim), like) for spec in listed]

    def _nothing(self, width: int) -> Tensor:
        return torch.empty(0, width, device=self.device)

    def _local(
        self, step: Step, entries: Entries, specs: FeatureSpecs, tables: Sequence[TableRows], updating: bool
    ) -> Request:
        """The lookups of this rank's samples over the rows that came. Replicas are read in their tables, by slot, and updated by
        the place of the distinct id."""
        batch, known = step.batch, step.local
        if updating and known is not None and not self._replicas:
            index, bounds = known.index, known.bounds
            return Request(tables, specs, step.size, index, known.ids, known.ids, known.offsets, known.weights, bounds)
        positions = [int(self._index[self._feature_numbers[name]]) for name in entries.features]
        if entries.single and step.inverse is not None:
            ids, index = self._follow(step, entries, positions, updating), np.array(positions, np.int64)
            return Request(tables, specs, step.size, index, ids, ids, batch.offsets, step.weights, batch.bounds)
        numbers, places = [], step.places
        for name, p in zip(entries.features, entries.pieces):
            if self._wire[p].replicated and not updating:
                numbers.append(self._storage_of(p).locate(batch[name].values, False))
            else:
                found, inverse = places[p], step.inverses[name]
                numbers.append(inverse if found is None or self._wire[p].replicated else found[inverse])
        if entries.single:
            ids, bounds = torch.empty_like(batch.ids), batch.bounds
            for at, part in zip(positions, numbers):
                ids[int(bounds[at]) : int(bounds[at + 1])] = part
            index = np.array(positions, np.int64)
            return Request(tables, specs, step.size, index, ids, ids, batch.offsets, step.weights, bounds)
        parts = [batch[name] for name in entries.features]
        ids, offsets = torch.cat(numbers), offsets_of(torch.cat([part.lengths for part in parts]))
        weights = None if step.weights is None else torch.cat([_float(part.weights) for part in parts])
        bounds = np.cumsum([0, *(part.numel() for part in numbers)], dtype=np.int64)
        return Request(tables, specs, step.size, np.arange(len(parts)), ids, ids, offsets, weights, bounds)

    def _follow(self, step: Step, entries: Entries, positions: Sequence[int], updating: bool) -> Tensor:
        """The place of every lookup's row, as the batch's ids lie."""
        assert step.inverse is not None and self._kernels.follow_places is not None
        bounds, ids, spans = step.batch.bounds.tolist(), torch.empty_like(step.batch.ids), []
        for at, p in zip(positions, entries.pieces):
            span, replicated = slice(bounds[at], bounds[at + 1]), self._wire[p].replicated
            if replicated and not updating:
                ids[span] = self._storage_of(p).locate(step.batch.ids[span], False)
            else:
                spans.append((span.start, span.stop, None if replicated else step.places[p]))
        self._kernels.follow_places(step.inverse, spans, ids)
        return ids

    def _mean_lengths(self, step: Step) -> dict[str, Tensor | None]:
        """Of the features that owners sum: what to divide by, [samples, 1], where they are averaged."""
        return {
            name: step.batch[name].lengths.clamp(min=1)[:, None] if feature.pooling == "mean" else None
            for name, feature in self.features.items()
            if feature.table.name in self._summed
        }

    # Backward

    def _update(self, step: Step, pooled: Tensor | None, sequences: list[Tensor | None]) -> None:  # type: ignore[override]
        factor = 1.0 if self.schedule is None else self.schedule(self._step)
        pooled = None if pooled is None else pooled.float()
        flats = self._send_back(step, pooled, [None if part is None else part.float() for part in sequences])
        work: list[Gathered] = []
        if step.generation != self._generation:
            self._locate_again(step, flats)
        with self._timed("update"):
            for part, journey, flat in zip(self._exchanges, step.journeys, flats):
                blocks, last = part.exchange.blocks, journey.asked[-1]
                if journey.slots.numel():
                    reads = last.counts if self._by_reads else None
                    tables = part.owner.tables
                    blocks.update(part.fused, tables, journey.slots, last.received, flat, factor, self._step, reads)
                names = [part.exchange.pieces[k].table for k in part.summed]
                by_rows = [k for k, name in zip(part.summed, names) if not (step.by_sums and name in self._summed)]
                work += [self._gather_rows(part, journey, flat, k) for k in by_rows]
        bags, exchange = step.bags, self._sum_exchange
        if bags is not None and exchange is not None:
            with self._timed("bags"):
                upstream = torch.zeros(step.size, self._columns, device=self.device) if pooled is None else pooled
                share = 1.0 / self.mesh.world
                factors = {n: share if mean is None else share / mean for n, mean in self._mean_lengths(step).items()}
                gradient = exchange.send_back(bags, upstream, factors)
            with self._timed("update"):
                work += self._update_bags(bags.request, gradient, factor)
        with self._timed("update"):
            self._update_gathered(work, factor)
            self._push_updated(step)
        self._step += 1
        if self._rounds is not None:
            with self._timed("round"):
                self._round(self._rounds)

    def _update_gathered(self, work: list[Gathered], factor: float) -> None:
        order = self._numbers
        if self._rare:
            rare = [item for item in work if item.shard.table in self._rare]
            rare.sort(key=lambda item: (order[item.shard.table], item.shard.first, item.shard.part))
            share_rare(self.mesh, self.placement, rare)
        work = [item for item in work if item.slots.numel()]
        for item in work:
            if item.shard.table not in self._statistics:
                rows, width = item.storage.rows, item.gradients.shape[1]
                ends = torch.tensor([0, item.slots.numel()], device=self.device)
                specs = FeatureSpecs([FeatureSpec("rows", 0, None, width, 0)])
                request = Request([rows], specs, 1, np.zeros(1, np.int64), item.slots, item.slots, ends)
                self._kernels.update(request, None, [item.gradients], lr_factor=factor, step=self._step)
        if self._statistics:
            work = [item for item in work if item.shard.table in self._statistics]
            work.sort(key=lambda item: (order[item.shard.table], item.shard.part, item.shard.first))
            self._column_sums.update(work, self.optimizers, factor, self._step)

    def _send_back(self, step: Step, pooled: Tensor | None, sequences: list[Tensor | None]) -> list[Tensor]:
        """Sums the gradients per distinct id and brings the sums to the owners."""
        entries = self._with_sums if step.by_sums else self._without_sums
        with self._timed("sum"):
            gradients, parts_of = self._zeros(step)
            tables = [matrix_rows(gradients.get(width, self._nothing(width))) for width in self._widths]
            replicas: dict[int, Tensor] = {}
            for p in self._replicas:
                count = step.distinct[self._wire[p].table].numel()
                replicas[p] = torch.zeros(count, self._wire[p].width, device=self.device)
                tables.append(matrix_rows(replicas[p]))
            local = self._local(step, entries, entries.backward, tables, updating=True)
            parts = [_columns(sequences[k], first, last) for k, first, last in entries.sequences]
            if entries.features and local.ids.numel():
                self._kernels.update(local, pooled, parts, lr_factor=-1.0 / self.mesh.world, step=0)
        return [
            part.exchange.send_back(journey, own, [replicas.get(p) for p in part.numbers])
            for part, journey, own in zip(self._exchanges, step.journeys, parts_of)
        ]

    def _zeros(self, step: Step) -> tuple[dict[int, Tensor], list[dict[int, Tensor]]]:
        """Zeros for the gradients of all rows that came, by width, and of them what belongs to each exchange."""
        counts = [part.exchange.hops[0].rows_of_width(journey.asked[0].sent)
                  for part, journey in zip(self._exchanges, step.journeys)]  # fmt: skip
        totals: dict[int, int] = {}
        for of_width in counts:
            for width, n in of_width.items():
                totals[width] = totals.get(width, 0) + n
        like = torch.empty(0, device=self.device)
        gradients = {width: self.mesh.empty((n, width), like).zero_() for width, n in totals.items()}
        next_of, parts = dict.fromkeys(totals, 0), []
        for of_width in counts:
            parts.append(
                {width: gradients[width][next_of[width] : next_of[width] + n] for width, n in of_width.items()}
            )
            for width, n in of_width.items():
                next_of[width] += n
        return gradients, parts

    def _gather_rows(self, part: Part, journey: Journey, flat: Tensor, k: int) -> Gathered:
        """The distinct rows of a piece that were read and the sums of their gradients."""
        blocks, received, width = part.exchange.blocks, journey.asked[-1].received, part.exchange.pieces[k].width
        slots = torch.cat([journey.slots[span] for span in blocks.slices(received)[k]])
        sizes = [int(received[block]) * part.exchange.pieces[block[1]].width for block in blocks.blocks]
        mine = [piece for piece, (_, p) in zip(torch.split(flat, sizes), blocks.blocks) if p == k]
        found = sum_by_row(self._kernels, slots, width, lists=torch.cat(mine).view(-1, width))
        return Gathered(self._shard_of(part.numbers[k]), part.owner.storages[k], *found)

    def _update_bags(self, request: Request, gradient: Tensor, factor: float) -> list[Gathered]:
        """Updates the rows that were pooled here; those that need numbers of whole rows are given back instead."""
        assert self._sum_exchange is not None
        summed = [t for t, (name, _) in enumerate(self._sum_exchange.tables) if name in self._statistics | self._rare]
        fused = [f for f, spec in enumerate(request.features) if spec.table not in summed]
        if fused and request.ids.numel():
            chosen = self._sum_exchange.specs
            if summed:
                chosen = FeatureSpecs(request.features[f] for f in fused)
            part = Request(
                request.tables, chosen, request.size, request.index[fused], request.ids, request.slots, request.offsets,
                None, request.bounds,
            )  # fmt: skip
            self._kernels.update(part, gradient, [], lr_factor=factor, step=self._step)
        work = []
        for t in summed:
            table, piece = self._sum_exchange.tables[t]
            storage = self._storages[self._name_of(table, piece)]
            readers = [f for f, spec in enumerate(request.features) if spec.table == t]
            slots = torch.cat([request.slots_of(f) for f in readers])
            lengths = torch.cat([request.offsets_of(f).diff() for f in readers])
            places = [request.features[f].place for f in readers]
            found = sum_by_row(self._kernels, slots, piece.width, pooled=(gradient, lengths, places))
            work.append(Gathered(self._shards[self._name_of(table, piece)], storage, *found))
        return work

    def _weight_gradients(self, step: Step, pooled: Tensor | None) -> Tensor | None:  # type: ignore[override]
        """Of this rank's ids, from the rows that came. Where columns are spread, the pieces' products add up."""
        assert step.weights is not None and step.local is not None
        own = super()._weight_gradients(step.local, pooled)
        entries, bounds = self._without_sums, step.local.bounds
        if own is None or entries.single:
            return own
        assert bounds is not None
        total = torch.zeros_like(step.weights)
        for e, name in enumerate(entries.features):
            at = step.batch.features.index(name)
            span = slice(int(step.batch.bounds[at]), int(step.batch.bounds[at + 1]))
            total[span] += own[int(bounds[e]) : int(bounds[e + 1])]
        return total


def _float(weights: Tensor | None) -> Tensor:
    assert weights is not None
    return weights.float()


def _columns(part: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if part is None else part[:, first:last]
