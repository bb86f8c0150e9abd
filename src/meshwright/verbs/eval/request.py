"""Arguments of `evaluate`, checked before torch and the harness are imported."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.preparation import check_text
from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.extras import require
from meshwright.store.run_folder import LAST, check_model
from meshwright.verbs.eval.task_files import task_configs


def check_request(
    model: Path, *, tasks: Sequence[str] = (), against: Path | None = None, adapters: Mapping[str, Any] | None = None,
    data: str | Path | None = None, dtype: str | None = None, sequences: int = 0, limit: int | None = None,
    shots: int | None = None, checkpoint: str = LAST,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the names and configurations of the tasks for the harness.

    Raises ArgumentError for arguments out of range or in conflict, RunError without a model, DataError for `tasks` and
    `data`, PlanError without the extra `eval`.
    """
    if tasks and data is not None:
        raise ArgumentError(
            "tasks", tasks[0], f"and {argument('data', data)} cannot be scored together", "give one of them"
        )
    for name, number, least in (("limit", limit, 1), ("shots", shots, 0), ("sequences", sequences, 0)):
        if number is not None and number < least:
            raise ArgumentError(name, number, f"must be {least} or more")
    check_model(model, dtype=dtype, checkpoint=checkpoint)
    if against is not None:
        check_model(against, named="against")
        if adapters:
            raise ArgumentError(
                "against",
                against,
                "cannot be combined with adapters",
                "leave one of them out. Adapters are compared with the model itself",
            )
    if data is not None:
        check_text(data)
    if tasks:
        require("eval", f"tasks={tasks[0]}")
    return task_configs(tasks) if tasks else []
