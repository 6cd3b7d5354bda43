"""The training loop, top to bottom: build, resume, step, log, evaluate, checkpoint, and the test at the end."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ..batch import Batch
from ..data.reader import Bookmark, Reader
from ..embeddings import ShardedEmbeddings
from ..errors import UserError
from . import checkpoint
from .build import build_dense_optimizer, load_dense_optimizer
from .config import Recipe
from .counting import ExchangeCount
from .evaluate import make_report
from .parallel import choose_plan, data_parallel, seed_rank, summary, tensors_of
from .processes import Ranks
from .progress import Progress, Trial, progress_for
from .run import CHECKPOINTS, PLAN, RECIPE, REPORT, Report, chosen_folder, create_run_folder, open_log, write_json
from .session import Score, load_weights, make_model, open_data, score, scoring_reader, training_reader
from .together import Turn, part_of_loss, together
from .width_plot import write_plot
from .width_report import WIDTH, WidthCount
from .width_rows import with_rows
from .width_search import SEARCH, Found, Outcome, found_before, search_budget

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


def train(
    recipe: Recipe,
    *,
    resume: Path | None = None,
    progress: bool = True,
    device: str = "auto",
    plan: Path | None = None,
    started: float | None = None,
) -> Report:
    """Trains the recipe into a fresh run folder, or goes on with the run in `resume`, and scores the test part.

    `device`: cpu, cuda, cuda:N, or auto for a GPU where there is one. A run may be resumed on another, and by another number
    of ranks. Where the environment says that this process is one of several ranks, or torch.distributed is initialised, all of
    them call this, and all get the report; the batches are the same as those of one rank. `plan`: the file of a plan to
    follow. `started`: when the command began (time.time).
    """
    started = time.time() if started is None else started
    with Ranks(device) as ranks:
        if recipe.run.threads:
            torch.set_num_threads(recipe.run.threads)
        with progress_for(progress and ranks.rank == 0) as shown, ranks.device.explained(OUT_OF_MEMORY):
            resume = resume or ranks.remembered()
            found: Found | None = None
            if (
                recipe.width is not None and resume is None and recipe.run.folder
            ):  # before ids are counted and budgets are tried, not after it
                ranks.first(lambda: str(chosen_folder(recipe)))
            if recipe.width is not None and recipe.width.searches:
                if resume is not None:
                    recipe = found_before(recipe, resume)
                else:
                    found = search_budget(recipe, partial(attempt, shown=shown, ranks=ranks, plan=plan), shown.say)
                    recipe = found.recipe
            trainer = Trainer(recipe, resume, shown, ranks, plan, started)
            if found is not None and ranks.rank == 0:
                write_json(trainer.folder / SEARCH, found.to_json())
            ranks.describe = trainer.describe
            try:
                trainer.fit()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(trainer.describe()[0]) from None
            return trainer.finish()


def attempt(recipe: Recipe, *, shown: Progress, ranks: Ranks, plan: Path | None) -> Outcome:
    """Trains a recipe to see how well it does on the validation part, and keeps nothing of it."""
    trainer = Trainer(recipe, None, Trial(shown), ranks, plan, time.time(), trial=True)
    if trainer.validation.rows:
        trainer.fit()
    losses = trainer.validation_losses
    if not losses:
        raise UserError(
            'width.budget: expected a validation part to find a budget by "auto", got none; set data.split.validation, '
            "or give a budget"
        )
    held = sum(sum(memory.values()) for memory in ranks.mesh.gather(trainer.embeddings.memory()))
    return Outcome(min(losses) if recipe.run.select_best else losses[-1], held)


class Trainer:
    """A run in progress: model, readers, optimizer, and where it stands. With several ranks there is one on each, and all stand
    at the same step; what is decided on the way follows from numbers that all have."""

    def __init__(
        self,
        recipe: Recipe,
        resume: Path | None,
        shown: Progress,
        ranks: Ranks,
        plan: Path | None,
        started: float,
        *,
        trial: bool = False,
    ) -> None:
        """`trial`: it has no folder and leaves nothing behind."""
        self.ranks, self.mesh, self.device, self.shown = ranks, ranks.mesh, ranks.device, shown
        device, mesh = self.device, self.mesh
        self.data = open_data(recipe, mesh, shown.say)
        recipe = with_rows(recipe, self.data, ranks, shown.say)
        self.reader = training_reader(recipe, self.data, mesh)
        self.validation = scoring_reader(recipe, self.data, "validation", self.reader.statistics, mesh)
        self.total_steps = self.reader.batches_per_epoch * recipe.run.epochs
        if recipe.run.steps:
            self.total_steps = min(self.total_steps, recipe.run.steps)
        self.schedule = recipe.schedule.build(self.total_steps)
        width = None if recipe.width is None else recipe.width.for_steps(self.total_steps)
        schedule = replace(recipe.schedule, total_steps=self.schedule.total_steps)
        self.recipe = replace(recipe, schedule=schedule, width=width)
        if recipe.run.early_stop and not self.validation.rows:
            raise UserError(
                "run.early_stop: expected a validation part, got none; set data.split.validation, or 0 here"
            )

        if device.is_gpu:
            shown.say(f"training on {device.name} ({device.torch})")
        self.plan = choose_plan(recipe, self.data, ranks, plan, resume, shown.say)
        self.model, self.embeddings = make_model(self.recipe, device.torch, mesh, self.plan, self.schedule)
        self.parallel = data_parallel(self.model, self.embeddings, self.reader, device, mesh)
        self.optimizer = build_dense_optimizer(recipe.optimizer, self.model.parameters())
        self.at = Position()
        self.saved: Position | None = None
        self.deferred = device.deferred or mesh.world > 1
        """Whether losses are read now and then only, so that no step waits for the device or for other ranks."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device.torch)
        """Where they are: the sum of this rank's parts since the last line of the log."""
        self.exchange = ExchangeCount(self.embeddings, mesh)
        self.widths = WidthCount(self.embeddings, mesh)
        self.bookmark: Bookmark | None = None
        """Where the reader stood after the batch of the last step; None where that is where it is."""
        self.validation_losses: list[float] = []
        """of this process's evaluations, mean over tasks"""
        self.trial = trial
        if trial:
            self.folder = Path()
            seed_rank(recipe.run.seed, mesh)
        elif resume is None:
            self.folder = Path(ranks.first(lambda: str(create_run_folder(recipe))))
            ranks.remember(self.folder)
            seed_rank(recipe.run.seed, mesh)
        else:
            self.folder = resume
            self._resume()
        self.recipe = replace(self.recipe, run=replace(recipe.run, folder=str(self.folder)))
        self.settled_step, self.warm = self.at.step, False
        self.exchange.begin(self.at.step, self.at.seconds)
        self.started = started
        self.seconds_to_first_step: float | None = None
        if mesh.rank == 0 and not trial:
            if self.plan is not None:
                self.plan.save(self.folder / PLAN)
            (self.folder / RECIPE).write_text(self.recipe.to_toml(), encoding="utf-8")

    def describe(self) -> tuple[str, str]:
        """Where the run stands, and how to go on with it."""
        saved = checkpoint.latest(self.folder / CHECKPOINTS)
        remedy = f"go on with --resume {self.folder}" if saved else ""
        return f"at step {self.at.step:,}; {remedy or 'before the first checkpoint'}", remedy

    def fit(self) -> None:
        """Steps until the epochs or the steps are over, or nothing improves any more."""
        run, at = self.recipe.run, self.at
        self.shown.start(self.total_steps, at.step)
        written = self.mesh.rank == 0 and not self.trial
        with open_log(self.folder, at.metrics_bytes, at.step, write=written) as self.log:
            self.clock = self.shown_at = time.perf_counter()
            while at.epoch < run.epochs and not self._over():
                for turn in together(self.reader, self.mesh, note=self.reader.bookmark, flag=self._due):
                    self._step(turn)
                    if at.step % run.log_every == 0:
                        self._log()
                    if run.evaluate_every and at.step % run.evaluate_every == 0:
                        self._evaluate()
                    if run.checkpoint_every and at.step % run.checkpoint_every == 0:
                        self._checkpoint()
                    if self._over():
                        break
                else:
                    at.epoch, self.bookmark = at.epoch + 1, None
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
                best = checkpoint.path_of(self.folder / CHECKPOINTS, best_step)
                load_weights(self.model, self.embeddings, best, self.mesh)
        test = scoring_reader(self.recipe, self.data, "test", self.reader.statistics, self.mesh)
        scored = next((reader for reader in (test, self.validation) if reader.rows), None)
        report = make_report(
            self.recipe,
            self.data,
            self.folder,
            self.embeddings,
            self.device,
            self.mesh,
            None if scored is None else scored.part,
            None if scored is None else self._score(scored),
            readers=(self.reader, self.validation, test),
            samples_per_second=at.samples_per_second,
            seconds=at.seconds,
            steps=at.step,
            best_step=best_step,
            exchange=self.exchange.report(),
            tiers=self.exchange.tiers(),
            plan=summary(self.plan),
            seconds_to_first_step=self.seconds_to_first_step,
        )
        if self.mesh.rank == 0:
            write_json(self.folder / REPORT, report.to_json())
            if report.width:
                write_plot(self.folder, report.width)
        return report

    def _score(self, reader: Reader) -> Score:
        return score(self.model, self.embeddings, reader, self.recipe.data.labels, self.device, self.mesh)

    def _over(self) -> bool:
        run = self.recipe.run
        stopped = bool(run.early_stop) and self.at.evaluations_since_best >= run.early_stop
        return stopped or (bool(run.steps) and self.at.step >= run.steps)

    def _due(self) -> bool:
        """Whether something new should be shown. With several ranks the first one says so, and all read the loss then."""
        return time.perf_counter() - self.shown_at >= self.shown.interval

    def _step(self, turn: Turn) -> None:
        at, world = self.at, self.mesh.world
        rate = self.recipe.optimizer.dense_lr * self.schedule(at.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self.device.move(turn.batch)
        logits = self.parallel(batch)
        loss = weighted_loss(logits, batch) if world == 1 else part_of_loss(logits, batch, turn.weight)
        if not self.deferred:
            value = loss.item()
            if not math.isfinite(value):
                raise UserError(self._diverged(f"the loss of step {at.step + 1:,} is {value}"))
            at.loss_sum += value
        self.optimizer.zero_grad(set_to_none=True)
        (loss if world == 1 else loss * world).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

        self.bookmark = turn.note
        at.step, at.samples, at.loss_count = at.step + 1, at.samples + turn.samples, at.loss_count + 1
        changed = self.widths.new_round()
        if changed is not None:
            self.log.write(WIDTH, at.step, at.epoch, changed)
        if self.deferred:
            self.loss_sum += loss.detach()
            if self.device.deferred and not self.warm:
                self.device.synchronize()
                self.warm, self.clock = True, time.perf_counter()
                at.untimed_samples += turn.samples
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = time.time() - self.started
        if not self.deferred:
            self._tick()
        elif at.step == self.total_steps or (turn.flag if world > 1 else self._due()):
            self._settle()
        else:
            return
        self.shown_at = self.clock
        self.shown.update(at.step, at.loss_sum / at.loss_count, at.samples_per_second)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.at.seconds, self.clock = self.at.seconds + now - self.clock, now

    def _settle(self) -> None:
        """Where steps do not wait for the device or for other ranks: waits now, and finds out how the last ones went."""
        at, first = self.at, self.settled_step + 1
        if not self.deferred or first > at.step:
            return
        own = self.loss_sum.item()
        self.device.synchronize()
        self._tick()
        self.embeddings.check()
        at.loss_sum = self.exchange.settle(own, at.step, at.seconds)
        if not math.isfinite(at.loss_sum):
            alone = f"the loss of step {at.step:,} is"
            when = f"between steps {first:,} and {at.step:,} the loss became" if first < at.step else alone
            raise UserError(self._diverged(f"{when} {at.loss_sum}"))
        self.settled_step = at.step

    def _log(self) -> None:
        at = self.at
        self._settle()
        if self.recipe.tiers.check and isinstance(self.embeddings, ShardedEmbeddings):
            self.embeddings.check_copies()
        values = {
            "loss": at.loss_sum / at.loss_count,
            "learning_rate_factor": self.schedule(at.step - 1),
            "samples": at.samples,
            "samples_per_second": at.samples_per_second,
            **self.exchange.since_last_line(),
            **self.widths.since_last_line(),
            **{
                f"tiers_{table}_{name}": value
                for table, own in self.exchange.tiers().items()
                for name, value in own.items()
            },
        }
        at.loss_sum, at.loss_count = 0.0, 0
        self.loss_sum.zero_()
        self.log.write("train", at.step, at.epoch, values)
        if self.recipe.width is not None:  # what the ranks told each other of widths is no step's exchange
            self.exchange.skip()

    def _evaluate(self) -> None:
        """Scores the validation part. Where it is the best so far, that is worth a checkpoint."""
        at = self.at
        if not self.validation.rows or at.evaluated_step == at.step:
            return
        self._settle()
        result = self._score(self.validation)
        losses = [task["log_loss"] for task in result.metrics["tasks"].values()]
        if None not in losses:
            self.validation_losses.append(sum(losses) / len(losses))
        at.evaluated_step = at.step
        # Rows that begin whole must have shrunk: the best is one that the budget allows.
        allowed = not self.embeddings.over_budget()
        at.evaluations_since_best += allowed
        value = result.value
        better = allowed and (at.best_score is None or value > at.best_score)
        if better:
            at.best_score, at.best_step, at.evaluations_since_best = value, at.step, 0
        self.log.write("validation", at.step, at.epoch, result.metrics)
        area, mark = result.metrics["auc"], "  (best so far)" if better else "" if allowed else "  (over the budget)"
        words = f"AUC {'undefined' if area is None else f'{area:.4f}'}, log loss {result.metrics['log_loss']:.4f}"
        self.shown.say(f"step {at.step:,}, epoch {at.epoch}: validation {words}{mark}")
        self.exchange.skip()
        self.clock = time.perf_counter()
        if better and self.recipe.run.select_best:
            self._checkpoint()

    def _checkpoint(self) -> None:
        at, folder = self.at, self.folder / CHECKPOINTS
        self._settle()
        if self.trial:
            return
        at.metrics_bytes = self.log.position()
        if self.mesh.share(at == self.saved):
            return
        self._refuse_unsound()
        other = {
            "position": asdict(at),
            "reader": self.reader.state(self.bookmark),
            "optimizer": self.optimizer.state_dict(),
            "recipe_hash": self.recipe.hash(),
        }
        own = {"random": checkpoint.random_state(self.device.torch), "loss_sum": self.loss_sum.item()}
        dense = checkpoint.dense_state(self.model, self.embeddings)
        checkpoint.save(folder, at.step, dense, other, embeddings=self.embeddings, own=own, mesh=self.mesh)
        self.saved = replace(at)
        protected = [] if at.best_step is None else [at.best_step]
        checkpoint.prune(folder, self.recipe.run.keep_checkpoints, protected, mesh=self.mesh)
        self.exchange.skip()
        self.clock = time.perf_counter()

    def _refuse_unsound(self) -> None:
        """What is not finite is never saved, on whichever rank it is."""
        found = next(
            (
                name
                for name, tensor in tensors_of(self.model, self.embeddings)
                if tensor.is_floating_point() and not math.isfinite(float(tensor.sum(dtype=torch.float32)))
            ),
            None,
        )
        name = next((name for name in self.mesh.gather(found) if name is not None), None)
        if name is not None:
            raise UserError(self._diverged(f"'{name}' is not finite after step {self.at.step:,}"))

    def _resume(self) -> None:
        newest = checkpoint.latest(self.folder / CHECKPOINTS, mesh=self.mesh)
        if newest is None:
            self.shown.say(f"{self.folder} has no checkpoint yet: it starts from the beginning")
            seed_rank(self.recipe.run.seed, self.mesh)
            return
        saved = load_weights(self.model, self.embeddings, newest, self.mesh)
        load_dense_optimizer(self.optimizer, saved.other["optimizer"])
        self.reader.restore(saved.other["reader"])
        self.at = Position(**saved.other["position"])
        self.saved = replace(self.at)
        if saved.own is not None and saved.world == self.mesh.world:
            checkpoint.set_random_state(saved.own["random"], self.device.torch)
            self.loss_sum.fill_(saved.own.get("loss_sum", self.at.loss_sum))
        else:
            seed_rank(self.recipe.run.seed, self.mesh, self.at.step)
            self.loss_sum.fill_(self.at.loss_sum if self.mesh.rank == 0 else 0.0)
        self.shown.say(f"resumed {self.folder} at step {self.at.step:,}")

    def _diverged(self, what: str) -> str:
        saved = None if self.trial else checkpoint.latest(self.folder / CHECKPOINTS)
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
