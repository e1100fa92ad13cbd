"""Unlearning on one copy: load it, train it on the private records, return the change in its weights."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.errors import Diverged, MpuError, UsageError
from mpu_cli.files.boundary import private_folder, private_umask, read_json_object
from mpu_cli.files.manifest import (
    DeltaManifest,
    as_metadata,
    delta_facts,
    name_of_copy,
    read_copy_manifest,
    resume_folder,
)
from mpu_cli.files.reader import LOST_TO_ROUNDING, fingerprint
from mpu_cli.files.resumption import write_atomically
from mpu_cli.files.transaction import Transaction
from mpu_cli.files.writer import MAX_SHARD, CheckpointWriter, nbytes_of
from mpu_cli.model.device import device_of, memory_in_mind, processes_of
from mpu_cli.model.load import load, load_once_per_host, releasing_memory, vocabulary_size
from mpu_cli.model.network import Answers, AnswerScore
from mpu_cli.model.source import Model, open_model
from mpu_cli.model.tensors import share_in_4_bits
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import flat
from mpu_cli.options.unlearning import AUTO, Checks, Logging, Training, Unlearning
from mpu_cli.plugins import extension
from mpu_cli.records.encode import EncodedSets, Example
from mpu_cli.subprocesses import process_count
from mpu_cli.training.checks import (
    PRECISIONS,
    check_finite,
    check_logging,
    check_options,
    check_reference_file,
    check_suits,
    decisive_options,
    epochs_of,
    in_float32_if_private,
    misfits,
    plan_privately,
    without_numbers,
)
from mpu_cli.training.copycheck import against_others, against_public, refuse, traps
from mpu_cli.training.data import Dataset, record_tags, records_digest
from mpu_cli.training.delta import change_of, stored_specs, training_tag, write_changes
from mpu_cli.training.examples import encoded_sets
from mpu_cli.training.execution import Checkpoints, computing_in, from_first, in_precision, step_of
from mpu_cli.training.ledger import (
    LedgerEntry,
    RoundSchedule,
    own_client_secret,
    read_ledger,
    schedule_of_round,
    write_down,
    write_losses,
    write_round_schedule,
)
from mpu_cli.training.loop import NO_LOGGING, Losses, Step, schedule, seed_training, train
from mpu_cli.training.losses import ALGORITHMS
from mpu_cli.training.rates import scored_at_once, with_epochs, with_precision, with_rate
from mpu_cli.training.reference import ExampleSet, ExampleSets, freeze, load_references, save_references
from mpu_cli.training.stopping import EarlyStopping, Scorer, StepScores, StoppingRule, pulling_level, spread
from mpu_cli.wording import counted

# What a training did: its losses before and after, and what they say.

MIN_FORGET_RISE = 0.1  # rise of the forget loss, in nats per answer token, below which little was forgotten
MAX_KNOWN_LOSS = 3.0  # forget loss before training above which a model hardly knew the records
MAX_RETAIN_RISE = 1.0  # rise of the retain loss above which the model lost much of what it should keep


@dataclass(frozen=True)
class Measured:
    """Mean losses per answer token of one model, on records to forget and on as many to keep (None: none read)."""

    forget: float
    retain: float | None


@dataclass(frozen=True)
class UnlearningResult:
    """The delta, the losses of the steps taken by this call, the norm of what was written.

    ``before`` and ``after`` are measured on the same records; None if several processes trained together.
    """

    path: Path
    steps: list[Losses]
    norm: float
    is_main_process: bool  # whether this is the process that wrote it
    spent: dict[str, float] | None = None  # of the privacy budget, if there was one
    before: Measured | None = None
    after: Measured | None = None
    rounding: float = 0.0  # ‖Δ as written − Δ‖ / ‖Δ‖
    earlier: int = 0  # trainings in the ledger before this one
    rate: float = 0.0  # the learning rate
    resumed_after: int = 0  # steps that were taken by earlier calls
    scores: StepScores | None = None  # at its end, of one that stopped when it was done
    schedule: RoundSchedule | None = None  # what the other copies of its round follow
    weights: str = ""  # the fingerprint of the copy's, if it is in the ledger

    def summary(self, name: str, algorithm: str) -> str:
        """One line: the steps of ``algorithm`` on the copy ``name``, and the losses before and after them."""
        steps = self.schedule.steps if self.schedule else self.resumed_after + len(self.steps)
        text = f"{name}: {algorithm}, {counted(steps, 'step')}"
        if self.before and self.after:
            text += f"; loss per answer token on the forget set {self.before.forget:.3f} → {self.after.forget:.3f}"
            if self.before.retain is not None:
                text += f", on the retain set {self.before.retain:.3f} → {self.after.retain:.3f}"
        elif self.steps:
            first_loss, last_loss = self.steps[0].forget, self.steps[-1].forget
            text += f"; loss per answer token {first_loss:.3f} → {last_loss:.3f} (first and last batch)"
        if self.scores:
            text += f"; on the copy, {self.scores}"
        return f"{text}; ‖Δ‖ {self.norm:.3g}"

    def facts(self, algorithm: str) -> dict[str, object]:
        """The outcome of ``algorithm``, for JSON."""
        values = asdict(self)
        return {
            "algorithm": algorithm,
            "lr": self.rate,
            "norm": self.norm,
            "lost_to_rounding": self.rounding,
            "before": values["before"],
            "after": values["after"],
            "warnings": self.warnings(),
            "privacy": self.spent,
            "round_schedule": values["schedule"],
            "scores": values["scores"],
            "steps": values["steps"],
        }

    def warnings(self) -> list[str]:
        """Probable mistakes in the training, and remedies."""
        before, after = self.before, self.after
        problems = []
        if self.rounding > LOST_TO_ROUNDING:
            problems.append(f"--delta-dtype lost {self.rounding:.0%} of the change: leave it out, or use bfloat16")
        if before is None or after is None:
            return problems
        if before.forget > MAX_KNOWN_LOSS:
            problems.append(
                f"the copy hardly knew the records before (loss per answer token {before.forget:.3f}): are these the "
                "records that it learned, in the chat template that it learned them with?"
            )
        if after.forget - before.forget < MIN_FORGET_RISE:
            problems.append(
                f"the records were hardly forgotten (loss per answer token {before.forget:.3f} → {after.forget:.3f}); "
                f"raise --lr (it was {self.rate:.2g}) or --epochs, or lower --batch-size for more steps; `mpu tune` "
                "finds what forgets"
            )
        if before.retain is not None and after.retain is not None and after.retain - before.retain > MAX_RETAIN_RISE:
            problems.append(
                "the model lost much of what it should keep (loss per answer token on the retain set "
                f"{before.retain:.3f} → {after.retain:.3f}); lower --lr or --epochs"
            )
        return problems


def measure(
    model: PreTrainedModel, sets: ExampleSets, options: Unlearning, *, is_frozen: bool = False
) -> tuple[Measured, list[float]]:
    """The mean losses of ``model`` on records to forget that are spread over all of them, and on as many to keep; how
    probable the answers of the former are, record by record. ``is_frozen``: the frozen outputs are of this model."""
    size = scored_at_once(options.training, model.device)
    training = model.training
    model.eval()
    scores = Answers(spread(sets["forget"].examples), size).scores(model)
    retain_loss = None
    if "retain" in sets:
        retain_loss = sets["retain"].reference_loss(len(scores)) if is_frozen else None
        if retain_loss is None:
            retain_loss = Answers(sets["retain"].examples[: len(scores)], size).loss(model)
    model.train(training)
    return Measured(AnswerScore.of_all(scores).per_token, retain_loss), [score.probability for score in scores]


ADVICE = (  # if memory runs out
    "use --training micro_batch_size=1,gradient_checkpointing, --precision bfloat16, --optim adamw-blockwise or "
    "--lora rank=16"
)


@dataclass
class UnlearningTask:
    """Unlearning ``data`` on ``copy`` and writing its change to ``target``: of every weight, or the factors of LoRA.

    ``copy`` may be any causal model; the delta of one that is not a copy belongs to no run. Under ``accelerate launch``
    every process runs the task, and the first writes. A task is run once: its methods, in the order in which ``run``
    calls them, settle what the fields leave open, such as the precision and the level of the loss.
    """

    copy: Model
    data: Dataset
    options: Unlearning
    _: KW_ONLY
    target: Path
    force: bool = False
    logging: Logging = NO_LOGGING
    reference_file: Path | None = None  # keeps the reference model's probabilities from round 1 for later rounds
    secret: Callable[[], bytes] | None = None  # the client's, for the tag that shows whether copies were trained alike
    ledger: Path | None = None  # in which the training is written down before any record meets the model
    checks: Checks | None = None  # for signs that the model was built to carry records out
    stopping_rule: StoppingRule | None = None  # in place of a number of epochs
    expected_weights: str | None = None  # the fingerprint of the only weights that the records may meet
    on_written: Callable[[UnlearningResult, Path], None] | None = None  # before the delta, at this path, gets its name
    observer: Observer = SILENT

    @releasing_memory
    def run(self) -> UnlearningResult:
        """Train, and write the delta."""
        self._prepare()
        training, privacy = self.options.training, self.options.privacy
        losses: list[Losses] = []

        def record(step: Losses, _: int) -> None:
            losses.append(step)
            retain_text = "" if step.retain_term is None else f" retain {step.retain_term:.3f}"
            self.observer.advance(1, f"loss {step.loss:.3f} = forget {step.forget_term:.3f}{retain_text}")

        with (
            private_umask(),
            memory_in_mind(ADVICE),
            seed_training(training),
            computing_in(training.precision, PRECISIONS[training.precision]),
            Transaction(force=self.force) as transaction,
        ):
            model, tokenizer = self._load(transaction)  # in no attribute, which would keep them after the training
            entry, earlier = self._register()  # before any record meets the model: what fails on one tells about it
            examples, record_numbers = encoded_sets(model, tokenizer, self.data, self.options, observer=self.observer)
            signs = self._warning_signs(model, tokenizer, examples)
            sets = self._with_references(model, examples)
            rule = self.stopping_rule
            if rule and not rule.schedule and entry:  # the first copy of a round leads, the others follow
                self.stopping_rule = replace(rule, schedule=schedule_of_round(entry, earlier))
            # The options keep --lr auto, as they identify the training.
            planned_steps, training = self._plan_steps(sets)
            steps = planned_steps
            if self.stopping_rule and self.stopping_rule.schedule:
                steps = planned_steps[: self.stopping_rule.schedule.steps]
            checkpoints, steps_done = self._open_checkpoints(len(steps))
            to_train = self.change.wrap(model)
            self.observer.stage("measure", 1, "done")
            before, probabilities = None, None
            if self.is_alone:
                before, probabilities = measure(to_train, sets, self.options, is_frozen=not self.read_reference)
            self._inspect_copy(signs, entry, before)
            early_stopping = self._set_up_stopping(to_train, sets, before, probabilities)
            if early_stopping and checkpoints and steps_done:
                early_stopping.resume(checkpoints.of_step(steps_done))
            if early_stopping:
                self.observer.note(early_stopping.expectation(len(steps)))
            self.observer.stage(f"unlearn {name_of_copy(self.copy.source)}", len(steps), "steps")
            self.observer.advance(steps_done)
            spent, trained = None, to_train
            if self.private:
                private = self.private.of_examples(record_numbers)
                spent = extension("private").train_privately(
                    to_train, sets, self.objective, training, privacy=privacy, planned=private, on_step=record
                )
                spendings = [spending for other in earlier for spending in other.spendings(privacy.dp_unit)]
                spendings.append(private.mechanism)
                spent["epsilon_of_ledger"] = extension("accounting").composed_epsilon(
                    spendings, privacy.dp_delta, privacy.dp_neighbours
                )
            else:
                trained = train(
                    to_train, steps, sets, self.objective, training, logging=self.logging, checkpoints=checkpoints,
                    on_step=record, warn=self.observer.warn, early_stopping=early_stopping,
                    planned_steps=len(planned_steps),
                )  # fmt: skip
            scores, round_schedule = None, None
            if early_stopping:
                scores, round_schedule = early_stopping.finish(trained, steps_done + len(losses), len(planned_steps))
                self._write_schedule(entry, round_schedule)
            self.observer.stage("measure again", 1, "done")
            after = measure(trained, sets, self.options)[0] if self.is_alone else None
            # Under DP a delta leaves whatever one record does to the loss: its absence would tell.
            if after and self.private is None and not math.isfinite(after.forget):
                raise Diverged("the loss on the records is")
            self.observer.stage("write the delta", 1, "done")
            norm, rounding = self._write_delta(trained, self._tags(round_schedule))
            result = UnlearningResult(
                path=self.target, steps=losses, norm=norm, is_main_process=self.is_main_process, spent=spent,
                before=before, after=after, rounding=rounding, earlier=len(earlier), rate=float(training.lr),
                resumed_after=steps_done, scores=scores, schedule=round_schedule, weights=self.fingerprint,
            )  # fmt: skip
            if self.on_written and self.output:
                self.on_written(result, self.output)
        if checkpoints and self.is_main_process:
            shutil.rmtree(checkpoints.folder)
        return result

    def _prepare(self) -> None:
        """The checks that need no model, and the settings that follow from them."""
        options, rule, observer = self.options, self.stopping_rule, self.observer
        self.objective = check_options(options, rule.goal if rule else None)
        options = in_float32_if_private(options, observer)
        if rule is None:
            options = with_epochs(options, len(self.data.forget))
        if options.training.precision == AUTO:
            options = replace(options, training=with_precision(options.training, self.copy))
            if options.training.precision == "mixed":
                observer.note(
                    "this processor is fast in bfloat16, so layers compute in it; not with --precision float32"
                )
        check_logging(self.logging, options.privacy)
        load_once_per_host()
        # Without a GPU, "auto" means the CPU for the processes' communication, too.
        processes = processes_of(device_of(options.training.device))
        if process_count() != processes.num_processes:
            raise MpuError(
                f"started as one of {process_count()} processes, which cannot reach each other "
                f"({processes.num_processes} here)",
                "start them with torchrun or accelerate launch",
            )
        if options.privacy.is_on and processes.num_processes > 1:
            raise UsageError("--dp epsilon does not work with several processes")
        self.is_main_process = processes.is_main_process
        self.is_alone = processes.num_processes == 1  # of several, none has the whole model
        manifest = self.manifest = read_copy_manifest(self.copy.folder, self.copy.checkpoint.metadata)
        if manifest:  # each round has its own order of the records, all copies of it the same
            # numpy, which transformers seeds too, takes 32 bits.
            seed = (options.training.seed + manifest.round - 1) % 2**32
            options = replace(options, training=replace(options.training, seed=seed))
        for warning in misfits(manifest, options):
            observer.warn(warning)
        self.read_reference = self.reference_file is not None and check_reference_file(
            self.reference_file, manifest, options, self.objective
        )
        self.options = options
        processes.wait_for_everyone()  # all look for the reference file before the first one writes it

    def _load(self, transaction: Transaction) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the copy and find out, before hours of training, whether its delta can be written."""
        copy, options, training = self.copy, self.options, self.options.training
        dtype = PRECISIONS[training.precision]
        model, tokenizer = load(copy, dtype, training.device, training.attention, options.lora.quantize)
        in_precision(model, training.precision)
        if options.lora.quantize:
            self.observer.note(f"{share_in_4_bits(model):.0%} of the weights are held in 4 bits")
        self.change = change_of(options, model, copy.checkpoint, dtype)
        self.specs = stored_specs(self.change, model, options)
        self.output: Path | None = None  # what the change is written to by the main process
        if self.is_main_process:
            self.output = transaction.add(self.target, directory=nbytes_of(self.specs) > MAX_SHARD)
        if self.is_alone:
            check_finite(model, copy)
        check_suits(model, tokenizer, self.data, options, self.objective)
        if options.prompts.template is None and not tokenizer.chat_template:
            self.observer.note("the copy's tokenizer has no chat template: records are read as 'Question: … Answer: …'")
        self.private: Any = None  # the plan of DP-SGD, None without it
        if options.privacy.is_on:
            extension("private").check_opacus()
            if any(".experts." in name for name in self.change.trainable_names(model)):
                raise UsageError(
                    "--dp epsilon: experts have no gradients for each record",
                    "use --lora rank with --lora targets that leave the experts out",
                )
            self.private = plan_privately(self.data, options, self.objective)
        needs_fingerprint = self.is_main_process and (self.ledger or self.logging.resume or self.expected_weights)
        self.fingerprint = fingerprint(copy.checkpoint) if needs_fingerprint else ""  # of the copy's weights
        if self.expected_weights and self.expected_weights != self.fingerprint:
            raise MpuError(
                f"{copy.source}: has the name of a copy that you trained on before, and other weights",
                "nothing was trained; ask its owner, or use --alone",
            )
        return model, tokenizer

    def _register(self) -> tuple[LedgerEntry | None, Sequence[LedgerEntry]]:
        """Write the training down in the ledger, if there is one; without it, no training has a budget. The training's
        entry, None if it has none, and those before it."""
        if not self.is_main_process or not self.ledger:
            return None, ()
        options, privacy, records = self.options, self.options.privacy, records_digest(self.data)
        reading_context, rule, manifest = self.copy.reading_context, self.stopping_rule, self.manifest
        training = _digest([reading_context, records, decisive_options(options), rule and rule.facts()])
        try:
            entry = LedgerEntry(
                identity=_digest([self.fingerprint, training]), run=manifest.run if manifest else "",
                round=manifest.round if manifest else 0, copy=manifest.copy if manifest else 0,
                weights=self.fingerprint, algorithm=options.algo, records=len(self.data.records),
                mechanism=self.private.mechanism if self.private else None, data=records,
                reading_context=reading_context, public=privacy.public_records, unit=privacy.dp_unit,
                training=training,
                tags=record_tags(self.data.records, own_client_secret()) if self.private else (),
            )  # fmt: skip
            earlier = write_down(
                self.ledger, entry, delta=privacy.dp_delta, budget=privacy.dp_budget, neighbours=privacy.dp_neighbours,
                trusted=self.checks is None or self.checks.trust_copy,
            )  # fmt: skip
        except OSError as error:
            if privacy.is_on:
                raise MpuError(f"{self.ledger}: cannot be written: {error.strerror}, so no budget holds") from error
            self.observer.warn(f"{self.ledger}: {error.strerror}; this training is not in your ledger")
            return None, ()
        return entry, earlier

    def _warning_signs(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: EncodedSets
    ) -> list[str]:
        """Signs in the copy itself that it was built to carry records out, as far as the checks look for them."""
        signs: list[str] = []
        checks, data = self.checks, self.data
        if checks and self.is_alone:
            self.observer.stage("check the copy", 1, "done")
            # Under DP from the weights alone: whether the copy is refused would tell what the records hold.
            looked_at = None if self.private else list(chain.from_iterable(examples.values()))
            signs += traps(self.copy, model, looked_at, len(data.forget) + len(data.retain))
        elif checks:
            signs.append("several processes train it, so its units were not looked at for traps")
        if checks and checks.public and self.is_main_process:
            turns = [turn for record in data.records for turn in record.dialogue]
            texts = [] if self.private else [turn.content for turn in turns if turn.content]
            signs += against_public(self.copy, tokenizer, open_model(checks.public), texts)
        return signs

    def _with_references(self, model: PreTrainedModel, examples: EncodedSets) -> dict[str, ExampleSet]:
        """Each set with the outputs of the frozen copy.

        That is ``model`` or, where the reference file is read, round 1's; else it is kept in that file, if there is
        one, for later rounds.
        """
        options, origin, file = self.options, self.manifest, self.reference_file
        reference_outputs = {name: self.objective.reference_outputs(name) for name in examples}
        # Of the records and of what prints them, not of their tokens, which the copy's tokenizer makes: see
        # records_digest.
        texts = json.dumps([records_digest(self.data), flat(options.prompts)], default=str)
        facts: dict[str, object] = {  # what has to be the same when the file is read again
            "run": origin.run if origin else None,
            "copy": origin.copy if origin else None,
            "records": hashlib.sha256(texts.encode()).hexdigest(),
            "reading_context": self.copy.reading_context,
        }
        if not self.read_reference or (origin and origin.round == 1):  # later rounds have other copies
            facts["copy_id"] = origin.copy_id if origin else None
        facts["asks"] = reference_outputs

        def make_sets() -> dict[str, ExampleSet]:
            if file and self.read_reference:
                sets = load_references(file, examples, reference_outputs, facts)
                self.observer.note(f"the reference model's probabilities are read from {file}")
                return sets
            batch_size = scored_at_once(options.training, model.device)
            layer, seed = self.objective.constants.layer, options.training.seed
            sets = {
                name: freeze(model, examples[name], outputs, layer=layer, batch_size=batch_size, seed=seed)
                for name, outputs in reference_outputs.items()
            }
            if file:
                save_references(file, sets, facts)
            return sets

        sets = from_first(make_sets)
        device = PartialState().device if PartialState().num_processes > 1 else model.device
        return {name: example_set.on(device) for name, example_set in sets.items()}

    def _plan_steps(self, sets: ExampleSets) -> tuple[list[Step], Training]:
        """The examples of each step, as many as the first copy of a round may take, and the training's options with a
        learning rate."""
        forget = len(sets["forget"].examples)
        retain = len(sets["retain"].examples) if "retain" in sets else 0
        training = self.options.training
        epochs, limit = epochs_of(self.options), None
        if self.stopping_rule:
            limit = self.stopping_rule.limit(forget, training.batch_size)
            steps_per_epoch = -(-forget // training.batch_size)
            epochs = -(-limit // steps_per_epoch)
        steps = schedule(
            forget, retain, epochs=epochs, batch_size=training.batch_size, seed=training.seed,
            retain_per_forget=self.objective.algorithm.retain_per_forget,
        )[:limit]  # fmt: skip
        trained_weights = sum(math.prod(shape) for _, shape in self.specs.values())
        # Under DP the planned number: how many records the copy's template accepts would leak through the rate.
        count = self.private.mechanism.steps if self.private else len(steps)
        return steps, with_rate(self.options, trained_weights, count)

    def _open_checkpoints(self, total_steps: int) -> tuple[Checkpoints | None, int]:
        """The checkpoints of --resume, None without it, and how many steps were taken before."""
        if not self.logging.resume:
            return None, 0
        checkpoints = Checkpoints(
            folder=resume_folder(self.target),
            secret=(self.secret or own_client_secret)(),
            training=from_first(self._digest_of_training),  # which alone has the weights' fingerprint
        )
        is_repeated = self.is_main_process and checkpoints.folder.exists()
        if self.is_main_process:
            note = private_folder(checkpoints.folder.absolute()) / "mpu-resume.json"
            if not note.exists():
                write_atomically(note, json.dumps({"sha256": checkpoints.training}))
            elif read_json_object(note, links=False).get("sha256") != checkpoints.training:
                raise MpuError(
                    f"{checkpoints.folder}: holds checkpoints of a different copy, records or options",
                    "remove it to start over",
                )
        last_checkpoint = from_first(checkpoints.last)
        steps_done = step_of(last_checkpoint) if last_checkpoint else 0
        if last_checkpoint:
            self.observer.note(f"resuming after step {steps_done} of {total_steps}")
        elif is_repeated:
            self.observer.note("no checkpoint was written before: the training begins anew")
        return checkpoints, steps_done

    def _digest_of_training(self) -> str:
        """SHA-256 of everything that the result of the training depends on, in hexadecimal: only the same one may
        be resumed."""
        decided = decisive_options(self.options) | {"reference_file": self.reference_file is not None}
        decided["micro_batch_size"] = self.options.training.micro_batch_size  # the Trainer counts them in checkpoints
        stopping = None
        if rule := self.stopping_rule:
            public = self.checks.public if self.checks else None
            stopping = [rule.facts(), asdict(rule.schedule) if rule.schedule else None, public]
        weights = [self.fingerprint, self.copy.checkpoint.metadata]
        return _digest([decided, *weights, records_digest(self.data), self.copy.reading_context, stopping])

    def _inspect_copy(self, signs: list[str], entry: LedgerEntry | None, before: Measured | None) -> None:
        """Write the losses down, and note if no check of the copy found anything. Raises MpuError for signs that it was
        built to carry records out, and for losses that are not finite, but not under DP: which records they are of
        would tell what those hold."""
        is_private = self.options.privacy.is_on
        has_losses = before is not None and math.isfinite(before.forget + (before.retain or 0.0))
        if before and not has_losses and not is_private:
            raise without_numbers(self.copy)
        if self.ledger and entry and before and has_losses:
            write_losses(self.ledger, entry.identity, before.forget, before.retain)
            if self.checks and not is_private:
                signs = signs + against_others(entry, asdict(before), read_ledger(self.ledger))
        if not self.checks:
            return
        refuse(signs, self.copy.source, self.checks.trust_copy, self.observer)
        if not signs:
            public = self.checks.public
            compared = f", and its structure is that of {public}" if public else ""
            self.observer.note(
                f"checked: nothing shows that {name_of_copy(self.copy.source)} was built to carry records out"
                f"{compared} (docs/protection.md says what such checks miss)"
            )

    def _set_up_stopping(
        self,
        to_train: PreTrainedModel,
        sets: ExampleSets,
        before: Measured | None,
        probabilities: Sequence[float] | None,
    ) -> EarlyStopping | None:
        """Give the objective the level of its loss; returns the early stopping, None for a number of epochs.

        The level comes from how probable answers are that a model does not know, and from the noise of the copy; for a
        number of epochs, it is the usual one or, where the copy does not know the records, one that pulls all the same.
        """
        options, algorithm, constants = self.options, self.objective.algorithm, self.objective.constants
        has_level = "level" in algorithm.constant_names
        early_stopping = None
        if self.stopping_rule:
            at_once = scored_at_once(options.training, to_train.device)
            public = None
            examples = {name: example_set.examples for name, example_set in sets.items()}
            if self.checks and self.checks.public is not None:
                self.observer.stage("score the public model", 1, "done")
                public = probabilities_under(self.checks.public, examples, at_once, options.training.device)
            scorer = Scorer(to_train, examples, at_once, public, self.stopping_rule.goal.max_left, probabilities)
            faithful_alpha = None
            if options.algorithm_options.alpha is None:
                faithful_alpha = algorithm.alpha_if_faithful(len(examples["forget"]))
            early_stopping = EarlyStopping(
                to_train, scorer, self.stopping_rule, self.manifest.noise if self.manifest else 0.0,
                level=options.algorithm_options.level, alpha=constants.alpha,
                faithful_alpha=faithful_alpha,
                seed=options.training.seed, observer=self.observer,
            )  # fmt: skip
            constants = replace(constants, alpha=early_stopping.alpha)
            if has_level:
                constants = replace(constants, level=early_stopping.level)
        # Not under DP, where the level would leak what the copy knows.
        elif has_level and before and options.algorithm_options.level is None and not options.privacy.is_on:
            constants = replace(constants, level=pulling_level(constants.level, before.forget))
        self.objective = replace(self.objective, constants=constants)
        return early_stopping

    def _write_schedule(self, entry: LedgerEntry | None, round_schedule: RoundSchedule) -> None:
        """Write the training's schedule down, which the other copies of its round follow."""
        if self.ledger and entry and self.stopping_rule and not self.stopping_rule.schedule:
            try:
                write_round_schedule(self.ledger, entry.identity, round_schedule)
            except OSError as error:
                self.observer.warn(
                    f"{self.ledger}: {error.strerror}; train all copies in one call, for as many steps each"
                )

    def _tags(self, round_schedule: RoundSchedule | None) -> dict[str, str] | None:
        """The delta's tags, equal for copies of a round that are trained identically: on the same records and, if the
        training stopped when it was done, by the same schedule. None if the client's secret cannot be read or kept, and
        under DP: a tag of records tells more than (ε, δ) allows."""
        manifest = self.manifest
        if not (self.is_main_process and self.secret and manifest and self.private is None):
            return None
        decided = decisive_options(self.options)
        decided |= {"reference_file": self.reference_file is not None and manifest.round > 1}
        if round_schedule:
            decided |= asdict(round_schedule)
        versions = {name: version(name) for name in ("torch", "transformers")}
        facts = {"records": records_digest(self.data), "options": decided, "versions": versions}
        try:
            return training_tag(self.secret(), manifest.run, manifest.round, facts)
        except OSError as error:
            self.observer.warn(
                f"{error.filename}: {error.strerror}; the server cannot check that copies were trained identically"
            )
            return None

    def _write_delta(self, trained: PreTrainedModel, tags: dict[str, str] | None) -> tuple[float, float]:
        """Write the change of ``trained``; returns its norm, and the relative error of rounding."""
        if self.output is None:
            for _ in self.change.tensors(trained):  # gathering a shard needs all processes
                pass
            return 0.0, 0.0
        # Of its privacy the delta says the bound that was asked for, and no more. The exact figure, the sampling rate
        # and the number of steps would tell the server how many records there are.
        privacy = self.options.privacy
        bound = None if privacy.dp_epsilon is None else {"epsilon": privacy.dp_epsilon, "delta": privacy.dp_delta}
        # The name of a module would tell the server of the client's own code.
        algorithm = self.options.algo if self.options.algo in ALGORITHMS else "custom"
        delta = DeltaManifest(
            self.manifest,
            algorithm,
            self.change.kind,
            privacy=bound,
            trained=tags,
            until_done=self.stopping_rule is not None,
        )
        with CheckpointWriter(self.output, self.specs, as_metadata(delta_facts(delta))) as writer:
            norm, rounding = write_changes(self.change.tensors(trained), writer)
        return self.change.norm(norm, self.output), rounding


def probabilities_under(
    public: str, examples: Mapping[str, Sequence[Example]], at_once: int, device: str
) -> dict[str, list[float]]:
    """The probabilities of the answers that a ``Scorer`` compares with those under the model at ``public``, by set."""
    model, _ = load(open_model(public), torch.float32, device)
    sets = {name: spread(examples[name]) for name in ("forget", "unseen") if name in examples}
    if max(max(example.ids) for members in sets.values() for example in members) >= vocabulary_size(model):
        raise MpuError(f"{public}: has fewer tokens than the model", "name the model that the server's came from")
    return {name: [s.probability for s in Answers(members, at_once).scores(model)] for name, members in sets.items()}


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
