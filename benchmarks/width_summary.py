"""What the trainings of width_quality say: means and deviations, at equal weights and at equal memory, against the full model."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .width_training import DIM, KEPT, METHODS, Job, Setting, whole_bytes

if TYPE_CHECKING:
    from rich.table import Table

    Lines = Sequence[Mapping[str, Any]]

DEFAULT, IN_BYTES = "water-filling", "in_bytes"
"""the policy, by shares of the values and by bytes"""
OURS = (DEFAULT, IN_BYTES, "full", "full_decay")
NOISE = 2.0
"""standard errors within which two means count as equal"""
BARS: dict[str, tuple[float, ...]] = {
    "frappe": (0, 0.002, 0.004, 0.008, 0.015),
    "ml1m_random": (0, 0, 0.003, 0.009, 0.025),
    "ml1m_time": (0, 0, 0, 0.003, 0.012),
    "generated": (0, 0, 0.0005, 0.001, 0.002),
}
"""largest loss of AUC against the full model, for the kept shares from 50% to 2%; 0: none beyond noise"""


def summarised(lines: Lines) -> dict[str, Any]:
    """Data set → cells, what is reached in the same memory, and the verdicts on the default policy."""
    by_data: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_data[line["job"]["data"]].append(line)
    return {"dim": DIM, "kept": list(KEPT), "data": {name: of_data(part) for name, part in by_data.items()}}


def of_data(lines: Lines) -> dict[str, Any]:
    groups: dict[tuple[str, float, Setting], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        job = Job.of(line)
        groups[job.method, job.keep, job.setting].append(line)
    for part in groups.values():
        part.sort(key=lambda line: int(line["job"]["seed"]))
    cells: dict[str, dict[str, Any]] = defaultdict(dict)
    for method, keep in sorted({key[:2] for key in groups}, key=lambda key: (METHODS.index(key[0]), -key[1])):
        settings = {s: part for (m, k, s), part in groups.items() if (m, k) == (method, keep)}
        best = best_of(settings)
        tried = max(len(settings), *(int(line.get("tried", 1)) for line in settings[best]))
        cells[method][f"{keep:g}"] = described(best, settings[best], tried)
    rows = int(lines[0]["of_rows"])
    full_bytes = whole_bytes(rows)
    found: dict[str, Any] = {"rows": rows, "full_bytes": full_bytes, "methods": dict(cells)}
    found["equal_bytes"] = equal_bytes(cells, full_bytes)
    found["verdicts"] = verdicts(str(lines[0]["job"]["data"]), cells)
    found["byte_verdicts"] = byte_verdicts(found["equal_bytes"])
    return found


def best_of(settings: Mapping[Setting, Lines]) -> Setting:
    """On validation data, by the seeds that all settings have been tried with: others must not decide what they are compared
    by."""
    tried = set.intersection(*({line["job"]["seed"] for line in lines} for lines in settings.values()))

    def score(setting: Setting) -> float:
        return statistics.fmean(
            [line["validation"] for line in settings[setting] if line["job"]["seed"] in tried] or [0]
        )

    return max(settings, key=score)


def described(setting: Setting, lines: Lines, tried: int) -> dict[str, Any]:
    scores = [float(line["auc"]) for line in lines]
    whole = int(lines[0]["of_rows"]) * 4 * (DIM + (DIM if setting.optimizer == "adagrad" else 1))
    sizes = {part: round(statistics.fmean(line["bytes"][part] for line in lines)) for part in lines[0]["bytes"]}
    return {
        "auc": round(statistics.fmean(scores), 5),
        "deviation": round(statistics.stdev(scores), 5) if len(scores) > 1 else None,
        "scores": scores,
        "validation": round(statistics.fmean(line["validation"] for line in lines), 5),
        "validations": [line["validation"] for line in lines],
        "seeds": [line["job"]["seed"] for line in lines],
        "setting": asdict(setting),
        "settings_tried": tried,
        "epochs": [line["epoch"] for line in lines],
        "kept": round(statistics.fmean(line["kept"] for line in lines), 5),
        "rows": round(statistics.fmean(line["rows"] for line in lines)),
        "bytes": sum(sizes.values()),
        "parts": sizes,
        "net_compression": round(whole / sum(sizes.values()), 3),
        "seconds": round(statistics.fmean(line["seconds"] for line in lines), 1),
    }


def recalled(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trainings that a summary was made of, as far as it says: those with the settings that were chosen."""
    lines = []
    for data, part in result["data"].items():
        for method, cells in part["methods"].items():
            for keep, cell in cells.items():
                same = {"kept": cell["kept"], "rows": cell["rows"], "of_rows": part["rows"], "bytes": cell["parts"]}
                seeds = cell.get("seeds", range(len(cell["scores"])))
                validations = cell.get("validations", [cell["validation"]] * len(cell["scores"]))
                for seed, auc, epoch, validation in zip(seeds, cell["scores"], cell["epochs"], validations):
                    job = Job(data=data, method=method, keep=float(keep), setting=Setting(**cell["setting"]), seed=seed)
                    own = {"auc": auc, "epoch": epoch, "validation": validation, "seconds": cell["seconds"]}
                    lines.append({"job": asdict(job), **same, **own, "tried": cell["settings_tried"]})
    return lines


def equal_bytes(cells: Mapping[str, Mapping[str, Any]], full: int) -> dict[str, Any]:
    """For shares of what the full model with row-wise AdaGrad takes: of all cells of a method that fit, whatever they keep, the
    one that is best on validation data."""
    found: dict[str, Any] = {}
    for share in KEPT:
        for method, own in cells.items():
            fitting = [cell | {"keep": float(keep)} for keep, cell in own.items() if cell["bytes"] <= share * full]
            if fitting:
                best = max(fitting, key=lambda cell: float(cell["validation"]))
                found.setdefault(method, {})[f"{share:g}"] = {
                    name: best[name] for name in ("auc", "deviation", "keep", "setting", "bytes", "scores")
                }
    return found


def error_of(*cells: Mapping[str, Any]) -> float:
    """Of the difference of two means."""
    parts = [cell["deviation"] ** 2 / len(cell["scores"]) for cell in cells if cell["deviation"] is not None]
    return float(sum(parts) ** 0.5)


def verdicts(data: str, cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The default policy against the better of the full models, and against the best of the others that keep as much."""
    found: dict[str, Any] = {}
    whole = [cells[name]["1"] for name in ("full", "full_decay") if name in cells]
    mine, full = cells.get(DEFAULT, {}), max(whole, key=lambda cell: float(cell["auc"]), default=None)
    allowed = dict(zip(KEPT, BARS.get(data, ())))
    for keep in KEPT:
        name = f"{keep:g}"
        if name not in mine:
            continue
        verdict: dict[str, Any] = {}
        if full is not None:
            loss, noise = full["auc"] - mine[name]["auc"], NOISE * error_of(full, mine[name])
            verdict |= {"loss": round(loss, 5), "noise": round(noise, 5)}
            if keep in allowed:
                verdict |= {"allowed": allowed[keep], "reached": loss <= (allowed[keep] or noise)}
        others = {method: part[name] for method, part in cells.items() if method not in OURS and name in part}
        found[name] = verdict | against(mine[name], others)
    return found


def against(mine: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The best of the others, and whether ours is not worse within noise."""
    if not others:
        return {}
    best = max(others, key=lambda method: float(others[method]["auc"]))
    ahead = mine["auc"] - others[best]["auc"]
    equal = ahead >= -NOISE * error_of(mine, others[best])
    return {"best_other": best, "ahead": round(ahead, 5), "not_worse": equal}


def byte_verdicts(equal: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The default policy with as many bytes as it was given, against the best that the others do with them."""
    return {
        share: against(mine, {name: own[share] for name, own in equal.items() if name not in OURS and share in own})
        for share, mine in equal.get(IN_BYTES, {}).items()
    }


def score(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    return f"{cell['auc']:.4f}" + ("" if cell["deviation"] is None else f" ±{cell['deviation']:.4f}")


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title=f"AUC of the test part, dim {result['dim']}: mean ± deviation")
    for name in ("data", "method"):
        view.add_column(name, no_wrap=True)
    for keep in result["kept"]:
        view.add_column(f"{100 * keep:g}%", justify="right")
    for data, part in result["data"].items():
        for method, cells in part["methods"].items():
            if method.startswith("full"):
                view.add_row(data, method, score(cells["1"]))
            else:
                view.add_row(data, method, *row(cells, result["kept"]))
        for what, key in (("loss", "loss"), ("allowed", "allowed"), ("ahead of the best other", "ahead")):
            numbers = [part["verdicts"].get(f"{keep:g}", {}).get(key) for keep in result["kept"]]
            view.add_row(data, what, *("" if n is None else f"{n:.4f}" for n in numbers), style="dim")
        sizes = [part["methods"].get(DEFAULT, {}).get(f"{keep:g}") for keep in result["kept"]]
        view.add_row(
            data,
            f"net × of {DEFAULT}",
            *("" if n is None else f"{n['net_compression']:.1f}" for n in sizes),
            style="dim",
        )
        view.add_section()
        for method, cells in part["equal_bytes"].items():
            view.add_row(f"{data}, bytes", method, *row(cells, result["kept"]))
        view.add_section()
    return view


def row(cells: Mapping[str, Any], kept: Iterable[float]) -> list[str]:
    return [score(cells.get(f"{keep:g}")) for keep in kept]
