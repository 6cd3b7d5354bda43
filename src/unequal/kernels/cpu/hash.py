"""The directory of tables with unbounded ids (csrc/hash.cpp)."""

import ctypes

import torch
from torch import Tensor

from .describe import (
    native_library,
    pointer,
    thread_count,
)
from .steps import unique


class HashDirectory:
    """Id → slot by open addressing; 12 bytes an entry, at most 3/4 full."""

    def __init__(self, admit_after: int = 1, first_slot: int = 0) -> None:
        self.admit_after = admit_after
        self.next_slot = first_slot
        self._used = 0
        self._table = self._empty(64)

    @staticmethod
    def _empty(capacity: int) -> Tensor:
        return torch.full((capacity, 3), -1, dtype=torch.int32)

    @property
    def _capacity(self) -> ctypes.c_int64:
        return ctypes.c_int64(self._table.shape[0])

    def _make_room(self, entries: int) -> None:
        capacity = self._table.shape[0]
        while entries * 4 > capacity * 3:
            capacity *= 2
        if capacity > self._table.shape[0]:
            larger = self._empty(capacity)
            native_library().uq_hash_rehash(
                pointer(self._table), self._capacity, pointer(larger), ctypes.c_int64(capacity)
            )
            self._table = larger

    def find(self, ids: Tensor, otherwise: int = -1) -> Tensor:
        return self._find(ids.contiguous(), otherwise)[0]

    def _find(self, ids: Tensor, otherwise: int) -> tuple[Tensor, int]:
        slots = torch.empty_like(ids)
        missing = native_library().uq_hash_find(
            pointer(self._table),
            self._capacity,
            pointer(ids),
            ctypes.c_int64(ids.numel()),
            ctypes.c_int64(otherwise),
            pointer(slots),
            thread_count(ids.numel()),
        )
        return slots, int(missing)

    def insert(self, ids: Tensor, rare: int = -1) -> tuple[Tensor, Tensor]:
        ids = ids.contiguous()
        slots, missing = self._find(ids, -1)
        if missing == 0:
            return slots, ids[:0]
        if (self._used + missing) * 4 > self._table.shape[0] * 3:  # repeated ids need no room: count what is really new
            self._make_room(self._used + unique(ids[slots < 0])[0].numel())
        admitted, used = torch.empty(missing, dtype=torch.int64), ctypes.c_int64(self._used)
        count = int(
            native_library().uq_hash_insert(
                pointer(self._table),
                self._capacity,
                pointer(ids),
                ctypes.c_int64(ids.numel()),
                ctypes.c_int64(self.next_slot),
                ctypes.c_int64(self.admit_after),
                ctypes.c_int64(rare),
                pointer(slots),
                pointer(admitted),
                ctypes.byref(used),
            )
        )
        self._used, self.next_slot = used.value, self.next_slot + count
        return slots, admitted[:count]

    @property
    def known(self) -> int:
        return self._used

    def entries(self) -> tuple[Tensor, Tensor]:
        ids = torch.empty(self._used, dtype=torch.int64)
        slots = torch.empty(self._used, dtype=torch.int64)
        native_library().uq_hash_entries(pointer(self._table), self._capacity, pointer(ids), pointer(slots))
        live = slots >= 0
        by_slot, by_id = slots[live].argsort(), ids[~live].argsort()
        return torch.cat([ids[live][by_slot], ids[~live][by_id]]), torch.cat(
            [slots[live][by_slot], slots[~live][by_id]]
        )

    def restore(self, ids: Tensor, slots: Tensor, next_slot: int) -> None:
        self._table, self._used, self.next_slot = self._empty(64), ids.numel(), next_slot
        self._make_room(self._used)
        ids, slots = ids.contiguous(), slots.contiguous()
        native_library().uq_hash_put(
            pointer(self._table), self._capacity, pointer(ids), pointer(slots), ctypes.c_int64(ids.numel())
        )

    @staticmethod
    def bytes_for(rows: int) -> int:
        """What one takes that has come to hold so many."""
        return 12 * max(64, 1 << (-(-4 * rows // 3) - 1).bit_length())

    @property
    def bytes(self) -> int:
        return self._table.numel() * 4
