"""Checkpoints that are whole or absent, and resumption that is exact, for any `transformers.Trainer`."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from posttrain_devices import DeviceSpec, device_spec, rng_state, set_rng_state
from posttrain_models import unwrap
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, TrainOutput, get_last_checkpoint, sort_checkpoints

from posttrain_trainer.checkpoint import check_files, check_resumable, remove, tidy, writing
from posttrain_trainer.memory import freed_memory_kept
from posttrain_trainer.ranks import Ranks
from posttrain_trainer.sources import RunError
from posttrain_trainer.state import load_callbacks, load_state, save_callbacks, save_state
from posttrain_trainer.weights import check_weights, load_converted, needs_conversion

logger = logging.getLogger("posttrain")


@contextlib.contextmanager
def sources_skip_themselves() -> Iterator[None]:
    """Within the block transformers does not skip batches on resume: the source has been put at its position.

    transformers 5.19 to 5.24 call this module-level function in `_run_epoch` and offer no other place.
    """
    original = transformers.trainer.skip_first_batches
    transformers.trainer.skip_first_batches = lambda source, num_batches=0: source
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = original


def _one_line(error: Exception, limit: int = 200) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class ExactTrainer(transformers.Trainer):
    """The part of `Trainer` that saves and resumes; it knows batch sources, and neither losses nor metrics."""

    _pending: str | None = None
    _source: Any = None
    _drawn: tuple[int, Any] | None = None

    @property
    def ranks(self) -> Ranks:
        """This process among those that train together."""
        if getattr(self, "_ranks", None) is None:
            replicas = self.get_tp_size()
            index, size = self.args.process_index // replicas, self.args.world_size // replicas
            self._ranks = Ranks(index, size, replicas, self.args.device, self.args.ddp_timeout_delta)
        return self._ranks

    @property
    def spec(self) -> DeviceSpec:
        """The facts of the device that trains."""
        return device_spec(self.args.device.type)

    # ---- Resuming ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Trains; from a checkpoint, exactly as the run that wrote it would have gone on.

        Args:
            resume_from_checkpoint: A checkpoint folder, or True for the newest in `output_dir`.
            trial: As in `transformers.Trainer`.
            ignore_keys_for_eval: As in `transformers.Trainer`.

        Raises:
            ValueError: If the checkpoint is damaged or of another model, naming folder and file; no weight has been
                changed then.
        """
        self._pending = self.checkpoint_to_resume(resume_from_checkpoint)
        with freed_memory_kept(self.args.device):
            return super().train(
                resume_from_checkpoint=self._pending, trial=trial, ignore_keys_for_eval=ignore_keys_for_eval
            )

    def checkpoint_to_resume(self, wanted: str | bool | None) -> str | None:
        """The checkpoint that `train(resume_from_checkpoint=wanted)` goes on from, None for none.

        Args:
            wanted: A folder; True for the newest in `output_dir`; None or False.

        Raises:
            ValueError: If it is damaged or of another model, naming folder and file.
        """
        run_dir = Path(self.args.output_dir)
        if self.args.should_save and (removed := tidy(run_dir)):
            logger.warning("removed what an interrupted save left in %s: %s", run_dir, ", ".join(removed))
        self.ranks.exchange(None)
        if wanted is None or wanted is False:
            return None
        if wanted is True:
            wanted = get_last_checkpoint(str(run_dir)) if run_dir.is_dir() else None
            if wanted is None:
                raise ValueError(f"resume_from_checkpoint=True: {run_dir} has no checkpoint; name one, or leave it out")
        folder = Path(wanted)
        check_files(folder)
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            check_weights(unwrap(self.model), folder)
            check_resumable(folder)
        return str(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        folder, inner = Path(resume_from_checkpoint), unwrap(self.model)
        if model is None and needs_conversion(inner, folder):
            load_converted(inner, folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        folder, inner = Path(self.state.best_model_checkpoint), unwrap(self.model)
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled) and needs_conversion(inner, folder):
            load_converted(inner, folder)
        else:
            super()._load_best_model()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing: transformers calls this after the first batches were drawn, `_restore` does it before."""

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._restore()
        with sources_skip_themselves():
            super()._run_epoch(*args, **kwargs)

    def _restore(self) -> None:
        """Puts back everything that transformers forgets, and the generators last, before the first batch is drawn."""
        if self._pending is None:
            return
        folder, self._pending = Path(self._pending), None
        rank = self.args.process_index
        state = load_state(folder, 0)
        if state is None:
            logger.warning("%s was not written by posttrain: the run resumes, but not exactly", folder)
        else:
            world = state["world"]
            if world == self.args.world_size:
                states = [load_state(folder, rank)]
            else:
                logger.warning(
                    "resuming a run of %d processes with %d: sums round differently", world, self.args.world_size
                )
                states = [load_state(folder, index) for index in range(world)]
            if not self.args.ignore_data_skip:
                self._source.load_state_dict(states[0]["source"])
            self._load_progress([state["progress"] for state in states])
            load_callbacks(folder, self.callback_handler.callbacks)
        super()._load_rng_state(str(folder))
        if state is not None and world == self.args.world_size and self.spec.name != "cpu":
            set_rng_state(self.spec, states[0]["device_rng"])

    def _progress(self) -> dict[str, Any]:
        """What has happened since the last log, and totals that a resumed run continues."""
        return {
            "tr_loss": self._tr_loss.cpu(),
            "total_loss": float(self._total_loss_scalar),
            "last_logged": self._globalstep_last_logged,
        }

    def _load_progress(self, saved: list[dict[str, Any]]) -> None:
        """Goes on from `_progress`: this rank's, or that of all ranks if their number has changed."""
        self._tr_loss = torch.stack([one["tr_loss"] for one in saved]).mean(0).to(self.args.device)
        self._total_loss_scalar = saved[0]["total_loss"]
        self._globalstep_last_logged = saved[0]["last_logged"]

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> TrainOutput:
        self._restore()  # a checkpoint of the last step leaves nothing to run
        self._tr_loss = self.ranks.total(self._tr_loss.double() if self.spec.name == "cpu" else self._tr_loss)
        self._tr_loss = (self._tr_loss / self.ranks.size).float()
        self._finalizing = True
        try:
            output = super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self._finalizing = False
        return TrainOutput(output.global_step, output.metrics["train_loss"], output.metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; the loss of the whole run counts its earlier parts too."""
        if getattr(self, "_finalizing", False) and "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    # ---- The hub ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository on the hub, before training starts.

        Raises:
            ValueError: If the hub cannot be reached or refuses, saying so in one line.
        """
        try:
            super().init_hf_repo(token=token, private=private)
        except Exception as error:  # of the hub's client: their kinds change with its version
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            raise ValueError(
                f"push_to_hub=True, but repository {name!r} cannot be made on the hub ({_one_line(error)}): mend that, "
                "set hub_model_id or hub_token, or write push_to_hub=False"
            ) from error

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Uploads what has been saved, as in `transformers.Trainer`.

        Raises:
            RunError: If the hub cannot be reached or refuses, saying where the model is saved.
        """
        try:
            return super().push_to_hub(*args, **kwargs)
        except ValueError:  # already one line
            raise
        except Exception as error:  # as above
            raise RunError(
                f"the model is saved in {self.args.output_dir}, but cannot be pushed to {self.hub_model_id} "
                f"({_one_line(error)}): upload it with `hf upload {self.hub_model_id} {self.args.output_dir}`"
            ) from error

    # ---- Saving ----

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = Path(self._get_output_dir(trial=trial))
        final = run_dir / f"checkpoint-{self.state.global_step}"
        if self.args.save_strategy != SaveStrategy.NO and self.state.best_global_step:
            best = run_dir / f"checkpoint-{self.state.best_global_step}"
            if best == final or best.exists():
                self.state.best_model_checkpoint = str(best)
        with writing(final, writer=self.args.should_save, gather=self.ranks.exchange) as folder:
            self._write_checkpoint(str(folder))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            self._rotate(run_dir)

    def _write_checkpoint(self, folder: str) -> None:
        self.save_model(folder, _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
            save_state(Path(folder), self.args.process_index, self._state())
            if self.args.should_save:
                save_callbacks(Path(folder), self.callback_handler.callbacks)
        if self.args.should_save:
            self._note_callbacks()
            self.state.save_to_json(str(Path(folder) / "trainer_state.json"))

    def _state(self) -> dict[str, Any]:
        source = self._source.state_dict()
        if self._drawn is not None and self._drawn[0] == self.state.global_step:
            source = self._drawn[1]  # saved in the middle of a step, which a resumed run takes again
        return {
            "format": 1,
            "world": self.args.world_size,
            "source": source,
            "progress": self._progress(),
            "device_rng": [] if self.spec.name == "cpu" else rng_state(self.spec),
        }

    def _note_callbacks(self) -> None:
        """As transformers does: the state of callbacks that export one, in `trainer_state.json`."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(callback.state())
                else:
                    self.state.stateful_callbacks[name] = callback.state()

    def _rotate(self, run_dir: Path) -> None:
        limit = self.args.save_total_limit
        if not limit or limit < 0:
            return
        folders = [Path(folder) for folder in sort_checkpoints(output_dir=str(run_dir), use_mtime=True)]
        kept = {folders[-1]}
        if self.state.best_model_checkpoint is not None:
            kept.add(Path(self.state.best_model_checkpoint))
        surplus = max(0, len(folders) - max(limit, len(kept)))
        for folder in [folder for folder in folders if folder not in kept][:surplus]:
            remove(folder)
