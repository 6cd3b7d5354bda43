"""Nested Python state to JSON and tensors and back, exactly and without pickle.

JSON has no tensors, tuples, bytes, NaN or keys other than strings: each is written as an object with one key that
starts with "$". A dictionary that has such keys of its own is written as a list of pairs, so nothing is ambiguous.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError


def pack(value: Any, prefix: str = "other") -> tuple[Any, dict[str, Tensor]]:
    """What JSON can hold of `value`, and its tensors, named by the way that leads to them."""
    tensors: dict[str, Tensor] = {}
    return _pack(value, prefix, tensors), tensors


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value `pack` was given."""
    if isinstance(value, list):
        return [unpack(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (kind, content), *_ = value.items()
        match kind:
            case "$tensor":
                if content not in tensors:
                    raise CheckpointError(
                        f"the checkpoint's state names tensor '{content}', which its files do not hold"
                    )
                return tensors[content]
            case "$tuple":
                return tuple(unpack(part, tensors) for part in content)
            case "$bytes":
                return bytes.fromhex(content)
            case "$float":
                return float(content)
            case "$pairs":
                return {unpack(key, tensors): unpack(part, tensors) for key, part in content}
    return {key: unpack(part, tensors) for key, part in value.items()}


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        name = path
        while name in tensors:
            name += "'"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, list | tuple):
        parts = [_pack(part, f"{path}/{index}", tensors) for index, part in enumerate(value)]
        return parts if isinstance(value, list) else {"$tuple": parts}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain:
            return {key: _pack(part, f"{path}/{key}", tensors) for key, part in value.items()}
        return {
            "$pairs": [
                [_pack(key, path, tensors), _pack(part, f"{path}/{key}", tensors)] for key, part in value.items()
            ]
        }
    raise CheckpointError(
        f"'{path}': a checkpoint holds numbers, text, tensors, lists and dictionaries, got {type(value).__name__}"
    )


def dense_state(model: nn.Module, embeddings: nn.Module) -> dict[str, Tensor]:
    """The model's state without that of its embeddings, which `state_dict` would copy first."""
    state: dict[str, Tensor] = {}
    left_out = tuple(embeddings.modules())
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not any(module is other for other in left_out):
            kept = {name: t for name, t in module._buffers.items() if name not in module._non_persistent_buffers_set}
            own = (module._parameters | kept).items()
            state |= {f"{prefix}.{name}" if prefix else name: t.detach() for name, t in own if t is not None}
    return state


def load_dense_state(model: nn.Module, embeddings: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Gives the model what `dense_state` took; its embeddings are left as they are."""
    expected = dense_state(model, embeddings)
    wrong = [
        f"'{name}' ({_shape(state.get(name))} saved, {_shape(expected.get(name))} expected)"
        for name in dict.fromkeys([*expected, *state])
        if _shape(state.get(name)) != _shape(expected.get(name))
    ]
    if wrong:
        raise CheckpointError(
            f"the checkpoint holds another model than the recipe describes: {', '.join(wrong)}; "
            "load it with the recipe it was saved with"
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(state[name])


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{list(tensor.shape)}"


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A torch optimizer's state as tensors by name and the rest as JSON."""
    state, tensors = pack(optimizer.state_dict(), "optimizer")
    return tensors, state


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Gives the optimizer the state `flatten_optimizer` took; its parameters must be the same, in the same order."""
    content = unpack(state, tensors)
    saved = [len(group["params"]) for group in content["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        raise CheckpointError(
            f"the checkpoint's optimizer has {saved} parameters by group, the model's has {present}; "
            "resume with the recipe the run was started with"
        )
    optimizer.load_state_dict(content)


def random_state(device: torch.device | None = None) -> dict[str, Any]:
    """The state of Python's and torch's generators, for `save`; that of the GPU too where the run is on one."""
    version, words, spare = random.getstate()
    state = {"python": [version, torch.tensor(words), spare], "torch": torch.get_rng_state()}
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Puts the generators back to a state `random_state` gave, the GPU's where there is one and one was saved."""
    version, words, spare = state["python"]
    random.setstate((version, tuple(words.tolist()), spare))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
