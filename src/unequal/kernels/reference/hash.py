"""The hash directory as a dictionary: id → slot, or how often a not yet admitted id was seen."""

import torch
from torch import Tensor


class HashDirectory:
    """Gives out slots from `next_slot` on, in the order in which ids are admitted."""

    def __init__(self, admit_after: int = 1, first_slot: int = 0) -> None:
        self.admit_after = admit_after
        self.next_slot = first_slot
        self._slots: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def find(self, ids: Tensor, otherwise: int = -1) -> Tensor:
        """The slot of every id; `otherwise` where it has none."""
        return torch.tensor([self._slots.get(id_, otherwise) for id_ in ids.tolist()], dtype=torch.int64)

    def insert(self, ids: Tensor, rare: int = -1) -> tuple[Tensor, Tensor]:
        """Like find, after admitting what has now been seen often enough; also the ids that were admitted, in slot order."""
        appeared = [id_ for id_ in ids.tolist() if id_ not in self._slots]
        for id_ in appeared:
            self._seen[id_] = min(self.admit_after, self._seen.get(id_, 0) + 1)
        admitted = []
        for id_ in appeared:
            if id_ not in self._slots and self._seen[id_] >= self.admit_after:
                del self._seen[id_]
                self._slots[id_] = self.next_slot
                self.next_slot += 1
                admitted.append(id_)
        return self.find(ids, rare), torch.tensor(admitted, dtype=torch.int64)

    @property
    def known(self) -> int:
        """How many ids `entries` gives."""
        return len(self._slots) + len(self._seen)

    def entries(self) -> tuple[Tensor, Tensor]:
        """All ids and their slots; an id seen n times without a slot has -1 - n. Live ids by slot, the others by id."""
        waiting = sorted(self._seen)
        ids = [*self._slots, *waiting]
        slots = [*self._slots.values(), *(-1 - self._seen[id_] for id_ in waiting)]
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)

    def restore(self, ids: Tensor, slots: Tensor, next_slot: int) -> None:
        """Takes the place of everything held: what `entries` gave."""
        pairs = list(zip(ids.tolist(), slots.tolist()))
        self._slots = {id_: slot for id_, slot in sorted(pairs, key=lambda pair: pair[1]) if slot >= 0}
        self._seen = {id_: -1 - slot for id_, slot in pairs if slot < 0}
        self.next_slot = next_slot

    @staticmethod
    def bytes_for(rows: int) -> int:
        """What one takes that holds so many."""
        return 16 * rows

    @property
    def bytes(self) -> int:
        return 16 * (len(self._slots) + len(self._seen))
