"""A trained model from where it lies: a run folder, one of its checkpoints, or a Hugging Face directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.model import Transformer, build
from meshwright.model.hub import import_folder
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError, RunError
from meshwright.store import checkpoint_folder
from meshwright.store.model_weights import locate, weights
from meshwright.train.device import pick_device
from meshwright.train.precision import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model ready to answer, and what was found beside it."""

    model: Transformer
    tokenizer: Tokenizer | None
    """None = the Hugging Face directory holds none."""
    tokenizer_file: str
    """As `data.tokenizer` takes it."""
    plan: Plan | None
    """Of the run; None for a Hugging Face directory."""
    stop_ids: tuple[int, ...]
    """Tokens that end a text."""


def open_model(path: Path, dtype: str | None) -> Opened:
    """Load weights in `dtype` (fp32, bf16, fp16; None = as they were trained or stored).

    fp32 of a run in less are its master weights. RunError where `path` is neither run nor directory; CheckpointError
    or HubError where it is damaged.
    """
    if dtype is not None and dtype not in DTYPES:
        raise PlanError(f"--dtype {dtype} is not known: take one of {', '.join(DTYPES)}")
    if (path / "plan.yaml").is_file() or checkpoint_folder.is_one(path):
        return _open_run(path, dtype)
    if (path / "config.json").is_file():
        return _open_hub(path, dtype)
    what = "has neither plan.yaml nor config.json" if path.is_dir() else "does not exist"
    raise RunError(f"{path} {what}: give a run folder, one of its checkpoints, or a Hugging Face directory")


def _open_run(path: Path, dtype: str | None) -> Opened:
    run, checkpoint = locate(path)
    tokenizer = run.known_tokenizer(checkpoint)
    wanted = DTYPES[dtype or run.plan.recipe.precision]
    model = build(run.plan.model, dtype=wanted, device=pick_device(), initialize=False)
    places = model.state_dict()
    for name, tensor in weights(checkpoint, wanted, verified=True):
        places[name].copy_(tensor)
    return Opened(
        model=model.eval(),
        tokenizer=tokenizer,
        tokenizer_file=str(run.tokenizer),
        plan=run.plan,
        stop_ids=() if tokenizer.eos is None else (tokenizer.eos,),
    )


def _open_hub(path: Path, dtype: str | None) -> Opened:
    folder = import_folder(path)
    model = build(folder.shape, dtype=DTYPES[dtype] if dtype else folder.dtype, device=pick_device(), initialize=False)
    places = model.state_dict()

    def put(name: str, tensor: Tensor) -> None:
        places[name].copy_(tensor)

    folder.load(put)
    return Opened(
        model=model.eval(),
        tokenizer=Tokenizer.load(folder.tokenizer) if folder.tokenizer else None,
        tokenizer_file=str(folder.tokenizer or ""),
        plan=None,
        stop_ids=_ids(folder.generation.get("eos_token_id")),
    )


def _ids(value: object) -> tuple[int, ...]:
    """A generation config holds one id, a list of them, or none."""
    many: Sequence[object] = value if isinstance(value, list) else [value]
    return tuple(number for number in many if isinstance(number, int))
