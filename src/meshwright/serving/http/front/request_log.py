"""Log with one line per admitted request: who, what, how much, how long. It never contains text of requests."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from meshwright.serving.http.request.engine_task import EngineTask
from meshwright.spec.errors import printable

Write = Callable[[str], None]
LONGEST_USER = 40


def to_stderr(line: str) -> None:
    """Print a line of the log."""
    print(line, file=sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Facts about a request, logged when it has ended."""

    tenant: str
    route: str
    user: str = ""
    id: str = "-"
    status: int = 200
    reason: str = ""
    """Reason for an early end."""
    tasks: list[EngineTask] = field(default_factory=list)
    arrived: float = field(default_factory=monotonic)

    @property
    def line(self) -> str:
        """Fields as NAME=VALUE, so programs can read them too."""
        now = monotonic()
        words = [time.strftime("%H:%M:%S"), self.route, str(self.status), f"{now - self.arrived:.3f} s", self.tenant]
        if self.tasks:
            cached, new = sum(task.cached for task in self.tasks), sum(task.tokens for task in self.tasks)
            words.append(f"prompt={sum(len(task.prompt) for task in self.tasks)} cached={cached} new={new}")
        first_tokens = [task.first_token_at for task in self.tasks if task.first_token_at is not None]
        words += [f"first={min(first_tokens) - self.arrived:.3f}s"] if first_tokens else []
        words += [self.id] if self.id != "-" else []
        words += [f"user={printable(self.user)[:LONGEST_USER]}"] if self.user else []
        words += [self.reason] if self.reason else []
        return " ".join(words)
