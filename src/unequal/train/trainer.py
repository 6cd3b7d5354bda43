"""The training loop, top to bottom: build, resume, step, log, evaluate, checkpoint, and the test at the end."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ..batch import Batch
from ..errors import UserError
from . import checkpoint
from .build import build_dense_optimizer, load_dense_optimizer
from .config import Recipe
from .device import Device
from .evaluate import make_report
from .progress import Progress, progress_for
from .run import CHECKPOINTS, RECIPE, REPORT, Report, RunLog, create_run_folder, write_json
from .session import load_weights, make_model, open_data, score, scoring_reader, training_reader

OUT_OF_MEMORY = "lower run.batch_size or run.evaluation_batch_size, make the model smaller, or choose --device cpu"


@dataclass(slots=True)
class Position:
    """Where a run stands: what a checkpoint holds beside tensors and the reader's position."""

    step: int = 0
    epoch: int = 0
    """Finished epochs."""
    samples: int = 0
    seconds: float = 0.0
    """Spent training, over all processes the run took; evaluations and checkpoints do not count."""
    untimed_samples: int = 0
    """Those of first steps on a GPU: there kernels are compiled, which `seconds` does not count."""
    loss_sum: float = 0.0
    loss_count: int = 0
    """Steps since the last line of the log."""
    evaluated_step: int = -1
    best_score: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    metrics_bytes: int = 0
    """Length of metrics.jsonl at this point: a resumed run cuts the file here."""

    @property
    def samples_per_second(self) -> float:
        return (self.samples - self.untimed_samples) / self.seconds if self.seconds else 0.0


def train(recipe: Recipe, *, resume: Path | None = None, progress: bool = True, device: str = "auto") -> Report:
    """Trains the recipe into a fresh run folder, or goes on with the run in `resume`, and scores the test part.

    `device`: cpu, cuda, cuda:N, or auto for a GPU where there is one. A run may be resumed on another.
    """
    place = Device(device)
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    with progress_for(progress) as shown, place.explained(OUT_OF_MEMORY):
        trainer = Trainer(recipe, resume, shown, place)
        try:
            trainer.fit()
        except KeyboardInterrupt:
            saved = checkpoint.latest(trainer.folder / CHECKPOINTS)
            what = f"go on with --resume {trainer.folder}" if saved else "before the first checkpoint"
            raise KeyboardInterrupt(f"at step {trainer.at.step:,}; {what}") from None
        return trainer.finish()


class Trainer:
    """A run in progress: model, readers, optimizer, and where it stands."""

    def __init__(self, recipe: Recipe, resume: Path | None, shown: Progress, device: Device) -> None:
        self.data = open_data(recipe, shown.say)
        self.reader = training_reader(recipe, self.data)
        self.validation = scoring_reader(recipe, self.data, "validation", self.reader.statistics)
        self.total_steps = self.reader.batches_per_epoch * recipe.run.epochs
        if recipe.run.steps:
            self.total_steps = min(self.total_steps, recipe.run.steps)
        self.schedule = recipe.schedule.build(self.total_steps)
        self.recipe = replace(recipe, schedule=replace(recipe.schedule, total_steps=self.schedule.total_steps))
        if recipe.run.early_stop and not self.validation.rows:
            raise UserError(
                "run.early_stop: expected a validation part, got none; set data.split.validation, or 0 here"
            )

        self.device = device
        if device.is_gpu:
            shown.say(f"training on {device.name} ({device.torch})")
        self.model, self.embeddings = make_model(self.recipe, device.torch, self.schedule)
        self.optimizer = build_dense_optimizer(recipe.optimizer, self.model.parameters())
        self.at, self.shown = Position(), shown
        self.saved: Position | None = None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device.torch)
        """Where losses are read now and then only: their sum since the last line of the log."""
        if resume is None:
            self.folder = create_run_folder(recipe)
            self.recipe = replace(self.recipe, run=replace(recipe.run, folder=str(self.folder)))
        else:
            self.folder = resume
            self._resume()
        self.settled_step, self.warm = self.at.step, False
        (self.folder / RECIPE).write_text(self.recipe.to_toml(), encoding="utf-8")

    def fit(self) -> None:
        """Steps until the epochs or the steps are over, or nothing improves any more."""
        run, at = self.recipe.run, self.at
        self.shown.start(self.total_steps, at.step)
        with RunLog(self.folder, at.metrics_bytes, at.step) as self.log:
            self.clock = self.shown_at = time.perf_counter()
            while at.epoch < run.epochs and not self._over():
                for batch in self.reader:
                    self._step(batch)
                    if at.step % run.log_every == 0:
                        self._log()
                    if run.evaluate_every and at.step % run.evaluate_every == 0:
                        self._evaluate()
                    if run.checkpoint_every and at.step % run.checkpoint_every == 0:
                        self._checkpoint()
                    if self._over():
                        break
                else:
                    at.epoch += 1
                    if not run.evaluate_every:
                        self._evaluate()
            if at.step:
                self._evaluate()
                self._checkpoint()

    def finish(self) -> Report:
        """Scores the best evaluation's weights, or the last ones, on the test part and writes the report."""
        at, best_step = self.at, None
        if self.recipe.run.select_best and at.best_step is not None:
            best_step = at.best_step
            if best_step != at.step:
                load_weights(self.model, checkpoint.load(checkpoint.path_of(self.folder / CHECKPOINTS, best_step)))
        test = scoring_reader(self.recipe, self.data, "test", self.reader.statistics)
        scored = next((reader for reader in (test, self.validation) if reader.rows), None)
        report = make_report(
            self.recipe,
            self.data,
            self.folder,
            self.embeddings,
            self.device,
            None if scored is None else scored.part,
            None if scored is None else score(self.model, scored, self.recipe.data.labels, self.device),
            readers=(self.reader, self.validation, test),
            samples_per_second=at.samples_per_second,
            seconds=at.seconds,
            steps=at.step,
            best_step=best_step,
        )
        write_json(self.folder / REPORT, report.to_json())
        return report

    def _over(self) -> bool:
        run = self.recipe.run
        stopped = bool(run.early_stop) and self.at.evaluations_since_best >= run.early_stop
        return stopped or (bool(run.steps) and self.at.step >= run.steps)

    def _step(self, batch: Batch) -> None:
        at = self.at
        rate = self.recipe.optimizer.dense_lr * self.schedule(at.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        size, batch = batch.size, self.device.move(batch)
        loss = weighted_loss(self.model(batch), batch)
        if not self.device.deferred:
            value = loss.item()
            if not math.isfinite(value):
                raise UserError(self._diverged(f"the loss of step {at.step + 1:,} is {value}"))
            at.loss_sum += value
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

        at.step, at.samples, at.loss_count = at.step + 1, at.samples + size, at.loss_count + 1
        if self.device.deferred:
            self.loss_sum += loss.detach()
            if not self.warm:
                self.device.synchronize()
                self.warm, self.clock, at.untimed_samples = True, time.perf_counter(), at.untimed_samples + size
            due = time.perf_counter() - self.shown_at >= self.shown.interval
            if not due and at.step != self.total_steps:
                return
            self._settle()
        else:
            self._tick()
        self.shown_at = self.clock
        self.shown.update(at.step, at.loss_sum / at.loss_count, at.samples_per_second)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.at.seconds, self.clock = self.at.seconds + now - self.clock, now

    def _settle(self) -> None:
        """Where steps do not wait for the device: waits for it now, and finds out how the last ones went."""
        at, first = self.at, self.settled_step + 1
        if not self.device.deferred or first > at.step:
            return
        at.loss_sum = self.loss_sum.item()
        self.device.synchronize()
        self._tick()
        self.embeddings.check()
        if not math.isfinite(at.loss_sum):
            alone = f"the loss of step {at.step:,} is"
            when = f"between steps {first:,} and {at.step:,} the loss became" if first < at.step else alone
            raise UserError(self._diverged(f"{when} {at.loss_sum}"))
        self.settled_step = at.step

    def _log(self) -> None:
        at = self.at
        self._settle()
        values = {
            "loss": at.loss_sum / at.loss_count,
            "learning_rate_factor": self.schedule(at.step - 1),
            "samples": at.samples,
            "samples_per_second": at.samples_per_second,
        }
        at.loss_sum, at.loss_count = 0.0, 0
        self.loss_sum.zero_()
        self.log.write("train", at.step, at.epoch, values)

    def _evaluate(self) -> None:
        """Scores the validation part. Where it is the best so far, that is worth a checkpoint."""
        at = self.at
        if not self.validation.rows or at.evaluated_step == at.step:
            return
        self._settle()
        result = score(self.model, self.validation, self.recipe.data.labels, self.device)
        at.evaluated_step = at.step
        at.evaluations_since_best += 1
        value = result.value
        better = at.best_score is None or value > at.best_score
        if better:
            at.best_score, at.best_step, at.evaluations_since_best = value, at.step, 0
        self.log.write("validation", at.step, at.epoch, result.metrics)
        area, mark = result.metrics["auc"], "  (best so far)" if better else ""
        words = f"AUC {'undefined' if area is None else f'{area:.4f}'}, log loss {result.metrics['log_loss']:.4f}"
        self.shown.say(f"step {at.step:,}, epoch {at.epoch}: validation {words}{mark}")
        self.clock = time.perf_counter()
        if better and self.recipe.run.select_best:
            self._checkpoint()

    def _checkpoint(self) -> None:
        at, folder = self.at, self.folder / CHECKPOINTS
        self._settle()
        at.metrics_bytes = self.log.position()
        if at == self.saved:
            return
        state = self.model.state_dict()
        for name, tensor in state.items():
            if tensor.is_floating_point() and not math.isfinite(float(tensor.sum(dtype=torch.float32))):
                raise UserError(self._diverged(f"'{name}' is not finite after step {at.step:,}"))
        other = {
            "position": asdict(at),
            "reader": self.reader.state(),
            "optimizer": self.optimizer.state_dict(),
            "random": checkpoint.random_state(self.device.torch),
            "recipe_hash": self.recipe.hash(),
        }
        checkpoint.save(folder, at.step, state, other)
        self.saved = replace(at)
        checkpoint.prune(folder, self.recipe.run.keep_checkpoints, [] if at.best_step is None else [at.best_step])
        self.clock = time.perf_counter()

    def _resume(self) -> None:
        newest = checkpoint.latest(self.folder / CHECKPOINTS)
        if newest is None:
            self.shown.say(f"{self.folder} has no checkpoint yet: it starts from the beginning")
            return
        saved = checkpoint.load(newest)
        load_weights(self.model, saved)
        load_dense_optimizer(self.optimizer, saved.other["optimizer"])
        self.reader.restore(saved.other["reader"])
        checkpoint.set_random_state(saved.other["random"], self.device.torch)
        self.at = Position(**saved.other["position"])
        self.loss_sum.fill_(self.at.loss_sum)
        self.saved = replace(self.at)
        self.shown.say(f"resumed {self.folder} at step {self.at.step:,}")

    def _diverged(self, what: str) -> str:
        saved = checkpoint.latest(self.folder / CHECKPOINTS)
        kept = f"the checkpoint {saved.name} is intact" if saved is not None else "no checkpoint was written yet"
        return (
            f"{what}; lower optimizer.dense_lr or optimizer.tables_lr, add schedule.warmup_steps, "
            f'or tame large inputs with data.dense_transform = "log1p"; {kept}'
        )


def weighted_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Binary cross-entropy, averaged over tasks and, by their weights, over samples."""
    assert batch.labels is not None
    if batch.sample_weights is None:
        return functional.binary_cross_entropy_with_logits(logits, batch.labels)
    each = functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none").mean(1)
    weights = batch.sample_weights
    return (each * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
